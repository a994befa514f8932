"""Is a run's folder what its manifest says?  Digests only: nothing is judged, nothing heavy loaded.

:func:`changed` names every file and line that differs.  :func:`damage_is_bad_input` tells damaged
evidence from a fault of the suite: what reads a run inside of it ends in bad input only where it
was changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardproof.errors import InputError, Problem, SelectionError
from shardproof.files import DAMAGE
from shardproof.runs import records
from shardproof.runs.records import Manifest, RecordError

#: Damages that one error names.
_MOST = 20


def changed(path: Path) -> Iterator[str]:
    """Files and lines of the run in ``path`` that are not what its manifest says, as sentences."""
    try:
        listed = Manifest(path).read()
    except RecordError as error:
        yield str(error)
        return
    if not listed:
        yield f"{path / Manifest.NAME}: no manifest, so nothing shows that the run is unchanged"
        return
    cases = path / "cases.jsonl"
    is_there = cases.is_file()
    lines = cases.read_bytes().split(b"\n") if is_there else [b""]
    ended = lines.pop()
    if not is_there:
        yield f"{cases}: missing"
    for number, line in enumerate(lines, 1):
        known = listed.get((cases.name, number))
        if known is None:
            yield f"{cases}: line {number} ({_id(line)}) is not in the manifest"
        elif known != hashlib.sha256(line).hexdigest():
            yield f"{cases}: line {number} ({_id(line)}) was changed"
    if ended:
        yield f"{cases}: the last line was cut off; --resume runs its case again"
    for (file, place), sealed in listed.items():
        if place is not None:
            if place > len(lines) and is_there:
                yield f"{path / file}: line {place} is missing"
        elif not (path / file).is_file():
            yield f"{path / file}: missing"
        elif records.digest(path / file) != sealed:
            yield f"{path / file}: was changed"


def _id(line: bytes) -> str:
    try:
        fields = json.loads(line)
        return str(fields.get("id") or fields.get("name"))
    except (ValueError, AttributeError, RecursionError):
        return "unreadable"


def require_unchanged(path: Path) -> None:
    """For what is shown outside of the run: nothing is made of one that was changed.

    :raises SelectionError: the files and lines that are not what the manifest says.
    """
    _refuse(list(changed(path)), "`shardproof verify` says more")


def _refuse(damages: list[str], why: str) -> None:
    """Raise if there are any damages."""
    if damages:
        remedy = f"take a whole copy, or run it again: {why}"
        raise SelectionError([Problem(text, remedy) for text in damages[:_MOST]]) from None


@contextmanager
def damage_is_bad_input(path: Path) -> Iterator[None]:
    """What is inside reads the run in ``path``; what damaged evidence raises becomes bad input.

    Of a run that is as its manifest says, an error is the suite's own and stays as it is.

    :raises SelectionError: the files and lines that were changed.
    """
    try:
        yield
    except InputError:
        raise
    except DAMAGE:
        _refuse(list(changed(path)), "nothing is shown of a damaged run")
        raise
