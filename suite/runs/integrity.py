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
from shardproof.files import DAMAGE, read_input
from shardproof.runs import records
from shardproof.runs.records import Manifest, RecordError

#: Damages that one error names.
_MOST = 20


def changed(path: Path) -> Iterator[str]:
    """Files and lines of the run in ``path`` that are not what its manifest says, as sentences."""
    return (text for _, text in _differences(path))


def _differences(path: Path) -> Iterator[tuple[bool, str]]:
    """Whether it takes an edit, which a kill or a lost file does not explain; and a sentence."""
    try:
        listed = Manifest(path).read()
    except RecordError as error:
        yield True, str(error)
        return
    if not listed:
        # It is written before any other file is.
        lack = "no manifest, so nothing shows that the run is unchanged"
        yield True, f"{path / Manifest.NAME}: {lack}"
        return
    cases = path / "cases.jsonl"
    is_there = cases.is_file()
    lines = read_input(cases).split(b"\n") if is_there else [b""]
    ended = lines.pop()
    if not is_there:
        yield False, f"{cases}: missing"
    for number, line in enumerate(lines, 1):
        known = listed.get((cases.name, number))
        if known is None:
            # A kill may fall between a line and its entry in the manifest.
            is_last = number == len(lines)
            yield not is_last, f"{cases}: line {number} ({_id(line)}) is not in the manifest"
        elif known != hashlib.sha256(line).hexdigest():
            yield True, f"{cases}: line {number} ({_id(line)}) was changed"
    if ended:
        yield False, f"{cases}: the last line was cut off; --resume runs its case again"
    for (file, place), sealed in listed.items():
        if place is not None:
            if place > len(lines) and is_there:
                yield False, f"{path / file}: line {place} is missing"
        elif not (path / file).is_file():
            yield False, f"{path / file}: missing"
        elif records.digest(path / file) != sealed:
            yield True, f"{path / file}: was changed"


def _id(line: bytes) -> str:
    try:
        fields = json.loads(line)
        return str(fields.get("id") or fields.get("name"))
    except (ValueError, AttributeError, RecursionError):
        return "unreadable"


def require_unchanged(path: Path) -> None:
    """Refuse a changed run: nothing that leaves the run may be made from it.

    :raises SelectionError: the files and lines that are not what the manifest says.
    """
    _refuse(list(changed(path)), "run `shardproof verify` for details")


def require_unedited(path: Path) -> None:
    """Refuse an edited run; its owner may read one that is unfinished or has lost files.

    :raises SelectionError: the files and lines that were edited.
    """
    _refuse([text for edited, text in _differences(path) if edited], "edited runs are not shown")


def _refuse(damages: list[str], why: str) -> None:
    if damages:
        remedy = f"copy the whole run again, or run the cases again: {why}"
        raise SelectionError([Problem(text, remedy) for text in damages[:_MOST]]) from None


@contextmanager
def damage_is_bad_input(path: Path) -> Iterator[None]:
    """The block inside reads the run in ``path``; errors from damaged evidence become bad input.

    Of a run that is as its manifest says, an error is the suite's own and stays as it is.

    :raises SelectionError: the files and lines that were changed.
    """
    try:
        yield
    except InputError:
        raise
    except DAMAGE:
        _refuse(list(changed(path)), "damaged runs are not shown")
        raise
