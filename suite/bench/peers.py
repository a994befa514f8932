"""Every reference strategy beside its upstream peer: one table with intervals, for the README.

    make peers     times scenarios/speed/peers.yaml and puts the table between the markers

Only a run of all pairs of that scenario gives the table.

Pure functions of comparisons as a run holds them.  A is the reference; where it is not the faster
one, the verdict says whether that is more than the margin.  Verdicts are those beside all other
rows (:func:`shardproof.bench.stats.family`): a table of twenty finds a difference by chance in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.bench import sides, stats
from shardproof.bench.tables import Line, interval
from shardproof.errors import Problem, SelectionError
from shardproof.runs.run_folder import Run
from shardproof.table import Table

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"
#: What the table is made of: every reference strategy has its pair there.
SCENARIO = "peers"
OURS = "reference"
#: Families that are not somebody else's system.
_NOT_UPSTREAM = (OURS, "plain", "mutants")
#: Options that tell one row from the next.
_TELLING = ("schedule", "sequence_parallel", "sharding_strategy", "data")
HEADINGS = (
    "reference",
    "upstream peer",
    "verdict",
    "reference / upstream [95 %]",
    "margin",
    "peak",
)


def lines_of(run: Run) -> list[Line]:
    """The comparisons of a reference strategy with an upstream system, in the order of timing."""
    return [line for line in run.benches if is_peers(line)]


def is_peers(line: Line) -> bool:
    """Whether A is ours and B somebody else's."""
    a, b = (str(line["pair"][letter]["implementation"]) for letter in ("a", "b"))
    return a.startswith(f"{OURS}/") and b.split("/")[0] not in _NOT_UPSTREAM


def missing(run: Run) -> list[str]:
    """Names of the pairs of ``scenarios/speed/peers.yaml`` of which ``run`` has no line.

    Sides and name tell a pair; with a package missing its line is a ``precondition``.  A part of
    the scenario, or a pair of the command line, is no table of every strategy.
    """
    there = {_told(line["pair"]) for line in run.benches}
    return [pair.name for pair in sides.read([SCENARIO]) if _told(pair.to_dict()) not in there]


def why_not(missing: Sequence[str]) -> str:
    """Why a run with these pairs ``missing`` has no table of peers, in a clause."""
    names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return f"only a run of the whole scenario `{SCENARIO}` gives one, and this has no {names}"


def _told(pair: Mapping[str, Any]) -> tuple[str, str, str]:
    return pair["name"], pair["a"]["implementation"], pair["b"]["implementation"]


def table(lines: Sequence[Line]) -> str:
    """The table as Markdown, and below it how to read it."""
    told = [line for line in lines if is_peers(line)]
    report = stats.family(told)
    body = [
        _row(line, report[line["id"]]["verdict"] if line["id"] in report else "") for line in told
    ]
    return f"{Table('', HEADINGS, body).markdown()}\n{_notes(told)}"


def _row(line: Line, verdict: str) -> tuple[str, ...]:
    return (
        _side(line, "a"),
        _side(line, "b"),
        verdict or _broken(line),
        interval(line) if "ratio" in line else "-",
        f"{line['margin']:.1%}" if "margin" in line else "-",
        _peak(line),
    )


def _side(line: Line, letter: str) -> str:
    """Name, the options that tell one row from the next, and a mesh of several axes."""
    side, mesh = line["pair"][letter], line["meshes"].get(letter) or {}
    words = [
        key if value is True else f"{value}"
        for key, value in side["options"].items()
        if key in _TELLING
    ]
    if side["options"].get("reshard_after_forward") is False:
        words.append("kept whole after forward")
    shape = " x ".join(f"{axis} {n}" for axis, n in mesh.items())
    words += [shape] if len(mesh) > 1 else []
    return f"{side['implementation']}" + (f" ({', '.join(words)})" if words else "")


def _broken(line: Line) -> str:
    """What stands where there is nothing to compare, in one clause."""
    return f"{line['verdict']}: {line['reason'].splitlines()[0][:120]}"


def _peak(line: Line) -> str:
    told = line.get("memory")
    if not told or "problem" in told:
        return "-"
    return f"{told['ratio']:.3f}" + ("" if told["kind"] == "ledger" else " (advisory)")


# ------------------------------------------------------------------------------------- a section


def section(run: Run) -> str:
    """The table of ``run`` with what was measured where, as it stands between the markers.

    :raises SelectionError: the run has not every pair of the scenario.
    """
    absent = missing(run)
    if absent:
        remedy = "time them: shardproof bench peers"
        raise SelectionError(Problem(why_not(absent), remedy, str(run.path)))
    told = lines_of(run)
    blocks = max(line["pair"]["blocks"] for line in told)
    again = f"`shardproof bench {SCENARIO} --blocks {blocks}`"
    return f"{table(told)}\n{run.provenance} Again: {again}.\n"


def _notes(lines: Sequence[Line]) -> str:
    """How to read the table, with what is the same in all rows."""
    told = [line for line in lines if "ratio" in line]
    if not told:
        return "Nothing was timed.\n"
    first = told[0]["pair"]
    work = first["workload"]
    blocks = _span([line["blocks"] for line in told])
    halves = [line["aa"]["half_width"] for line in told if line.get("aa")]
    twins = (
        f"; a side beside its own twin: +-{min(halves):.1%} to {max(halves):.1%}" if halves else ""
    )
    ranks = _span([line["pair"]["world"] for line in told])
    return (
        f"Above 1 the reference takes longer. {work['name']} {first['size']}, "
        f"{first['optimizer']['name']}, {first['dtype']}, {ranks} {first['backend']} ranks, "
        f"{blocks} blocks A B B A{twins}. Verdicts are those beside all other rows (Holm); `same` "
        f"is certain to be within the margin. Peak: bytes of a step, reference over upstream.\n"
    )


def _span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"
