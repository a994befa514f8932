"""The contribution of this wing: the commands ``shardproof site`` and ``shardproof history``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Site(Wing):
    """Pages of several runs, and series of runs."""

    examples = ("shardproof site RUN RUN --output DIR             browse runs as static pages",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``site`` and ``history``."""
        from shardproof.site import command

        short = "Write runs and baselines as static pages that open offline."
        app.command("site", short_help=short)(command.site)
        short = "Keep a series of runs, and name the commit at which a result changed."
        app.add_typer(command.history, name="history", short_help=short)


WING = Site()
