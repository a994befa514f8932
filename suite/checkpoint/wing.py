"""The contribution of this wing: the commands ``shardproof checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Checkpoints(Wing):
    """Checkpoints as files; no case is judged by them."""

    examples = ("shardproof checkpoint verify PATH                check a checkpoint's bytes",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``checkpoint``."""
        from shardproof.checkpoint import command

        short = "Inspect, verify, diff, convert checkpoints."
        app.add_typer(command.checkpoints, name="checkpoint", short_help=short)


WING = Checkpoints()
