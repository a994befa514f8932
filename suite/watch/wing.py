"""The contribution of this wing: the command ``shardproof watch``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Watch(Wing):
    """A training script under observation."""

    examples = ("shardproof watch train.py --nproc 4              watch a training script",)
    first = ("shardproof watch train.py --nproc 4          a training script, unchanged",)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``watch``."""
        from shardproof.watch import command

        app.command(
            cls=command.ForAScript, short_help="Run a training script; report where ranks differ."
        )(command.watch)


WING = Watch()
