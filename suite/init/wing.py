"""The part of this wing that the core sees: the commands ``init`` and ``badges``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Init(Wing):
    """Files for a repository of your own."""

    examples = ("shardproof init mine:MyDDP                       its test, gate and workflow",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``init`` and ``badges``."""
        from shardproof.init import badges, command

        short = "Write a test, policy, baseline and workflow for your class."
        app.command("init", short_help=short)(command.init)
        app.command("badges", short_help="Draw a run's verdicts as SVG badges.")(badges.badges)


WING = Init()
