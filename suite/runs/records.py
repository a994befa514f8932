"""Records: the account of each case as one Parquet file, and the manifest that seals a run's files.

    results/<run-id>/records/<case>.parquet   rows of ten sections, told apart by ``section``:
        tensor       one a moment, kind, name and replica: SHA-256, shape, dtype, norms, owners
        comparison   one a comparison of a check: error against bound; what a spoilt copy passed
        step         one a rank and step: loss, norm, and the ranges of its calls and events
        call, event  one a call to a process group, one an entry of the program-order log
        action       one a computation of a pipeline's stage: rank, window, begin and end
        memory       one a rank, mark or phase, device and class: bytes held, or their peak
        whole        copies of tensors that failed, byte for byte
        timing       seconds of the case's parts
                     what is no table (the case, claims, how ranks ended) is JSON in the metadata
    results/<run-id>/manifest.jsonl           SHA-256 of each line of cases.jsonl and of each file

Errors: :class:`RecordError` names the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from shardproof.errors import Problem, SelectionError
from shardproof.files import open_input, read_input, write_whole

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "records"
_META = b"shardproof"
#: Bytes that a record may unpack to, at most and for each of its own (real ones: up to 41), and
#: those of its widest value that is no text.
MOST_UNPACKED, _MOST_RATIO, _GRACE, _WIDEST = 2 << 30, 500, 16 << 20, 16
#: Section -> its columns; one without a type holds text.
_COLUMNS: dict[str, dict[str, str]] = {
    section: dict(
        (column if ":" in column else f"{column}:string").split(":") for column in columns.split()
    )
    for section, columns in {
        "tensor": """step:int32 point kind name replica:int32 owners:ranks digest shape:shape
            dtype differs:int64 norm:float64 largest:float64""",
        "comparison": """check step:int32 phase name owner error:float64 bound:float64 tested:bool
            problem skip broke""",
        "step": "rank:int32 step:int32 loss:float64 norm:float64 detail",
        "call": """rank:int32 sequence:int64 operation group:ranks axis dtype payload_bytes:int64
            logical_bytes phase inside_backward:bool units_before:int64 issued:int64 waited:int64
            floating:bool peer:int32 strided:bool released:int32""",
        "event": "rank:int32 number:int64 kind name",
        "action": """rank:int32 step:int32 window:int32 op stage:int32 micro:int32 begin:int64
            end:int64 began:float64 ended:float64 cpu:float64""",
        "memory": "rank:int32 moment step:int32 where device kind bytes:int64",
        "whole": "step:int32 point kind name owner dtype shape:shape data:binary",
        "timing": "name seconds:float64",
    }.items()
}
#: Lists of a rank's record whose entries are rows as they are -> their section.
_ROWS_OF = {"memory": "memory", "traffic": "call", "actions": "action"}
#: What of a rank's record becomes rows.
_LISTS = ("steps", "traffic", "events", "actions", "memory")
#: Section -> what every row of it has where reports draw it; clocks and waits may be missing.
_NEEDED = {
    "action": ("rank", "step", "op", "stage", "micro", "begin", "end"),
    "call": ("rank", "operation", "axis", "payload_bytes", "issued"),
}
#: What of a step has a column of its own.
_OF_STEP = ("step", "loss", "norm")


class RecordError(ValueError):
    """A record that cannot be read; the message names the file."""


class LeadsOut(SelectionError):
    """A name in a run that leads out of its folder."""


def require_inside(run: Path, name: object, where: str) -> None:
    """Refuse a file ``name``, given by ``where``, outside of the folder ``run``.

    :raises LeadsOut: it has ``..``, is absolute, or leads there by a link.
    """
    try:
        if not isinstance(name, str) or (run / name).resolve().is_relative_to(run.resolve()):
            return
    except (OSError, ValueError, RuntimeError):
        what = "this is not a path"
    else:
        what = "this path leads out of the run"
    remedy = "copy the whole run again: a run names only its own files, without links"
    raise LeadsOut(Problem(what, remedy, str(name), where))


def file_name(case_id: str) -> str:
    """The file of a case: readable, and different for different ids."""
    slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", case_id)[:120]
    return f"{slug}-{hashlib.sha256(case_id.encode()).hexdigest()[:8]}"


def write(folder: Path, account: Mapping[str, Any]) -> tuple[str, str]:
    """Write ``account`` (JSON form) under ``folder``: the file's name there and its SHA-256.

    A case that ran before keeps its file; the new one gets a number.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rest, sections = _split(account)
    tables = [_table(section, rows) for section, rows in sections.items()]
    table = pa.concat_tables(tables, promote_options="default")
    table = table.replace_schema_metadata({_META: json.dumps(rest).encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=False)
    content = sink.getvalue().to_pybytes()
    (folder / FOLDER).mkdir(exist_ok=True)
    stem = f"{FOLDER}/{file_name(account['case']['id'])}"
    name, count = f"{stem}.parquet", 1
    while (folder / name).exists():
        count += 1
        name = f"{stem}-{count}.parquet"
    write_whole(folder / name, content)
    return name, hashlib.sha256(content).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """The account (JSON form) in ``path``."""
    with _readable(path):
        table = read_table(path)
        return _join(json.loads(table.schema.metadata[_META]), table)


def sections(path: Path, *names: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of the sections ``names`` of the record in ``path``; what else it holds is not read."""
    with _readable(path):
        table = read_table(path, {"section"}.union(*(_COLUMNS[name] for name in names)))
        found = {name: _rows(table, name) for name in names}
        for name in names:
            for column in _NEEDED.get(name, ()):
                if any(row.get(column) is None for row in found[name]):
                    raise ValueError(f"a row of the section {name!r} has no {column!r}")
        return found


def read_table(path: Path, columns: Collection[str] = ()) -> pa.Table:
    """A Parquet file, or those of ``columns`` that it has.

    Some hundred bytes may stand for any number of equal values: counted before they are unpacked.

    :raises ValueError: it would unpack to more than any record of its size.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with open_input(path) as stream:
        most = min(MOST_UNPACKED, _GRACE + _MOST_RATIO * os.fstat(stream.fileno()).st_size)
        plain = pq.ParquetFile(stream)
        schema = plain.schema_arrow  # made anew whenever it is asked for
        groups = map(plain.metadata.row_group, range(plain.metadata.num_row_groups))
        parts = [g.column(n) for g in groups for n in range(g.num_columns)]
        size = sum(part.num_values * _WIDEST + part.total_uncompressed_size for part in parts)
        _bounded(size, most)
        texts = [f.name for f in schema if f.type in (pa.string(), pa.binary())]
        chosen = [n for n in schema.names if not columns or n in columns]
        # Each text once, with the number of its place: so the size of all can be told.
        table = pq.ParquetFile(stream, read_dictionary=texts).read(chosen)
    for column in (column for column in table.columns if pa.types.is_dictionary(column.type)):
        for chunk in column.chunks:
            lengths = pc.cast(pc.binary_length(chunk.dictionary), pa.int64())
            size += pc.sum(lengths.take(chunk.indices)).as_py() or 0
    _bounded(size, most)
    return table.cast(pa.schema([schema.field(name) for name in chosen], schema.metadata))


def _bounded(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"the record would unpack to {size:,} bytes: no valid record is so large")


def _rows(table: pa.Table, section: str) -> list[dict[str, Any]]:
    import pyarrow.compute as pc

    known = [name for name in _COLUMNS[section] if name in table.column_names]
    part = table.filter(pc.equal(table["section"], section)).select(known)
    rows: list[dict[str, Any]] = part.to_pylist()
    return rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: the record cannot be read: {error}") from None


def digest(path: Path) -> str:
    with open_input(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _table(section: str, rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    lists = {"ranks": pa.list_(pa.int32()), "shape": pa.list_(pa.int64())}
    columns = {
        name: pa.array([row.get(name) for row in rows], lists.get(kind) or pa.type_for_alias(kind))
        for name, kind in _COLUMNS[section].items()
    }
    return pa.table({"section": pa.array([section] * len(rows), pa.string())} | columns)


def _split(account: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The values outside tables, and the rows of each section."""
    rows: dict[str, list[dict[str, Any]]] = {section: [] for section in _COLUMNS}
    rest = {k: v for k, v in account.items() if k not in ("whole", "timings", "figures")}
    rows["timing"] = [{"name": k, "seconds": v} for k, v in account["timings"].items()]
    rows["whole"] = [w | {"data": base64.b64decode(w["data"])} for w in account["whole"]]
    figures = account["figures"]
    if figures is None:
        return rest | {"figures": None}, rows
    rows["tensor"] = figures["tensors"]
    for check, compared in figures["compared"].items():
        rows["comparison"] += [{"check": check} | row for row in compared]
    records = []
    for record in figures["records"]:
        rank = record["rank"]
        records.append({k: v for k, v in record.items() if k not in _LISTS})
        for step in record["steps"]:
            detail = json.dumps({k: v for k, v in step.items() if k not in _OF_STEP})
            rows["step"].append({"rank": rank, "detail": detail} | {k: step[k] for k in _OF_STEP})
        for key, section in _ROWS_OF.items():
            rows[section] += [{"rank": rank} | row for row in record[key]]
        for number, kind, name in record["events"]:
            rows["event"].append({"rank": rank, "number": number, "kind": kind, "name": name})
    kept = {k: v for k, v in figures.items() if k not in ("tensors", "compared", "records")}
    checks = list(figures["compared"])
    return rest | {"figures": kept | {"records": records, "checks": checks}}, rows


def _join(rest: dict[str, Any], table: pa.Table) -> dict[str, Any]:
    """The inverse of :func:`_split`."""
    rows = partial(_rows, table)
    timings = {row["name"]: row["seconds"] for row in rows("timing")}
    whole = [w | {"data": base64.b64encode(w["data"]).decode()} for w in rows("whole")]
    account = rest | {"timings": timings, "whole": whole}
    kept = rest["figures"]
    if kept is None:
        return account
    compared: dict[str, list[dict[str, Any]]] = {check: [] for check in kept.pop("checks")}
    for row in rows("comparison"):
        compared[row.pop("check")].append({k: v for k, v in row.items() if v is not None})
    by_rank = {record["rank"]: record | {name: [] for name in _LISTS} for record in kept["records"]}
    for row in rows("step"):
        step = {k: row[k] for k in _OF_STEP} | json.loads(row["detail"])
        by_rank[row["rank"]]["steps"].append(step)
    for key, section in _ROWS_OF.items():
        for row in rows(section):
            by_rank[row.pop("rank")][key].append(row)
    for row in rows("event"):
        by_rank[row["rank"]]["events"].append([row["number"], row["kind"], row["name"]])
    records = list(by_rank.values())
    figures = kept | {"records": records, "compared": compared, "tensors": rows("tensor")}
    return account | {"figures": figures}


# ------------------------------------------------------------------------------------ manifest


class ManifestEntry(BaseModel):
    """A line of ``manifest.jsonl``: the digest of ``file``, or of a ``line`` of it (from 1).

    ``before`` is the digest of the manifest's line before it.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    file: str
    line: int | None
    sha256: str
    before: str


class Manifest:
    """Appends to ``manifest.jsonl``; of several entries for one file or line the last counts.

    Each entry has the digest of the one before it, so that a change shows in superseded ones, too.
    """

    NAME = "manifest.jsonl"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        self._last: bytes | None = None  # the entry that is to come before the next (None: look)

    def seal(self, file: str, sha256: str, line: int | None = None) -> None:
        """Note the digest of a file of the run, or of one line of it (from 1)."""
        if self._last is None:
            self._last = next(reversed(list(_raw_lines(self._path))), b"")
        before = hashlib.sha256(self._last).hexdigest()
        entry = ManifestEntry(file=file, line=line, sha256=sha256, before=before)
        line_bytes = json.dumps(entry.model_dump()).encode()
        self._last = None  # a signal may come between the line and this note of it
        append_line(self._path, line_bytes)
        self._last = line_bytes

    @contextmanager
    def sealing(self, file: str, sha256: str) -> Iterator[None]:
        """:meth:`seal`, before the file is written inside; taken back if that fails."""
        before = self._path.stat().st_size if self._path.exists() else 0
        self.seal(file, sha256)
        try:
            yield
        except OSError:
            os.truncate(self._path, before)
            self._last = None
            raise

    def read(self) -> dict[tuple[str, int | None], str]:
        """(file, line or ``None``) -> SHA-256.

        :raises RecordError: a damaged manifest.
        :raises LeadsOut: an entry about a file outside of the run.
        """
        digests = {}
        last = b""
        for number, raw in enumerate(_raw_lines(self._path), 1):
            try:
                entry = ManifestEntry.model_validate_json(raw)
            except ValueError:
                raise RecordError(f"{self._path}: line {number} is damaged") from None
            require_inside(self._path.parent, entry.file, f"{self._path}:{number}")
            digests[entry.file, entry.line] = entry.sha256
            if entry.before != hashlib.sha256(last).hexdigest():
                raise RecordError(f"{self._path}: line {number} does not match the line before it")
            last = raw
        return digests

    def mend(self) -> None:
        """Drop a last line that a kill cut off."""
        if self._path.exists():
            content = read_input(self._path)
            self._last = None
            os.truncate(self._path, content.rfind(b"\n") + 1)


def append_line(path: Path, line: bytes) -> None:
    """Append a line, on disk when this returns; what cannot be written whole is taken back."""
    with path.open("ab", buffering=0) as stream:
        before = stream.seek(0, os.SEEK_END)
        try:
            view = memoryview(line + b"\n")
            while view:
                view = view[stream.write(view) or 0 :]
            os.fsync(stream.fileno())
        except OSError as error:
            stream.truncate(before)
            raise OSError(error.errno, error.strerror, str(path)) from None
        except KeyboardInterrupt:
            stream.truncate(before)
            raise


def _raw_lines(path: Path) -> Iterable[bytes]:
    return read_input(path).splitlines() if path.exists() else ()
