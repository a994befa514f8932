"""A snapshot as compact JSON that is committed, and whatever a RUN argument may name.

One line a case, so that a new baseline is a diff to read.  What many cases share (versions,
cells, names of figures) stands once, in tables that cases point into by number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from shardproof.compare.snapshot import Entry, Sample, Snapshot, Version, of_run
from shardproof.errors import Problem, SelectionError
from shardproof.files import DAMAGE, from_others, read_input, write_whole
from shardproof.runs import run_folder
from shardproof.runs.integrity import require_unedited

FORMAT = 1
KIND = "shardproof baseline"
MAX_BYTES = 64 << 20
AGAIN = "make it again: `shardproof compare RUN --save FILE`"
_GZIP = b"\x1f\x8b"
#: No ratio is further from 1 than this, in log units.
_FARTHEST = 50.0


def load(name: str, root: Path = Path("results")) -> Snapshot:
    """The snapshot of a run folder, of an id under ``root``, of a baseline or of a bundle.

    :raises SelectionError: nothing of that name, or what cannot be read: damaged, or of a format
        of another version.
    """
    with opened(name, root) as folder:
        if folder is None:
            return read(Path(name))
        snapshot = of_run(
            run_folder.read(folder, strict=True)
        )  # first: what is damaged is told by its line
        require_unedited(folder)
        return snapshot


@contextmanager
def opened(name: str, root: Path = Path("results")) -> Iterator[Path | None]:
    """The folder of a run, of an id under ``root``, or of a bundle; ``None``: a file of its own.

    :raises SelectionError: nothing of that name, or a bundle that is not what its list says.
    """
    if Path(name).is_file() and not _packed(name):
        yield None
        return
    from shardproof.runs.bundle.unpacking import open_run

    with open_run(name, root) as folder:
        yield folder


def _packed(name: str) -> bool:
    try:
        with Path(name).open("rb") as stream:
            return stream.read(len(_GZIP)) == _GZIP
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise SelectionError(Problem(why, "name a run or a baseline", file=name)) from None


def save(snapshot: Snapshot, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text(snapshot))


def text(snapshot: Snapshot) -> str:
    """The JSON of a baseline: a line for each case."""
    versions, cells, names = _Numbered(), _Numbered(), _Numbered()
    rows: dict[str, list[str]] = {"cases": [], "timed": []}
    for part, entries in (("cases", snapshot.cases), ("timed", snapshot.timed)):
        for name, entry in sorted(entries.items()):
            row = _row(entry, versions, cells, names)
            rows[part].append(f"{json.dumps(name)}: {_compact(row)}")
    head = {
        "kind": KIND,
        "format": FORMAT,
        **{key: getattr(snapshot, key) for key in ("name", "taken", "hardware", "machine")},
        "versions": versions.rows,
        "keys": snapshot.keys,
        "kills": dict(sorted(snapshot.kills.items())),
    }
    lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in head.items()]
    for key, table in (("cells", cells), ("figures", names)):
        lines.append(f'"{key}": [\n' + ",\n".join(map(_compact, table.rows)) + "\n]")
    lines += [f'"{key}": {{\n' + ",\n".join(part) + "\n}" for key, part in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


class _Numbered:
    """Distinct values, numbered in order of first use."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._known: dict[str, int] = {}

    def number(self, value: Any) -> int:
        key = _compact(value)
        if key not in self._known:
            self._known[key] = len(self.rows)
            self.rows.append(value)
        return self._known[key]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=isinstance(value, Mapping))


def _row(
    entry: Entry, versions: _Numbered, cells: _Numbered, names: _Numbered
) -> dict[str, object]:
    ordered = sorted(entry.figures)
    version = versions.number(asdict(entry.version))
    row: dict[str, object] = {
        "is": [entry.implementation, entry.strategy, entry.backend, entry.world],
        "verdict": entry.verdict,
        "at": [version, cells.number(entry.cell), names.number(ordered)],
        "figures": [entry.figures[name] for name in ordered],
        "data": entry.data,
        "source": entry.source,
        "samples": {name: astuple(sample) for name, sample in entry.samples.items()},
        "same": None if entry.same is None else astuple(entry.same),
        "beside": dict(entry.beside),
    }
    return {key: value for key, value in row.items() if value}


def read(path: Path) -> Snapshot:
    """The snapshot in a baseline.

    :raises SelectionError: not a baseline, damaged, or of another format.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            what = f"is over {MAX_BYTES >> 20} MiB"
            raise SelectionError(Problem(what, "name a baseline", file=str(path)))
        document = json.loads(read_input(path))
        if not isinstance(document, dict) or document.get("kind") != KIND:
            remedy = "name a run folder, an id, or a file that `compare RUN --save FILE` wrote"
            raise SelectionError(Problem("is neither run nor baseline", remedy, file=str(path)))
        if document.get("format") != FORMAT:
            what = f"is a baseline of format {document.get('format')!r}, this suite reads {FORMAT}"
            raise SelectionError(Problem(what, AGAIN, file=str(path)))
        versions = [from_others(Version, row) for row in document["versions"]]
        if not versions:
            raise ValueError("no versions")
        return Snapshot(
            name=str(document["name"]),
            hardware=str(document["hardware"]),
            machine=dict(document["machine"]),
            taken=str(document["taken"]),
            versions=versions,
            cases=_entries(document, "cases", versions),
            timed=_entries(document, "timed", versions),
            kills={str(name): bool(killed) for name, killed in document["kills"].items()},
            keys=[dict(key) for key in document["keys"]],
        )
    except SelectionError:
        raise
    except DAMAGE as error:
        what = f"is damaged: {type(error).__name__} {error}"
        raise SelectionError(Problem(what, AGAIN, file=str(path))) from None


def _entries(
    document: Mapping[str, Any], part: str, versions: Sequence[Version]
) -> dict[str, Entry]:
    return {name: _entry(name, row, document, versions) for name, row in document[part].items()}


def _entry(
    name: str, row: Mapping[str, Any], document: Mapping[str, Any], versions: Sequence[Version]
) -> Entry:
    version, cell, names = row["at"]
    implementation, strategy, backend, world = row["is"]
    keys = map(str, document["figures"][names])
    values = row.get("figures", [])
    for value in values:
        if isinstance(value, (list, dict)):
            raise ValueError(f"a figure of {name} is not a scalar")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"a figure of {name} is not finite")
    return Entry(
        id=name,
        implementation=str(implementation),
        strategy=str(strategy),
        backend=str(backend),
        world=int(world),
        verdict=str(row["verdict"]),
        version=versions[version],
        figures=dict(zip(keys, values, strict=True)),
        cell=dict(document["cells"][cell]),
        data=str(row.get("data", "")),
        source=str(row.get("source", "")),
        samples={str(key): _sample(value) for key, value in row.get("samples", {}).items()},
        same=_sample(row["same"]) if "same" in row else None,
        beside={str(key): float(value) for key, value in row.get("beside", {}).items()},
    )


def _sample(numbers: Sequence[float]) -> Sample:
    mean, sd, blocks = numbers
    sample = Sample(float(mean), float(sd), int(blocks))
    if not (abs(sample.mean) < _FARTHEST and 0 <= sample.sd < _FARTHEST and sample.blocks > 0):
        raise ValueError(f"no ratio: {numbers}")
    return sample


def joined(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Several runs of one machine and one version as one; of one id the last counts.

    :raises SelectionError: runs of different machines or versions.
    """
    first = snapshots[0]
    for other in snapshots[1:]:
        if other.hardware != first.hardware:
            named = f"{first.hardware} and {other.hardware}"
            remedy = "save one baseline for each machine"
            raise SelectionError(Problem("--save: runs of two machines", remedy, named))
        versions = [(s.versions[-1].suite, s.versions[-1].torch) for s in (first, other)]
        if versions[0] != versions[1]:
            remedy = "save runs of one version"
            named = " and ".join(f"suite {suite}, torch {torch}" for suite, torch in versions)
            raise SelectionError(Problem("--save: runs of two versions", remedy, named))
    return replace(
        first,
        taken=max(s.taken for s in snapshots),
        versions=list(dict.fromkeys(version for s in snapshots for version in s.versions)),
        cases={name: entry for s in snapshots for name, entry in s.cases.items()},
        timed={name: entry for s in snapshots for name, entry in s.timed.items()},
        kills={name: killed for s in snapshots for name, killed in s.kills.items()},
        left_out={},
        keys=[key for s in snapshots for key in s.keys],
    )
