"""One archive of a run that ``shardproof verify`` accepts on another machine.

    <run-id>.tar.gz: <run-id>/bundle.json       names, sizes and SHA-256 of all that follows
                              run.json, planned.jsonl, cases.jsonl, manifest.jsonl
                              records/, times/  what the verdicts are made of
                              report.html, report.md, junit.xml

:func:`pack` takes what the manifest seals and the reports, nothing else, and tells what it left
out.  One run gives one archive: files in order, no times, users or modes; the *digest* of a bundle
is that of its list, whatever compressed it.  :func:`unpacked` trusts nothing: plain files with
plain names only, never more bytes than the list says, which stands first and must fit the disk.
No file is written outside of a temporary folder, which is gone afterwards on every path.

Judging again needs the archive and this suite: no scenario, data set, implementation or GPU, and
any torch that the suite runs with.  Another version of the suite may judge otherwise, so the list
says by which versions the run was judged.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import tarfile
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from suite.errors import Problem, SelectionError
from suite.records import Manifest
from suite.results import find_run, read
from suite.verify import Verified, changed, verify
from suite.version import VERSION

FORMAT = 1
LISTING = "bundle.json"
SUFFIX = ".tar.gz"
#: Packed if they are there, sealed or not; all else must be sealed by the manifest.
_ALWAYS = ("run.json", "planned.jsonl", "cases.jsonl", Manifest.NAME)
REPORTS = ("report.html", "report.md", "junit.xml")

#: What an archive may hold: files, bytes of the list, bytes in all.
MAX_FILES, MAX_LISTING, MAX_BYTES = 100_000, 64 << 20, 64 << 30
#: The largest size that a plain header can tell.
MAX_FILE = (8 << 30) - 1
#: It may unpack to so many times its size: records are compressed already, lines of text shrink to
#: a thirtieth, zeros to a thousandth.
MAX_RATIO, _GRACE = 200, 64 << 20

_CHUNK = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_MAGIC = b"\x1f\x8b"
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._+=@,-]{1,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
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
class Member:
    """A file of a bundle; ``name`` is that inside the run's folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Listing:
    """``bundle.json``.  ``suite`` packed the run, the versions in ``judged_by`` judged it."""

    run: str
    suite: str
    judged_by: tuple[str, ...]
    members: tuple[Member, ...]
    left_out: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(member.bytes for member in self.members)

    @property
    def digest(self) -> str:
        """SHA-256 of names, sizes and digests: equal for equal contents."""
        lines = (f"{member.sha256} {member.bytes} {member.name}\n" for member in self.members)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def text(self) -> str:
        """The file's text; :func:`_listing` is its inverse."""
        told = {
            "format": FORMAT,
            "run": self.run,
            "suite": self.suite,
            "judged_by": list(self.judged_by),
            "digest": self.digest,
            "members": [vars(member) for member in self.members],
            "left_out": list(self.left_out),
        }
        return json.dumps(told, indent=1) + "\n"


@dataclass(frozen=True)
class Packed:
    """What :func:`pack` wrote."""

    path: Path
    listing: Listing
    bytes: int


@dataclass(frozen=True)
class Unpacked:
    """A bundle in a temporary ``folder``; ``problems`` name what is not as the list says."""

    folder: Path
    listing: Listing
    problems: list[str]


# ------------------------------------------------------------------------------------- packing


def pack(
    folder: Path,
    output: Path | None = None,
    reports: Mapping[str, str] | None = None,
    force: bool = False,
) -> Packed:
    """Write the run in ``folder`` to ``output``, whole or not at all.

    ``output`` may be a folder; ``None``: ``<run-id>.tar.gz`` here.  ``reports`` are texts by file
    name for those of :data:`REPORTS` that the run lacks.

    :raises SelectionError: no run, one that is not what its manifest says, or that changes
        meanwhile; a file that is there already (without ``force``) or cannot be written.
    """
    run = read(folder)
    name = _plain_name(str(run.header.get("id") or folder.name))
    if output is None or output.is_dir():
        output = (output or Path()) / f"{name}{SUFFIX}"
    if not force and output.exists():
        raise _exists(output)
    problems = list(changed(folder))
    if problems:
        raise SelectionError(
            [Problem(told, "pack the run as it was judged") for told in problems[:20]]
        )
    sources: dict[str, Path | bytes] = {}
    for file in sorted({*_sealed(folder), *_ALWAYS, *REPORTS}):
        if (folder / file).exists():
            sources[file] = _plain(folder, file)
        elif file in REPORTS and reports and file in reports:
            sources[file] = reports[file].encode()
    versions = {str(i["suite"]) for i in run.header["invocations"] if "suite" in i}
    listing = Listing(
        name,
        VERSION,
        tuple(sorted(versions)),
        tuple(Member(file, *_weigh(source)) for file, source in sources.items()),
        tuple(_left_out(folder, sources)),
    )
    largest = max(member.bytes for member in listing.members)
    if len(sources) >= MAX_FILES or listing.bytes > MAX_BYTES or largest > MAX_FILE:
        told = f"{len(sources):,} files of {listing.bytes:,} bytes"
        remedy = f"a bundle holds {MAX_FILES:,} files and {MAX_BYTES >> 30} GiB: copy the folder"
        raise SelectionError(Problem("the run is too big for a bundle", remedy, told))
    try:
        size = _write(output, listing, sources, force)
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        raise SelectionError(
            Problem(why, "name another place: --output", file=str(output))
        ) from None
    return Packed(output, listing, size)


def _plain_name(text: str) -> str:
    """``text`` as a name that any machine can have."""
    return re.sub(r"[^A-Za-z0-9._+=@,-]+", "-", text)[:100].lstrip(".-") or "run"


def _sealed(folder: Path) -> set[str]:
    """Files that the manifest names."""
    return {file for file, _ in Manifest(folder).read()}


def _plain(folder: Path, name: str) -> Path:
    """The file ``name`` of the run, if it is one, under a name that any machine can have."""
    path = folder / name
    if _unsafe(name) or not path.is_file() or path.resolve() != folder.resolve() / name:
        remedy = "a run holds plain files with plain names: copy it without links"
        raise SelectionError(Problem("cannot be packed", remedy, file=str(path)))
    return path


def _unsafe(name: str) -> bool:
    """Whether ``name`` is anything but a relative path of at most four plain parts."""
    parts = name.split("/")
    return len(parts) > 4 or not all(_PART.fullmatch(part) for part in parts)


def _left_out(folder: Path, packed: Mapping[str, Any]) -> Iterator[str]:
    """What of the folder is not packed: files of its first level, others by their folder."""
    inside: Counter[str] = Counter()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in packed or (path.is_dir() and not path.is_symlink()):
            continue
        top, _, rest = name.partition("/")
        inside[f"{top}/" if rest else top] += 1
    for name, count in sorted(inside.items()):
        yield f"{name} ({count} files)" if name.endswith("/") else name


def _weigh(source: Path | bytes) -> tuple[int, str]:
    """Bytes and SHA-256."""
    reader = _Hashing(_open(source))
    with reader.stream:
        while reader.read(_CHUNK):
            pass
    return reader.bytes, reader.digest.hexdigest()


def _open(source: Path | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


class _Hashing:
    """Reads a stream and keeps count."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.digest.update(data)
        self.bytes += len(data)
        return data


def _write(output: Path, listing: Listing, sources: Mapping[str, Path | bytes], force: bool) -> int:
    """The archive at ``output``; its bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with partial.open("xb") as stream:
            # Neither name nor time in gzip's header; level 6 is zlib's own default.
            with (
                gzip.GzipFile("", "wb", 6, stream, mtime=0) as zipped,
                tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
            ):
                told = listing.text().encode()
                archive.addfile(_header(listing.run, LISTING, len(told)), io.BytesIO(told))
                for member in listing.members:
                    _add(archive, listing.run, member, sources[member.name])
                for member in listing.members:
                    source = sources[member.name]
                    if isinstance(source, Path) and source.stat().st_size != member.bytes:
                        raise _moving(member)  # a line was added
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
        _publish(partial, output, force)
    finally:
        partial.unlink(missing_ok=True)
    return size


def _add(archive: tarfile.TarFile, run: str, member: Member, source: Path | bytes) -> None:
    reader = _Hashing(_open(source))
    short = False
    with reader.stream:
        try:
            archive.addfile(_header(run, member.name, member.bytes), reader)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno is not None:
                raise
            short = True  # tarfile's own: the file ended too early
    if short or reader.digest.hexdigest() != member.sha256:
        raise _moving(member)


def _moving(member: Member) -> SelectionError:
    remedy = "wait until the run has ended, then pack it again"
    return SelectionError(Problem("changed while it was packed", remedy, member.name))


def _header(run: str, name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"{run}/{name}")
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info


def _publish(partial: Path, output: Path, force: bool) -> None:
    """Give ``partial`` its name; never over another file unless ``force``."""
    if not force:
        try:
            os.link(partial, output)
            return
        except FileExistsError:
            raise _exists(output) from None
        except OSError:  # a file system without hard links
            if output.exists():
                raise _exists(output) from None
    partial.replace(output)


def _exists(output: Path) -> SelectionError:
    remedy = "give --force to replace it, or another name: --output"
    return SelectionError(Problem("is there already", remedy, file=str(output)))


# ----------------------------------------------------------------------------------- unpacking


def is_archive(path: Path) -> bool:
    """Whether ``path`` is a file that begins like a bundle."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@contextmanager
def open_run(name: str | None, root: Path = Path("results")) -> Iterator[Path]:
    """The folder of run ``name``: a folder, an id under ``root``, a bundle; ``None``: the newest.

    A bundle's lives until the context ends, and is named by the run's id.

    :raises SelectionError: no such run; a bundle that is unsafe or not what its list says.
    """
    if name is None or not Path(name).is_file():
        yield find_run(name, root)
        return
    with unpacked(Path(name)) as found:
        if found.problems:
            remedy = "ask for it again: `shardproof verify` tells more"
            raise SelectionError([Problem(told, remedy) for told in found.problems[:20]])
        yield found.folder


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
                found = _unpack(reader, size, place)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise SelectionError(
                Problem(f"is no bundle, or damaged: {error}", "copy it again", file=str(archive))
            ) from None
        except OSError as error:
            why = f"cannot be unpacked: {error.strerror or error}"
            remedy = f"check the file, and room in {place.parent}"
            raise SelectionError(Problem(why, remedy, file=str(archive))) from None
        yield found


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
        self._left = min(limit, MAX_BYTES + _GRACE)

    def refuse(self, what: str, value: str | None = None) -> NoReturn:
        """Raise: this is not safe, or no bundle."""
        remedy = "take an archive that `shardproof bundle` made"
        raise SelectionError(Problem(what, remedy, value, str(self.archive)))

    def _take(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or a refusal."""
        self._left -= size
        if self._left < 0:
            self.refuse("unpacks to more bytes than any run has for its size")
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
                kind = _KINDS.get(info.type, "of no plain kind")
                self.refuse(f"holds what is {kind}: a bundle has plain files only", name)
            if _unsafe(name) or "/" not in name:
                self.refuse("holds a file with an unsafe name", name)
            count += 1
            if count > MAX_FILES:
                self.refuse(f"holds more than {MAX_FILES:,} files")
            yield name, info.size
        self._end()

    def _info(self, block: bytes) -> tarfile.TarInfo:
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.TarError, ValueError):
            self.refuse("is damaged: a header cannot be read")
        if not 0 <= info.size <= MAX_BYTES:
            self.refuse("holds a file of an impossible size", f"{info.name}: {info.size} bytes")
        return info

    def _long_name(self, size: int) -> str:
        if size > 4096:
            self.refuse("holds a header that is too long", f"{size} bytes")
        text = b"".join(self.content(size))
        found = _LONG_NAME.fullmatch(text)
        if found is None or int(found[1]) != len(text):
            self.refuse("holds a header that no bundle has", repr(text[:60]))
        return found[2].decode("utf-8", "replace")

    def content(self, size: int) -> Iterator[bytes]:
        """The bytes of a file, in pieces."""
        left = size
        while left:
            data = self._take(min(left, _CHUNK))
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
    if name != LISTING:
        reader.refuse(f"is no bundle: its first file is not {LISTING}", first or "empty")
    if length > MAX_LISTING:
        reader.refuse(f"has a list of more than {MAX_LISTING >> 20} MiB", f"{length} bytes")
    listing, problems = _listing(reader, run, b"".join(reader.content(length)))
    _fits(reader, listing, size, place)
    wanted = {member.name: member for member in listing.members}
    folder = place / run
    folder.mkdir()
    room = listing.bytes + _GRACE
    seen: set[str] = set()
    for full, length in headers:
        top, _, name = full.partition("/")
        told = reader.archive / name
        if top != run or name not in wanted:
            problems.append(f"{reader.archive / (full if top != run else name)}: was added")
        elif name in seen:
            problems.append(f"{told}: stands in it twice")
        else:
            seen.add(name)
            room -= length
            if room < 0:
                reader.refuse("holds more bytes than its list says", name)
            if _extract(reader, folder / name, length) != (wanted[name].bytes, wanted[name].sha256):
                problems.append(f"{told}: was changed")
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
    if wanted > MAX_BYTES or wanted > size * MAX_RATIO + _GRACE:
        reader.refuse(f"would unpack to {wanted:,} bytes, from {size:,}")
    free = shutil.disk_usage(place).free
    if wanted + _GRACE > free:
        remedy = "make room, or set TMPDIR to a folder that has some"
        told = f"{wanted:,} bytes, {free:,} are free in {place.parent}"
        raise SelectionError(Problem("no room to unpack", remedy, told, str(reader.archive)))


def _listing(reader: _Reader, run: str, text: bytes) -> tuple[Listing, list[str]]:
    """The list of a bundle, and what is wrong with its own digest."""
    try:
        told = json.loads(text)
        if told["format"] != FORMAT:
            by = f"format {told['format']!r}, packed by shardproof {told.get('suite')}"
            remedy = f"verify it with that version: this one ({VERSION}) knows format {FORMAT}"
            problem = Problem("has another format", remedy, by, str(reader.archive))
            raise SelectionError(problem)
        listing = Listing(
            str(told["run"]),
            str(told["suite"]),
            tuple(str(version) for version in told["judged_by"]),
            tuple(_member(member) for member in told["members"]),
            tuple(str(name) for name in told["left_out"]),
        )
    except SelectionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reader.refuse(f"has a damaged {LISTING}: {type(error).__name__}", str(error))
    if listing.run != run or len({member.name for member in listing.members}) != len(
        listing.members
    ):
        reader.refuse(f"has a damaged {LISTING}: another run, or a file listed twice", run)
    wrong = told.get("digest") != listing.digest
    return listing, [f"{reader.archive / LISTING}: was changed"] if wrong else []


def _member(told: Mapping[str, Any]) -> Member:
    member = Member(told["name"], told["bytes"], told["sha256"])
    if _unsafe(member.name) or type(member.bytes) is not int or member.bytes < 0:
        raise ValueError(f"{member.name!r}, {member.bytes!r} bytes")
    if not _SHA256.fullmatch(member.sha256):
        raise ValueError(f"{member.name!r}: no SHA-256")
    return member


# ----------------------------------------------------------------------------------- verifying


def verify_archive(archive: Path) -> tuple[Verified, Listing]:
    """Judge the run in a bundle again; every problem names the member that is at fault.

    :raises SelectionError: no bundle, a damaged one, or one that is not safe to unpack.
    """
    with unpacked(archive) as found:
        try:
            verified = verify(found.folder)
        except SelectionError:
            told = f"{archive / 'run.json'}: cannot be read, so nothing was judged"
            verified = Verified(0, 0, 0, [told])
        own = (text.replace(str(found.folder), str(archive)) for text in verified.problems)
        problems = list(dict.fromkeys([*found.problems, *map(_printable, own)]))
        return replace(verified, problems=problems), found.listing


def _printable(text: str) -> str:
    """``text`` without what would move a terminal's cursor: others wrote it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def notes(listing: Listing) -> Sequence[str]:
    """What to know of a bundle beside its verdicts."""
    told = [f"contents sha256:{listing.digest}"]
    others = [_printable(version) for version in listing.judged_by if version != VERSION]
    if others:
        told.append(
            f"judged by shardproof {', '.join(others)}, judged again by {VERSION}: "
            "where they differ, formulas or checks may have changed between them"
        )
    return told
