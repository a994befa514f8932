"""The addition of this wing to the core: ``shardproof simulate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from shardproof.wings import Wing

if TYPE_CHECKING:
    import typer

    from shardproof.case import Case
    from shardproof.evidence.records import RankRecord
    from shardproof.simulate.compared import Compared


class Simulation(Wing):
    """One rank of a large world, simulated on this machine."""

    examples = (
        "shardproof simulate llama-7b --mesh shard=64     bytes and seconds of one rank of 64",
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

    def simulated(self, training: Mapping[str, Any]) -> Mapping[str, Fraction]:
        """Figures of ``training`` (``calls.figures_of``)."""
        from shardproof.simulate.calls import figures_of

        return figures_of(training)

    def compared_with_simulation(self, case: Case, records: Sequence[RankRecord]) -> Compared:
        """Simulate every rank of ``case`` and compare it with its record."""
        from shardproof.simulate.compared import compared

        return compared(case, records)


WING = Simulation()
