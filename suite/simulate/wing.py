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
        "shardproof plan llama3-70b --gpus 64             the fastest mesh and strategy that fit",
    )

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``simulate`` and ``plan``."""
        from shardproof.simulate import command
        from shardproof.simulate.plan import command as plan

        short = "Run the code of one rank of a large world without values."
        app.command("simulate", short_help=short)(command.simulate)
        short = "Search the fastest mesh and strategy that fit a cluster's memory."
        app.command("plan", short_help=short)(plan.plan)


WING = Simulation()
