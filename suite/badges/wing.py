"""The part of this wing that the core sees: the command ``shardproof badges``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Badges(Wing):
    """Pictures of verdicts."""

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``badges``."""
        from shardproof.badges import command

        app.command("badges", short_help="Draw a run's verdicts as SVG badges.")(command.badges)


WING = Badges()
