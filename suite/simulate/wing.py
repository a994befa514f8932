"""The addition of this wing to the core: ``shardproof simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer


class Simulation(Wing):
    """One rank of a large world, simulated on this machine."""

    examples = (
        "shardproof simulate llama-7b --mesh shard=64     what one rank of 64 holds and sends",
    )

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``simulate``."""
        from shardproof.simulate import command

        short = "Run the code of one rank of a large world without values."
        app.command("simulate", short_help=short)(command.simulate)


WING = Simulation()
