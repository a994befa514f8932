"""What this wing adds to the core: ``shardproof estimate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Estimates(Wing):
    """Memory and traffic of training, by closed formulas."""

    examples = (
        "shardproof estimate 7b --gpus 64 --memory 80GB             does it fit, and what is sent",
    )
    first = ("shardproof estimate 7b --gpus 8              memory before you train",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``estimate``."""
        from shardproof.estimate import command

        short = "Say what training a model holds and sends, without running it."
        app.command("estimate", short_help=short)(command.estimate)


WING = Estimates()
