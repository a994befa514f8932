"""A snapshot as compact JSON that is committed, and whatever a RUN argument may name.

One line a case, so that a new baseline is a diff to read.  What many cases share (versions,
cells, names of figures) stands once, in tables that cases point into by number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shardproof.compare.snapshot import Entry, Snapshot, of_run
from shardproof.errors import Problem, SelectionError
from shardproof.files import DAMAGE, from_others, read_input, write_whole
from shardproof.runs import run_folder
from shardproof.runs.integrity import require_unedited

FORMAT = 1
KIND = "shardproof baseline"
MAX_BYTES = 64 << 20
AGAIN = "write the baseline again by `shardproof compare RUN --save FILE`"
_GZIP = b"\x1f\x8b"
_HEAD = ("name", "taken", "hardware", "machine")
_PARTS = ("cases", "timed")
#: What a result is of.
_IS = ("implementation", "strategy", "backend", "world")


def load(name: str, root: Path = Path("results")) -> Snapshot:
    """The snapshot of a run folder, of an id under ``root``, of a baseline or of a bundle.

    :raises SelectionError: nothing of that name, or what cannot be read: damaged, or of a format
        of another version.
    """
    with opened(name, root) as folder:
        if folder is None:
            return read(Path(name))
        # First: what is damaged is told by its line.
        snapshot = of_run(run_folder.read(folder, strict=True))
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
        raise SelectionError(Problem(why, "give a run or a baseline", file=name)) from None


def save(snapshot: Snapshot, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text(snapshot))


def text(snapshot: Snapshot) -> str:
    """The JSON of a baseline: a line for each case."""
    # By name the JSON of each distinct value and its number, in the order of first use.
    tables: dict[str, dict[str, int]] = {"versions": {}, "cells": {}, "figures": {}}
    rows = {
        part: [
            f"{json.dumps(name)}: {_compact(_row(entry, tables))}"
            for name, entry in sorted(getattr(snapshot, part).items())
        ]
        for part in _PARTS
    }
    head = {"kind": KIND, "format": FORMAT} | {key: getattr(snapshot, key) for key in _HEAD}
    lines = [f'"{key}": {_compact(value)}' for key, value in head.items()]
    lines.append(f'"versions": [{",".join(tables.pop("versions"))}]')
    rest = {"keys": snapshot.keys, "kills": dict(sorted(snapshot.kills.items()))}
    lines += [f'"{key}": {_compact(value)}' for key, value in rest.items()]
    lines += [f'"{key}": [\n' + ",\n".join(table) + "\n]" for key, table in tables.items()]
    lines += [f'"{key}": {{\n' + ",\n".join(part) + "\n}" for key, part in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=isinstance(value, Mapping))


def _row(entry: Entry, tables: Mapping[str, dict[str, int]]) -> dict[str, object]:
    ordered = sorted(entry.figures)
    version = json.dumps(asdict(entry.version), separators=(",", ":"))
    shared = zip(tables.values(), (version, _compact(entry.cell), _compact(ordered)), strict=True)
    row: dict[str, object] = {
        "is": [getattr(entry, key) for key in _IS],
        "verdict": entry.verdict,
        "at": [table.setdefault(value, len(table)) for table, value in shared],
        "figures": [entry.figures[name] for name in ordered],
        "data": entry.data,
        "source": entry.source,
        "samples": dict(entry.samples),
        "same": entry.same,
        "beside": dict(entry.beside),
    }
    return {key: value for key, value in row.items() if value}


def read(path: Path) -> Snapshot:
    """The snapshot in a baseline.

    :raises SelectionError: not a baseline, damaged, or of another format.
    """
    try:
        document = json.loads(read_input(path, MAX_BYTES))
        if not isinstance(document, dict) or document.get("kind") != KIND:
            remedy = "name a run folder, an id, or a file that `compare RUN --save FILE` wrote"
            what = "is neither a run folder nor a baseline"
            raise SelectionError(Problem(what, remedy, file=str(path)))
        if document.get("format") != FORMAT:
            what = f"has baseline format {document.get('format')!r}, this version reads {FORMAT}"
            raise SelectionError(Problem(what, AGAIN, file=str(path)))
        if not document["versions"]:
            raise ValueError("it names no versions")
        whole = {key: document[key] for key in (*_HEAD, "versions", "kills", "keys")}
        for part in _PARTS:
            rows = document[part].items()
            whole[part] = {name: _entry(document, name, row) for name, row in rows}
        return from_others(Snapshot, whole)
    except SelectionError:
        raise
    except DAMAGE as error:
        what = f"is damaged: {type(error).__name__} {error}"
        raise SelectionError(Problem(what, AGAIN, file=str(path))) from None


def _entry(document: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The stored form of an entry, without what it shares with others."""
    version, cell, names = row["at"]
    return {
        **{key: value for key, value in row.items() if key not in ("at", "is")},
        **dict(zip(_IS, row["is"], strict=True)),
        "id": name,
        "version": document["versions"][version],
        "cell": document["cells"][cell],
        "figures": dict(zip(document["figures"][names], row.get("figures", ()), strict=True)),
    }


def joined(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Several runs of one machine and one version as one; of one id the last counts.

    :raises SelectionError: runs of different machines or versions.
    """
    first = snapshots[0]
    machines = dict.fromkeys(s.hardware for s in snapshots)
    last = (s.versions[-1] for s in snapshots)
    versions = dict.fromkeys(f"suite {one.suite}, torch {one.torch}" for one in last)
    for what, of, each in (("machines", machines, "machine"), ("versions", versions, "version")):
        if len(of) > 1:
            named, remedy = " and ".join(list(of)[:2]), f"save one baseline for each {each}"
            raise SelectionError(Problem(f"--save: the runs have different {what}", remedy, named))
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
