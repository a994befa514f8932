"""The line of a comparison or a cell in a run folder, and its raw times: written, read, judged
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardproof.bench import stats
from shardproof.bench.model import scorecard
from shardproof.bench.same_training import alike, losses_of, targets_of
from shardproof.bench.scaling import judge
from shardproof.bench.scaling.matrix import BASES, Cell
from shardproof.bench.session import Measured
from shardproof.bench.sides import LETTERS, Pair
from shardproof.bench.telemetry import sampling
from shardproof.files import write_whole
from shardproof.runs import run_folder

FOLDER = "times"
_COLUMNS = {
    "launch": "int32",
    "pair": "string",
    "block": "int32",
    "segment": "int32",
    "side": "string",
    "step": "int32",
    "rank": "int32",
    "seconds": "float64",
}

#: Figures that runs of earlier versions do not have.
_LATER = ("samples_per_second", "trained_alike", "scorecard")


def result(measured: Measured) -> dict[str, Any]:
    """The line of ``cases.jsonl``, judged."""
    source = measured.source or measured
    line: dict[str, Any] = {
        "id": measured.subject.id,
        "seconds": round(measured.seconds, 3),
        "problem": None if measured.problem is None else list(measured.problem),
        "probed": source.probed,
    }
    if isinstance(measured.subject, Cell):
        line |= _of_cell(measured.subject, measured, source)
        return line | judge.conclude(line, source.rows)
    line |= _of_pair(measured.subject, measured)
    return line | conclude(line, measured.rows)


def _of_pair(pair: Pair, measured: Measured) -> dict[str, Any]:
    line: dict[str, Any] = {
        "pair": pair.to_dict(),
        "meshes": measured.meshes,
        "losses": losses(measured, LETTERS),
        "memory": measured.memory,
        "strategies": measured.strategies,
        "profile": measured.profile,
        "telemetry": _telemetry(measured),
    }
    if measured.records:
        first = measured.records[0]
        line["threads"] = first[0].threads
        line["cores"] = [record.cores for record in first]
        line["segment_steps"] = [ranks[0].segment_steps["a"] for ranks in measured.records]
        line["targets_per_step"] = {side: targets_of(first, side) for side in LETTERS}
    return line


def _of_cell(cell: Cell, measured: Measured, source: Measured) -> dict[str, Any]:
    records = source.records
    sides = (*BASES, *([] if measured.refused else ["ranks"]))
    targets = {side: targets_of(records[0], side) for side in sides} if records else {}
    return {
        "mode": cell.mode,
        "implementation": cell.system.implementation,
        "backend": cell.backend,
        "world": cell.world,
        "target": cell.target,
        "cell": cell.to_dict(),
        "mesh": measured.meshes.get("ranks", {}),
        "strategy": measured.strategies.get("ranks", ""),
        "room": None if measured.room is None else asdict(measured.room),
        "measured_in": None if source is measured else source.subject.id,
        "peak_bytes": (measured.memory or {}).get("ranks"),
        "losses": losses(source, sides),
        "targets_per_step": targets,
        "segment_steps": [ranks[0].segment_steps for ranks in records],
    }


def conclude(line: Mapping[str, Any], rows: Sequence[stats.TimedStep]) -> dict[str, Any]:
    """Verdict, reason and figures that raw times and the rest of the line give."""
    judged = stats.judge(rows)
    reason = ""
    losses = line["losses"]
    same, why = alike(losses.get("a"), losses.get("b"), line["pair"]["dtype"])
    if line["problem"] is not None:
        judged["verdict"], reason = line["problem"]
    elif same is False:
        judged["verdict"], reason = "fail", why
    elif judged["verdict"] == "inconclusive" and "smallest_effect" not in judged:
        reason = f"{judged['blocks']} whole blocks: an interval needs 2"
    elif same is None:
        judged["verdict"], reason = "inconclusive", why
    elif judged["verdict"] == "inconclusive":
        reason = f"effects from {judged['smallest_effect']:.1%} on can be seen with these blocks"
    goal = line["pair"]["goal"]
    known = goal is not None and "high" in judged and same is not None
    met = judged["high"] <= goal if known else None
    rates = {}
    for side, seconds in judged.get("median_seconds", {}).items():
        rates[side] = line["targets_per_step"][side] / seconds if "targets_per_step" in line else 0
    samples = line["pair"]["workload"]["global_batch"]
    return {
        **judged,
        "reason": reason,
        "trained_alike": same,
        "scorecard": scorecard.cards(line) if same else None,
        "goal_met": met,
        "targets_per_second": rates,
        "samples_per_second": {
            side: samples / seconds for side, seconds in judged.get("median_seconds", {}).items()
        },
    }


def _telemetry(measured: Measured) -> dict[str, Any]:
    """What was seen of memory and GPUs, in launches and of each side alone."""
    seen = measured.seen
    places = [r.pci for records in measured.records for r in records if r.pci is not None]
    return {
        "launches": sampling.summary(seen, places or None) if seen.samples else None,
        "sides": measured.sides,
        "no_gpu": measured.no_gpu or None,
    }


def losses(measured: Measured, sides: Sequence[str]) -> dict[str, list[float]]:
    """The global loss of each of the first steps, by side."""
    if not measured.records:
        return {}
    return {side: losses_of(measured.records[0], side) for side in sides}


def write_times(run: Path, name: str, rows: Sequence[stats.TimedStep]) -> str:
    """Raw times as a Parquet file under ``run``; its name there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardproof.runs.records import file_name

    (run / FOLDER).mkdir(exist_ok=True)
    schema = pa.schema([(key, getattr(pa, kind)()) for key, kind in _COLUMNS.items()])
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema)
    path = run / FOLDER / f"{file_name(name)}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_whole(path, sink.getvalue().to_pybytes())
    return str(path.relative_to(run))


def load_times(path: Path) -> list[stats.TimedStep]:
    """What :func:`write_times` wrote.

    :raises RecordError: a file that cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardproof.runs.records import RecordError

    try:
        return [stats.TimedStep(**row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowException, OSError, TypeError) as error:
        raise RecordError(f"{path}: no readable times: {error}") from None


def keep(folder: run_folder.RunFolder, measured: Measured) -> dict[str, Any]:
    """Write raw times and the line of a comparison or a cell; the line.

    A refused cell's raw times are those of its source, which is kept before it.
    """
    line = result(measured)
    source = measured.source or measured
    if source is measured and source.rows:
        source.times = write_times(folder.path, measured.subject.id, source.rows)
        folder.seal(source.times)
    if source.times:
        line["times"] = source.times
    folder.add(line, measured.subject.kind)
    return line


def keep_report(folder: run_folder.RunFolder) -> None:
    """Write what stands of all comparisons in the folder when they are shown together."""
    told = stats.family(run_folder.read(folder.path).benches)
    if told:
        folder.add({"id": "report", "comparisons": told}, "bench report")


def verify_line(run: Path, line: Mapping[str, Any]) -> str | None:
    """What a stored line says otherwise than its raw times, judged again (``None``: the same)."""
    rows = load_times(run / line["times"]) if line.get("times") else []
    judged = (judge.conclude if line["kind"] == Cell.kind else conclude)(line, rows)
    for key, value in json.loads(json.dumps(run_folder.standard(judged))).items():
        if line.get(key) != value and (key in line or key not in _LATER):
            return f"{line['id']}: the raw times give {key} {value!r}, not {line.get(key)!r}"
    return None
