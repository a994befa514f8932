"""The contribution of this wing: the command ``shardproof locate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Locate(Wing):
    """The first difference of a failing case."""

    examples = ("shardproof locate CASE                           the line where it goes wrong",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``locate``."""
        from shardproof.locate import command

        short = "Find the line where a failing case first differs from the oracle."
        app.command("locate", short_help=short)(command.locate)


WING = Locate()
