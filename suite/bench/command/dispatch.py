"""Which command the words of ``shardproof bench`` mean: ``bench strong`` is ``scaling strong``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from shardproof.commands import options
from shardproof.errors import Problem, SelectionError

#: Commands that are chosen by what words name.
PAIR, SPEED, SCALING = "pair", "speed", "scaling"


class ByWhatIsTimed(TyperGroup):
    """The commands of ``bench``, whose name may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every group, with the command that the words mean."""
        return super().parse_args(ctx, self.named(args))

    def named(self, args: Sequence[str]) -> list[str]:
        """``args`` with the name of a command first.

        :raises SelectionError: the words name implementations, and not two; or files of two kinds.
        """
        words = list(self._words(args))
        if not words and any(word in ("-h", "--help") for word in args):
            return [*args]
        if words and words[0] in self.commands:
            rest = [*args]
            rest.remove(words[0])
            return [words[0], *rest]
        return [meant(words), *args]

    def _words(self, args: Sequence[str]) -> Iterator[str]:
        """Words that are neither options nor their values, up to an option that nothing has."""
        params = [option for command in self.commands.values() for option in command.params]
        flags = {flag: option for option in params for flag in option.opts}
        rest = iter(args)
        for word in rest:
            if word == "--":
                yield from rest
            elif not word.startswith("-"):
                yield word
            elif word in flags:
                if not getattr(flags[word], "is_flag", False):
                    next(rest, None)
            elif word.split("=")[0] not in flags and word[:2] not in flags:
                return


class OfOneKind(TyperCommand):
    """Says of an option that it does not have which command of ``bench`` has it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every command.

        :raises SelectionError: an option of another command.
        """
        try:
            return super().parse_args(ctx, args)
        except options.NOT_UNDERSTOOD as error:
            option = getattr(error, "option_name", None)
            others: dict[str, Any] = ctx.parent.command.commands if ctx.parent else {}
            having = [name for name, c in others.items() if any(option in p.opts for p in c.params)]
            if not having:
                raise
            what = f"{option} is not an option of `bench {ctx.info_name}`"
            remedy = f"leave {option} out, or use `bench {'` or `bench '.join(having)}`"
            raise SelectionError(Problem(what, remedy, option)) from None


def meant(words: Sequence[str]) -> str:
    """The command for what ``words`` name: two implementations, or scenarios of one kind.

    :raises SelectionError: an unknown name, scenarios of both kinds, or not two implementations.
    """
    from shardproof.bench import sides

    if _are_implementations(words):
        return PAIR
    kinds = {sides.kind_of(path) for path in sides.files(words)} if words else set()
    if SCALING in kinds and len(kinds) > 1:
        remedy = "run one command for each kind"
        raise SelectionError(
            Problem("speed and scaling scenarios are mixed", remedy, " ".join(words))
        )
    return SCALING if SCALING in kinds else SPEED


def _are_implementations(names: Sequence[str]) -> bool:
    """Whether ``names`` are a pair; one name alone is a speed scenario or a mistake."""
    from shardproof import registry
    from shardproof.bench import sides

    timed = sides.known()
    if all(n in timed or n.endswith((".yaml", ".yml")) or Path(n).is_dir() for n in names):
        return False
    known = registry.names()
    if not any("/" in name or ":" in name or name in known for name in names):
        return False
    if len(names) != 2:
        what = f"a pair is two implementations, not {len(names)}"
        raise SelectionError(Problem(what, "name exactly two implementations", " ".join(names)))
    for name in names:
        registry.check(name)
    return True
