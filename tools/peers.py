"""Every reference strategy compared with its upstream peer: one table with intervals.

    make peers                                        times scenarios/speed/peers.yaml, then
    python -m tools.peers RUN results/README.md       puts the table between the page's markers

A is the reference.  Only a run of the whole scenario gives the table: a part of it, or a pair of
the command line, is no table of every strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardproof.bench import lines as stored
from shardproof.bench import sides, stats
from shardproof.bench.lines import Memory, PairLine
from shardproof.bench.subjects import Pair
from shardproof.bench.tables import interval
from shardproof.errors import Problem, SelectionError
from shardproof.runs.run_folder import Run
from shardproof.table import Table, some
from tools import pages

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"
#: What the table is made of: every reference strategy has its pair there.
SCENARIO = "peers"
OURS = "reference"
#: Families that are not somebody else's system.
_NOT_UPSTREAM = (OURS, "plain", "mutants")
#: Options that distinguish one row from the next.
_DISTINGUISHING = ("schedule", "sequence_parallel", "sharding_strategy", "data")
HEADINGS = (
    "reference",
    "upstream peer",
    "verdict",
    "reference / upstream [95 %]",
    "margin",
    "peak",
)


def lines_of(run: Run) -> list[PairLine]:
    """The comparisons of a reference strategy with an upstream system, in the order of timing."""
    return [line for line in stored.pairs(run) if is_peers(line)]


def is_peers(line: PairLine) -> bool:
    a, b = line.pair.a.implementation, line.pair.b.implementation
    if line.pair.action != "step":
        return False
    return a.startswith(f"{OURS}/") and b.split("/")[0] not in _NOT_UPSTREAM


def missing(run: Run) -> list[str]:
    """Names of the pairs of ``scenarios/speed/peers.yaml`` without a line in ``run``.

    Sides and name identify a pair; with a package missing its line is a ``precondition``.
    """
    there = {_key(line.pair) for line in stored.pairs(run)}
    return [pair.name for pair in sides.read([SCENARIO]) if _key(pair) not in there]


def _key(pair: Pair) -> tuple[str, str]:
    return pair.name, pair.versus


def table(lines: Sequence[PairLine]) -> str:
    """The table as Markdown, followed by notes on how to read it."""
    shown = [line for line in lines if is_peers(line)]
    report = stats.family(shown)
    body = [_row(line, report[line.id].verdict if line.id in report else "") for line in shown]
    return f"{Table('', HEADINGS, body).markdown()}\n{_notes(shown)}"


def _row(line: PairLine, verdict: str) -> tuple[str, ...]:
    figures = line.figures
    first, *_ = line.reason.splitlines() or [""]
    return (
        _side(line, "a"),
        _side(line, "b"),
        verdict or f"{line.verdict}: {first[:120]}",
        "-" if figures is None else interval(figures),
        "-" if figures is None else f"{figures.margin:.1%}",
        _peak(line),
    )


def _side(line: PairLine, letter: str) -> str:
    """Name, the options that distinguish rows, and a mesh of several axes."""
    side, mesh = line.pair.side(letter), line.meshes.get(letter, {})
    words = [
        key if value is True else f"{value}"
        for key, value in side.options.items()
        if key in _DISTINGUISHING
    ]
    if side.options.get("reshard_after_forward") is False:
        words.append("kept whole after forward")
    shape = " x ".join(f"{axis} {n}" for axis, n in mesh.items())
    words += [shape] if len(mesh) > 1 else []
    return side.implementation + (f" ({', '.join(words)})" if words else "")


def _peak(line: PairLine) -> str:
    if not isinstance(line.memory, Memory):
        return "-"
    return f"{line.memory.ratio:.3f}" + ("" if line.memory.kind == "ledger" else " (advisory)")


def section(run: Run) -> str:
    """The table of ``run`` with its provenance, as inserted between the markers.

    :raises SelectionError: the run has not every pair of the scenario.
    """
    absent = missing(run)
    if absent:
        what = f"only a run of the whole scenario `{SCENARIO}` gives a table, and this has no "
        remedy = "time them: shardproof bench peers"
        raise SelectionError(Problem(what + some(absent, 4), remedy, str(run.path)))
    lines = lines_of(run)
    blocks = max(line.pair.blocks for line in lines)
    again = f"`shardproof bench {SCENARIO} --blocks {blocks}`"
    return f"{table(lines)}\n{run.provenance} Again: {again}.\n"


def _notes(lines: Sequence[PairLine]) -> str:
    timed = [(line, line.figures) for line in lines if line.figures is not None]
    if not timed:
        return "Nothing was timed.\n"
    pair = timed[0][0].pair
    blocks = _span([line.blocks for line, _ in timed])
    halves = [figures.aa.half_width for _, figures in timed if figures.aa is not None]
    twins = f"; A against A: +-{min(halves):.1%} to {max(halves):.1%}" if halves else ""
    ranks = _span([line.pair.world for line, _ in timed])
    return (
        f"Above 1 the reference takes longer. {pair.workload.name} {pair.size}, "
        f"{pair.optimizer.name}, {pair.dtype}, {ranks} {pair.backend} ranks, "
        f"{blocks} blocks A B B A{twins}. Verdicts are adjusted for the number of rows (Holm); "
        "`same`: the interval lies within the margin. Peak: bytes of a step, reference over "
        "upstream.\n"
    )


def _span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Put the table of a run into a page; exit code 2 if the run has none."""
    return pages.main("peers", "table of peers", section, (BEGIN, END), arguments)


if __name__ == "__main__":
    sys.exit(main())
