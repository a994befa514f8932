"""The group of all commands: what each of them takes, and what is said to who typed none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardproof.commands import console, options, project
from shardproof.errors import Problem, SelectionError

#: What a person sees who typed no command.
FIRST = """\
Shardproof compares distributed training with the same training in one process.  Begin with:

  shardproof run ddp-gpt -k "quick and fp64"   a small model on several ranks
  shardproof run ddp-gpt --impl mine:MyDDP     the class MyDDP in mine.py
  shardproof report                            the newest run again
{more}

All commands: shardproof --help"""
#: Stands before what typer says of a value of a list of choices.
_OF_PYDANTIC = "Value error, "


class Commands(TyperGroup):
    """All commands.  Each takes ``--json``, and defaults from the user's ``pyproject.toml``."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        [as_json] = _as_json()
        for command in leaves(self):
            # Words that are passed on to another command are not ours to take.
            if not command.ignore_unknown_options and "--json" not in _flags(command):
                command.params.append(as_json)

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """As every group; values that were not typed are those of the project."""
        if parent is None:
            extra.setdefault("default_map", project.defaults(self, args))
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """As every group, with one document for ``--json``, and the file of a bad default."""
        try:
            with console.documented():
                return super().invoke(ctx)
        except options.NOT_UNDERSTOOD as error:
            error.message = error.message.replace(_OF_PYDANTIC, "")
            where: Any = getattr(error, "ctx", None)
            option: Any = getattr(error, "param", None)
            source = where.get_parameter_source(option.name) if where and option else None
            if source is None or source.name != "DEFAULT_MAP":
                raise
            file, key = str(project.file()), option.opts[0].lstrip("-")
            raise SelectionError(Problem(error.format_message(), "correct it", key, file)) from None


def leaves(command: Any) -> Iterator[Any]:
    """The commands of a group that are no groups."""
    for one in getattr(command, "commands", {}).values():
        yield from leaves(one) if hasattr(one, "commands") else (one,)


def _flags(command: Any) -> set[str]:
    return {flag for option in command.params for flag in option.opts}


def _as_json() -> list[Any]:
    """The option ``--json`` as typer makes it, which is given to no function."""
    app = typer.Typer(add_completion=False)
    app.command()(_command)
    made: Any = typer.main.get_command(app)
    return list(made.params)


def _collect(wanted: bool) -> None:
    if wanted:
        console.collect()


def _command(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            callback=_collect,
            expose_value=False,
            is_eager=True,
            help="print tables as one JSON document",
        ),
    ] = False,
) -> None: ...
