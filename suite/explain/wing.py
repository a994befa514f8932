"""The part of this wing that the core sees: the command ``shardproof explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Explain(Wing):
    """Explanations of cases, checks and verdicts."""

    examples = ("shardproof explain fail                          what a verdict means",)
    first = (
        "shardproof explain fail                      what a verdict, a check or a case means",
    )

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``explain``."""
        from shardproof.explain import command

        short = "Explain a case, a check or a verdict."
        app.command("explain", short_help=short)(command.explain)


WING = Explain()
