"""An archive that others made -> a run's folder: nothing in it is trusted.

Plain files with plain names only, never more bytes than the list says, which stands first and must
fit the disk.  No file is written outside of a temporary folder, which is gone afterwards on every
path.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import signal
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from shardproof import VERSION
from shardproof.errors import Problem, SelectionError, one_line
from shardproof.files import DAMAGE
from shardproof.runs.bundle import form
from shardproof.runs.bundle.form import Listing
from shardproof.runs.run_folder import find_run

#: It may unpack to so many times its size: records are compressed already, lines of text shrink to
#: a thirtieth, zeros to a thousandth.
MAX_RATIO, _GRACE = 200, 64 << 20

_BLOCK = tarfile.BLOCKSIZE
#: The one extended header that is written: a name that the plain one has no room for.
_LONG_NAME = re.compile(rb"(\d+) path=([^\n\0]+)\n")
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a pipe",
}


@dataclass(frozen=True)
class Unpacked:
    """A bundle in a temporary ``folder``; ``problems`` name what is not as the list says."""

    folder: Path
    listing: Listing
    problems: list[str]


@contextmanager
def open_run(name: str | None, root: Path = Path("results")) -> Iterator[Path]:
    """The folder of run ``name``: a folder, an id under ``root``, a bundle; ``None``: the newest.

    A bundle's lives until the context ends, and is named by the run's id.

    :raises SelectionError: no such run; a bundle that is unsafe or not what its list says.
    """
    if name is None or not Path(name).is_file():
        yield find_run(name, root)
        return
    with unpacked(Path(name)) as bundle:
        if bundle.problems:
            remedy = "request it again; `shardproof verify` lists the damage"
            raise SelectionError([Problem(problem, remedy) for problem in bundle.problems[:20]])
        yield bundle.folder


@contextmanager
def unpacked(archive: Path) -> Iterator[Unpacked]:
    """Unpack the bundle ``archive`` into a temporary folder that is removed on every path.

    :raises SelectionError: no bundle, a damaged one, or one that is not safe to unpack.
    """
    with _temporary() as place:
        try:
            size = archive.stat().st_size
            with archive.open("rb") as raw, gzip.GzipFile(fileobj=raw) as zipped:
                reader = _Reader(archive, zipped, size * MAX_RATIO + _GRACE)  # type: ignore[arg-type]
                bundle = _unpack(reader, size, place)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            why = f"is not a bundle, or is damaged: {error}"
            raise SelectionError(Problem(why, "copy the file again", file=str(archive))) from None
        except OSError as error:
            why = f"cannot be unpacked: {error.strerror or error}"
            remedy = f"check the file, and the free space in {place.parent}"
            raise SelectionError(Problem(why, remedy, file=str(archive))) from None
        yield bundle


@contextmanager
def _temporary() -> Iterator[Path]:
    """A folder that is removed on every path; SIGTERM and SIGHUP become exits meanwhile."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, leave)
    try:
        with tempfile.TemporaryDirectory(prefix="shardproof-") as place:
            yield Path(place)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Reader:
    """The members of an archive, one after the other; refuses all that a bundle does not hold."""

    def __init__(self, archive: Path, stream: BinaryIO, limit: int) -> None:
        self.archive = archive
        self._stream = stream
        self._left = min(limit, form.MAX_BYTES + _GRACE)

    def refuse(self, what: str, value: str | None = None) -> NoReturn:
        """Raise: this is not safe, or no bundle."""
        remedy = "take an archive that `shardproof bundle` made"
        raise SelectionError(Problem(what, remedy, value, str(self.archive)))

    def _take(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or a refusal."""
        self._left -= size
        if self._left < 0:
            self.refuse("unpacks to more bytes than a run in so small an archive can have")
        data = self._stream.read(size)
        while len(data) < size:
            more = self._stream.read(size - len(data))
            if not more:
                self.refuse("is cut off")
            data += more
        return data

    def headers(self) -> Iterator[tuple[str, int]]:
        """Name and size of each file; its bytes are to be read before the next."""
        count = 0
        while any(block := self._take(_BLOCK)):
            info = self._info(block)
            name = info.name
            if info.type == tarfile.XHDTYPE:
                name = self._long_name(info.size)
                info = self._info(self._take(_BLOCK))
            if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                kind = _KINDS.get(info.type, "an entry of an unknown kind")
                self.refuse(f"holds {kind}, but a bundle has plain files only", name)
            if form.unsafe(name) or "/" not in name:
                self.refuse("holds a file with an unsafe name", name)
            count += 1
            if count > form.MAX_FILES:
                self.refuse(f"holds more than {form.MAX_FILES:,} files")
            yield name, info.size
        self._end()

    def _info(self, block: bytes) -> tarfile.TarInfo:
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.TarError, ValueError):
            self.refuse("is damaged: a header cannot be read")
        if not 0 <= info.size <= form.MAX_BYTES:
            self.refuse("holds a file of an impossible size", f"{info.name}: {info.size} bytes")
        return info

    def _long_name(self, size: int) -> str:
        if size > 4096:
            self.refuse("holds a header that is too long", f"{size} bytes")
        text = b"".join(self.content(size))
        match = _LONG_NAME.fullmatch(text)
        if match is None or int(match[1]) != len(text):
            self.refuse("holds a header that no bundle has", repr(text[:60]))
        return match[2].decode("utf-8", "replace")

    def content(self, size: int) -> Iterator[bytes]:
        """The bytes of a file, in pieces."""
        left = size
        while left:
            data = self._take(min(left, form.CHUNK))
            left -= len(data)
            yield data
        self._take(-size % _BLOCK)

    def _end(self) -> None:
        """Nothing but padding may follow; reading on also checks gzip's own sum."""
        rest = self._stream.read(tarfile.RECORDSIZE + _BLOCK)
        if any(rest) or self._stream.read(1):
            self.refuse("holds more after its end")


def _unpack(reader: _Reader, size: int, place: Path) -> Unpacked:
    """All listed files into ``place``; what is not as listed becomes a problem."""
    headers = reader.headers()
    first, length = next(headers, ("", 0))
    run, _, name = first.partition("/")
    if name != form.LISTING:
        reader.refuse(f"is not a bundle: its first file is not {form.LISTING}", first or "empty")
    if length > form.MAX_LISTING:
        reader.refuse(f"has a list of more than {form.MAX_LISTING >> 20} MiB", f"{length} bytes")
    listing, problems = _listing(reader, run, b"".join(reader.content(length)))
    _fits(reader, listing, size, place)
    wanted = {member.name: member for member in listing.members}
    folder = place / run
    folder.mkdir()
    room = listing.bytes + _GRACE
    seen: set[str] = set()
    for full, length in headers:
        top, _, name = full.partition("/")
        place_in_archive = reader.archive / name
        if top != run or name not in wanted:
            problems.append(f"{reader.archive / (full if top != run else name)}: was added")
        elif name in seen:
            problems.append(f"{place_in_archive}: is in it twice")
        else:
            seen.add(name)
            room -= length
            if room < 0:
                reader.refuse("holds more bytes than its list says", name)
            if _extract(reader, folder / name, length) != (wanted[name].bytes, wanted[name].sha256):
                problems.append(f"{place_in_archive}: was changed")
            continue
        for _ in reader.content(length):
            pass
    problems += [f"{reader.archive / name}: missing" for name in wanted if name not in seen]
    return Unpacked(folder, listing, problems)


def _extract(reader: _Reader, path: Path, length: int) -> tuple[int, str]:
    """Write a new file of the temporary folder; its bytes and SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("xb") as stream:
        for data in reader.content(length):
            digest.update(data)
            stream.write(data)
    return length, digest.hexdigest()


def _fits(reader: _Reader, listing: Listing, size: int, place: Path) -> None:
    """The list's own bytes against limits and disk, before anything is written."""
    wanted = listing.bytes
    if wanted > form.MAX_BYTES or wanted > size * MAX_RATIO + _GRACE:
        reader.refuse(f"would unpack to {wanted:,} bytes, from {size:,}")
    free = shutil.disk_usage(place).free
    if wanted + _GRACE > free:
        remedy = "free space, or set TMPDIR to a folder with enough"
        space = f"{wanted:,} bytes, {free:,} are free in {place.parent}"
        raise SelectionError(Problem("no space to unpack", remedy, space, str(reader.archive)))


def _listing(reader: _Reader, run: str, text: bytes) -> tuple[Listing, list[str]]:
    """The list of a bundle, and what is wrong with its own digest."""
    try:
        fields = json.loads(text)
        if fields["format"] != form.FORMAT:
            by = f"format {fields['format']!r}, packed by shardproof {fields.get('suite')}"
            remedy = f"use that version: this one ({VERSION}) reads format {form.FORMAT}"
            problem = Problem("has a different format", remedy, by, str(reader.archive))
            raise SelectionError(problem)
        listing = Listing.model_validate_json(text)
    except SelectionError:
        raise
    except DAMAGE as error:
        reader.refuse(f"has a damaged {form.LISTING}: {type(error).__name__}", one_line(str(error)))
    if listing.run != run or len({m.name for m in listing.members}) != len(listing.members):
        reader.refuse(f"has a damaged {form.LISTING}: of another run, or a file listed twice", run)
    wrong = fields.get("digest") != listing.digest
    return listing, [f"{reader.archive / form.LISTING}: was changed"] if wrong else []


def notes(listing: Listing) -> Sequence[str]:
    """The facts about a bundle other than its verdicts."""
    others = [one_line(version) for version in listing.judged_by if version != VERSION]
    again = (
        f"judged by shardproof {', '.join(others)}, judged again by {VERSION}: "
        "where they differ, formulas or checks may have changed between them"
    )
    return [f"contents sha256:{listing.digest}", *([again] if others else [])]
