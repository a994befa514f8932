"""Defaults of options: the table ``[tool.shardproof]`` of a project's ``pyproject.toml``.

    [tool.shardproof]            # for every command that has the option
    backend = ["gloo"]
    jobs = 4

    [tool.shardproof.run]        # for one command
    tier = "full"

What is typed takes precedence.  The file is the first in the working folder or above it that has
this table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.errors import InputError, Problem, nearest
from shardproof.files import DAMAGE, read_input

_NAME = "pyproject.toml"
_TABLE = "tool.shardproof"
#: Options that belong to one command line: they name a run, or say what is done once.
_TYPED = (
    *("campaign", "case", "collect-only", "dry-run", "force", "help", "into", "json"),
    *("last-failed", "lf", "output", "rerun-failed", "results", "resume", "seed", "shard"),
)
#: With these words another run, or chance, has the cases: defaults that choose cases do not apply.
_CHOOSE = ("--resume", "--rerun-failed", "--last-failed", "--lf", "--campaign", "--case")
_CHOSEN = ("backend", "depth", "expression", "like", "tier", "world")


def file() -> Path | None:
    """The file whose defaults hold here; ``None``: there is none."""
    here = Path.cwd()
    for path in (folder / _NAME for folder in (here, *here.parents)):
        if path.is_file() and _TABLE in path.read_text(encoding="utf-8", errors="replace"):
            return path
    return None


def defaults(group: Any, args: Sequence[str]) -> dict[str, Any]:
    """The values of options by command, as click takes them; ``args``: what was typed.

    :raises InputError: a file that is no TOML, or a key that no command has.
    """
    path = file()
    if path is None:
        return {}
    try:
        table = tomllib.loads(read_input(path).decode()).get("tool", {}).get("shardproof", {})
    except (OSError, *DAMAGE) as error:
        problem = Problem(f"cannot be read: {error}", "correct it", file=str(path))
        raise InputError(problem) from None
    if problems := list(_unknown(group, table, str(path), _TABLE)):
        raise InputError(problems)
    less = _CHOSEN if any(word.split("=")[0] in _CHOOSE for word in args) else ()
    return _by_command(group, table, {}, less)


def _unknown(command: Any, table: Mapping[str, Any], file: str, name: str) -> Iterator[Problem]:
    """Keys of ``table`` that are neither options of ``command`` nor commands in it."""
    commands, known = getattr(command, "commands", {}), _options(command)
    for key, value in table.items():
        if isinstance(value, Mapping) and key in commands:
            yield from _unknown(commands[key], value, file, f"{name}.{key}")
        elif key in _TYPED:
            what = f"[{name}]: this option cannot be set here"
            yield Problem(what, "give the option on the command line", key, file)
        elif key not in known or isinstance(value, Mapping):
            valid = (*known, *commands)
            yield Problem(f"[{name}]: unknown key", nearest(key, valid, "keys"), key, file)


def _by_command(
    command: Any, table: Mapping[str, Any], above: Mapping[str, Any], less: Sequence[str]
) -> dict[str, Any]:
    own = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    values = {**above, **own}
    if commands := getattr(command, "commands", {}):
        return {
            name: _by_command(one, table.get(name, {}), values, less)
            for name, one in commands.items()
        }
    known = _options(command)
    many = {key for key, option in known.items() if getattr(option, "multiple", False)}
    return {
        known[key].name: [value] if key in many and isinstance(value, str) else value
        for key, value in values.items()
        if key in known and known[key].name not in less
    }


def _options(command: Any) -> dict[str, Any]:
    """Options of ``command``, or of all commands in it, by long names without dashes."""
    if commands := getattr(command, "commands", {}):
        return {key: one for each in commands.values() for key, one in _options(each).items()}
    found: dict[str, Any] = {}
    for option in command.params:
        long = [flag[2:] for flag in option.opts if flag.startswith("--")]
        if option.param_type_name == "option":
            found |= dict.fromkeys(long or [option.name], option)
    return {key: one for key, one in found.items() if key not in _TYPED}
