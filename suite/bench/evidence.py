"""The line of a comparison in a run folder, and its raw times: written, read, judged again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.bench import stats
from shardproof.bench.losses import alike, by_coordinate, losses_of
from shardproof.bench.model import scorecard
from shardproof.bench.session import Measured
from shardproof.bench.sides import LETTERS
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
    """The line of ``cases.jsonl``; figures are those of :func:`shardproof.bench.stats.judge`."""
    pair = measured.pair
    line: dict[str, Any] = {
        "id": pair.id,
        "pair": pair.to_dict(),
        "meshes": measured.meshes,
        "seconds": round(measured.seconds, 3),
        "losses": losses(measured),
        "memory": measured.memory,
        "strategies": measured.strategies,
        "probed": measured.probed,
        "profile": measured.profile,
        "telemetry": _telemetry(measured),
        "problem": None if measured.problem is None else list(measured.problem),
    }
    if measured.records:
        first = measured.records[0]
        line["threads"] = first[0]["threads"]
        line["cores"] = [record["cores"] for record in first]
        line["segment_steps"] = [records[0]["segment_steps"] for records in measured.records]
        line["targets_per_step"] = {
            side: sum(by_coordinate(first, side, "targets")) for side in LETTERS
        }
    return line | conclude(line, measured.rows)


def conclude(line: Mapping[str, Any], rows: Sequence[stats.Row]) -> dict[str, Any]:
    """Verdict, reason and figures that raw times and the rest of the line give."""
    judged = stats.judge(rows)
    reason = ""
    told = line["losses"]
    same, why = alike(told.get("a"), told.get("b"), line["pair"]["dtype"])
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
    places = [r["pci"] for records in measured.records for r in records if r["pci"] is not None]
    return {
        "launches": sampling.summary(seen, places or None) if seen.samples else None,
        "sides": measured.sides,
        "no_gpu": measured.no_gpu or None,
    }


def losses(measured: Measured) -> dict[str, list[float]]:
    """The global loss of each of the first steps, by side."""
    if not measured.records:
        return {}
    return {side: losses_of(measured.records[0], side) for side in LETTERS}


def write_times(run: Path, name: str, rows: Sequence[stats.Row]) -> str:
    """Raw times as a Parquet file under ``run``; its name there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardproof.runs.records import file_name

    (run / FOLDER).mkdir(exist_ok=True)
    schema = pa.schema([(key, getattr(pa, kind)()) for key, kind in _COLUMNS.items()])
    table = pa.Table.from_pylist([{key: row[key] for key in _COLUMNS} for row in rows], schema)
    path = run / FOLDER / f"{file_name(name)}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_whole(path, sink.getvalue().to_pybytes())
    return str(path.relative_to(run))


def load_times(path: Path) -> list[dict[str, Any]]:
    """What :func:`write_times` wrote.

    :raises RecordError: a file that cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardproof.runs.records import RecordError

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: no readable times: {error}") from None
    return rows


def keep(folder: run_folder.RunFolder, measured: Measured) -> dict[str, Any]:
    """Write raw times and the line of a comparison; the line."""
    line = result(measured)
    if measured.rows:
        line["times"] = write_times(folder.path, measured.pair.id, measured.rows)
        folder.seal(line["times"])
    folder.add(line, "bench")
    return line


def keep_report(folder: run_folder.RunFolder) -> None:
    """Write what stands of all comparisons in the folder when they are shown together."""
    told = stats.family(run_folder.read(folder.path).benches)
    if told:
        folder.add({"id": "report", "comparisons": told}, "bench report")


def verify_line(run: Path, line: Mapping[str, Any]) -> str | None:
    """What a stored comparison gives otherwise when it is judged again (``None``: the same)."""
    return judged_otherwise(run, line, conclude)


def judged_otherwise(
    run: Path,
    line: Mapping[str, Any],
    judge: Callable[[Mapping[str, Any], Sequence[stats.Row]], Mapping[str, Any]],
) -> str | None:
    """What ``judge`` makes of the raw times of a stored ``line`` that the line does not say."""
    rows = load_times(run / line["times"]) if line.get("times") else []
    again = json.loads(json.dumps(run_folder.standard(judge(line, rows))))
    for key, value in again.items():
        if line.get(key) != value and (key in line or key not in _LATER):
            return f"{line['id']}: the raw times give {key} {value!r}, not {line.get(key)!r}"
    return None
