"""The contribution of this wing: ``shardproof bench``, its results, and its scenario files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.table import number
from shardproof.wings import FileKind, LineKind, NodeCommand, NodePlan, Wing

if TYPE_CHECKING:
    import typer

PAIRS = LineKind("bench", "comparison", "comparisons", "Comparisons of times")
CELLS = LineKind("scaling", "scaling cell", "scaling", "Scaling")
COLLECTIVES = LineKind(
    "collective", "measured collective", "collectives", "Collectives", is_judged=False
)
#: What becomes of each comparison beside all others of the run.
REPORT = LineKind("bench report", is_result=False)


def _speed() -> type[Any]:
    from shardproof.bench.sides import SpeedScenario

    return SpeedScenario


def _scaling() -> type[Any]:
    from shardproof.bench.scaling.matrix import ScalingScenario

    return ScalingScenario


def _pairs_in(path: Path) -> str:
    from shardproof.bench.sides import read

    return number(len(read([str(path)])), "pair")


def _cells_in(path: Path) -> str:
    from shardproof.bench.scaling.matrix import read

    cells = read([path])
    return f"{cells[0].name}, {number(len(cells), 'cell')}"


_COMMAND = "shardproof bench", "timed"


class OnNodes(NodeCommand):
    """``shardproof cluster bench``."""

    name = "bench"
    help = """Run `shardproof bench` with ranks in containers. Its options also work.

    \b
    shardproof cluster bench reference/ddp pytorch/ddp          2 nodes with 1 rank each
    shardproof cluster bench strong --world 2 --bandwidth 100mbit
    shardproof cluster bench collectives --nodes 2 --ranks-per-node 2
    shardproof cluster bench cluster-strong                     efficiency by bandwidth

    A scaling scenario that asks for bandwidths is timed at each, in nodes made for it, into one run
    folder. All else is as in `cluster run`. Each rank has cores of its own, if there are
    enough. In `collectives` the algorithm `hierarchical` uses these nodes.
    """

    def planned(self, words: Sequence[str]) -> NodePlan:
        from shardproof.bench.command import planned

        return planned(words)


class Bench(Wing):
    """Times of pairs of implementations, of more and more ranks, of collectives."""

    examples = ("shardproof bench reference/ddp pytorch/ddp       compare speed on this machine",)
    line_kinds = PAIRS, CELLS, COLLECTIVES, REPORT
    file_kinds = (
        FileKind("speed", "pairs", *_COMMAND, _speed, _pairs_in),
        FileKind("scaling", "mode|worlds|implementations", *_COMMAND, _scaling, _cells_in),
    )
    node_commands = (OnNodes(),)

    def add_commands(self, app: typer.Typer) -> None:
        """Add ``bench``."""
        from shardproof.bench import command

        short = "Measure how fast implementations are, and how they scale."
        app.add_typer(command.app, name="bench", short_help=short)

    def verify(self, run: Any) -> Iterable[str]:
        """Judge raw times again."""
        from shardproof.bench import evidence

        return evidence.verify(run)

    def after_merge(self, folder: Any) -> None:
        """Write the verdict of each comparison among all others."""
        from shardproof.bench.evidence import keep_report

        keep_report(folder)

    def entries(self, run: Any, version: Callable[[str], Any]) -> Iterable[Any]:
        """Ratios, exact bytes and scores."""
        from shardproof.bench.compared import entries

        return entries(run, version)

    def compared(self, pairs: Sequence[Any]) -> Any:
        """Ratios of both runs."""
        from shardproof.bench.compared import compared

        return compared(pairs)

    def by_hardware(
        self, names: Sequence[str], reference: Any, others: Sequence[Any], only_changed: bool
    ) -> Sequence[Any]:
        """Ratios, modelled figures and scorecards of each machine."""
        from shardproof.bench.compared import by_hardware

        return by_hardware(names, reference, others, only_changed)

    def sections(self, run: Any) -> Sequence[Any]:
        """A section for each kind of results."""
        from shardproof.bench.reported import sections

        return sections(run)

    def limits(self, run: Any) -> Iterable[Any]:
        """Times that decide nothing."""
        from shardproof.bench.reported import limits

        return limits(run)


WING = Bench()
