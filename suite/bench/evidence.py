"""The line of a comparison or a cell in a run folder, and its raw times: written, read, judged
again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from shardproof.bench import lines, stats, telemetry
from shardproof.bench.judge import conclude, losses_of, targets_of
from shardproof.bench.lines import Counted
from shardproof.bench.scaling import judge
from shardproof.bench.session import Measured
from shardproof.bench.subjects import BASES, LETTERS, Cell, Pair, RankTimes, Subject
from shardproof.files import standard
from shardproof.runs import run_folder
from shardproof.runs.records import RecordError, file_name, read_table

#: Bytes read over bytes needed where one rank less loads; peak above the state while saving, over
#: the largest tensor.
MOST_READ, MOST_ABOVE = 1.05, 1.0
#: Below so many bytes the largest tensor is no measure: Python's own objects take as much.
SMALLEST = 4 << 20


def counted(world: int, launches: Sequence[Sequence[RankTimes]]) -> list[Counted]:
    """The figures of all ``launches``, each of its worst launch."""
    worst: dict[str, Counted] = {}
    for one in itertools.chain.from_iterable(_of_launch(world, ranks) for ranks in launches):
        worst[one.what] = max(worst.get(one.what, one), one, key=lambda figure: figure.ratio)
    return list(worst.values())


def _of_launch(world: int, ranks: Sequence[RankTimes]) -> list[Counted]:
    counts = [one.counts for one in ranks if one.counts is not None]
    figures = []
    for letter in LETTERS:
        above = [one.above[letter] for one in counts if letter in one.above]
        if above:
            most, largest = max(above), max(one.largest for one in counts)
            what = f"peak of {letter.upper()} above its state while saving, over the largest tensor"
            judged = letter == "a" and largest >= SMALLEST
            limit = MOST_ABOVE if judged else None
            both = most, largest
            figures.append(Counted(what=what, ratio=most / largest, bytes=both, limit=limit))
    reads = [(one.read, one.needed) for one in counts if one.read is not None]
    if reads:
        read, needed = (sum(column) for column in zip(*reads, strict=True))
        what = f"bytes read, {world} ranks to {world - 1}, over those needed"
        both = read, needed
        figures.append(Counted(what=what, ratio=read / needed, bytes=both, limit=MOST_READ))
    return figures


FOLDER = "times"
#: ``kind`` of a line about all comparisons of a run.
REPORT = "bench report"
#: Types of columns by those of :class:`stats.TimedStep`.
_COLUMNS = {"int": "int32", "str": "string", "float": "float64"}


def result(measured: Measured) -> lines.PairLine | lines.CellLine:
    """The line of ``cases.jsonl``, judged."""
    subject = measured.subject
    if isinstance(subject, Pair):
        pair = _of_pair(subject, measured)
        judged = conclude(pair, measured.rows).to_dict()
        return lines.PairLine.model_validate(pair.to_dict() | judged)
    cell = _of_cell(subject, measured)
    judged = judge.conclude(cell, (measured.source or measured).rows).to_dict()
    return lines.CellLine.model_validate(cell.to_dict() | judged)


def _of_pair(pair: Pair, measured: Measured) -> lines.MeasuredPair:
    line = _by_name(lines.MeasuredPair, pair, measured)
    places = [r.pci for records in measured.records for r in records if r.pci is not None]
    seen = measured.seen
    told = lines.Telemetry(
        launches=telemetry.summary(seen, places or None) if seen.samples else None,
        sides=measured.sides,
        no_gpu=seen.no_gpu or None,
    )
    line |= {"pair": pair, "losses": losses(measured, LETTERS), "telemetry": told}
    if measured.records:
        first = measured.records[0]
        line |= {
            "threads": first[0].threads,
            "cores": [record.cores for record in first],
            "segment_steps": [ranks[0].segment_steps["a"] for ranks in measured.records],
            "targets_per_step": {side: targets_of(first, side) for side in LETTERS},
            "counted": counted(pair.world, measured.records),
        }
    return lines.MeasuredPair.model_validate(line)


def _of_cell(cell: Cell, measured: Measured) -> lines.MeasuredCell:
    source = measured.source or measured
    records = source.records
    sides = (*BASES, *(["ranks"] if measured.together else []))
    throughputs = BASES if measured.refused else sides  # none of ranks that share cores
    targets = {side: targets_of(records[0], side) for side in throughputs} if records else {}
    return lines.MeasuredCell(
        **_by_name(lines.MeasuredCell, cell, measured) | {"probed": source.probed},
        implementation=cell.system.implementation,
        cell=cell,
        mesh=measured.meshes.get("ranks", {}),
        strategy=measured.strategies.get("ranks", ""),
        measured_in=None if source is measured else source.subject.id,
        losses=losses(source, sides),
        targets_per_step=targets,
        segment_steps=[ranks[0].segment_steps for ranks in records],
    )


def _by_name(kind: type[lines.Line], subject: Subject, measured: Measured) -> dict[str, Any]:
    """The fields of a line that the subject or what was measured has under the same name."""
    names = [(place, name) for place in (subject, measured) for name in kind.model_fields]
    shared = {name: getattr(place, name) for place, name in names if hasattr(place, name)}
    return shared | {"seconds": round(measured.seconds, 3)}


def losses(measured: Measured, sides: Sequence[str]) -> dict[str, list[float]]:
    """Losses of the first steps of the first launch, by side."""
    if not measured.records:
        return {}
    return {side: losses_of(measured.records[0], side) for side in sides}


def write_times(folder: run_folder.RunFolder, subject: str, rows: Sequence[stats.TimedStep]) -> str:
    """Raw times of ``subject`` as a Parquet file of the run; its name there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder.path / FOLDER).mkdir(exist_ok=True)
    columns = [(f.name, getattr(pa, _COLUMNS[str(f.type)])()) for f in fields(stats.TimedStep)]
    table = pa.Table.from_pylist([asdict(row) for row in rows], pa.schema(columns))
    name = f"{FOLDER}/{file_name(subject)}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    folder.write(name, sink.getvalue().to_pybytes())
    return name


def load_times(path: Path) -> list[stats.TimedStep]:
    """The times that :func:`write_times` wrote.

    :raises RecordError: a file that cannot be read.
    """
    import pyarrow as pa

    try:
        return [stats.TimedStep(**row) for row in read_table(path).to_pylist()]
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: the times cannot be read: {error}") from None


def keep(folder: run_folder.RunFolder, measured: Measured) -> lines.PairLine | lines.CellLine:
    """Write raw times and the line of a comparison or a cell; the line.

    A refused cell's raw times are those of its source, which is kept before it.
    """
    line = result(measured)
    source = measured.source or measured
    if source is measured and source.rows:
        source.times_file = write_times(folder, measured.subject.id, source.rows)
    if source.times_file:
        line = line.model_copy(update={"times": source.times_file})
    folder.add(line.to_dict(), line.kind)
    return line


def keep_report(folder: run_folder.RunFolder) -> None:
    """Write what stands of all comparisons in the folder when they are shown together."""
    report = stats.family(lines.pairs(run_folder.read(folder.path)))
    if report:
        comparisons = {name: beside.to_dict() for name, beside in report.items()}
        folder.add({"id": "report", "comparisons": comparisons}, REPORT)


def verify(run: run_folder.Run) -> Iterator[str]:
    """Judge the raw times of each comparison and cell of ``run`` again, and make the reports over
    all comparisons again; what comes out differently, in sentences.
    """
    where = run.path / "cases.jsonl"
    kinds = lines.PairLine.kind, lines.CellLine.kind
    for line in (line for kind in kinds for line in run.others.get(kind, ())):
        try:
            problem = verify_line(run.path, line)
        except (RecordError, KeyError, TypeError, ValueError) as error:
            problem = f"the raw times of {line['id']} cannot be judged: {error!r}"
        if problem is not None:
            yield f"{where}: {problem}"
    so_far: dict[str, run_folder.Line] = {}
    for line in run_folder.lines(run.path):
        if line["kind"] == lines.PairLine.kind:
            so_far[line["id"]] = line
        elif line["kind"] == REPORT:
            try:
                yield from (f"{where}: {text}" for text in _reported(so_far.values(), line))
            except (KeyError, TypeError, ValueError) as error:
                yield f"{where}: the report over comparisons cannot be made: {error!r}"
                return


def _reported(pairs: Iterable[run_folder.Line], stored: run_folder.Line) -> Iterator[str]:
    """Adjust the comparisons that stood before a report for one another again."""
    report = stats.family(lines.PairLine.model_validate(pair) for pair in pairs)
    again = {name: json.loads(beside.model_dump_json()) for name, beside in report.items()}
    before = stored["comparisons"]
    for name in sorted({*again, *before}):
        if again.get(name) != before.get(name):
            now, then = (f"{told.get(name)!r:.200}" for told in (again, before))
            yield f"{name} in the report over all comparisons: they give {now}, not {then}"


def verify_line(run: Path, stored: Mapping[str, Any]) -> str | None:
    """Where a stored line differs from its raw times, judged again (``None``: nowhere)."""
    rows = load_times(run / stored["times"]) if stored.get("times") else []
    if stored["kind"] == lines.CellLine.kind:
        judged = judge.conclude(lines.MeasuredCell.model_validate(stored), rows).to_dict()
    else:
        judged = conclude(lines.MeasuredPair.model_validate(stored), rows).to_dict()
    for key, value in json.loads(json.dumps(standard(judged))).items():
        if stored.get(key) != value:
            return f"{stored['id']}: the raw times give {key} {value!r}, not {stored.get(key)!r}"
    return None
