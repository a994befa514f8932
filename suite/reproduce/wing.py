"""The contribution of this wing: the command ``shardproof reproduce``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Reproduce(Wing):
    """The cases of a run once more."""

    examples = ("shardproof reproduce RUN                         run its cases again, here",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``reproduce``."""
        from shardproof.reproduce import command

        short = "Run a run's cases again and compare the results."
        app.command("reproduce", short_help=short)(command.reproduce)


WING = Reproduce()
