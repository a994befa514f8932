"""A run's folder -> one archive, whole or not at all, and the same bytes for the same run."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardproof import VERSION
from shardproof.errors import Problem, SelectionError
from shardproof.runs.bundle import form
from shardproof.runs.bundle.form import REPORTS, Listing, Member
from shardproof.runs.integrity import require_unchanged
from shardproof.runs.records import Manifest
from shardproof.runs.run_folder import read


@dataclass(frozen=True)
class Packed:
    path: Path
    listing: Listing
    bytes: int


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
    # A name that any machine can have.
    name = re.sub(r"[^A-Za-z0-9._+=@,-]+", "-", run.name)[:100].lstrip(".-") or "run"
    if output is None or output.is_dir():
        output = (output or Path()) / f"{name}{form.SUFFIX}"
    if not force and output.exists():
        raise _exists(output)
    require_unchanged(folder)
    sources: dict[str, Path | bytes] = {}
    for file in sorted({*(file for file, _ in Manifest(folder).read()), *form.ALWAYS, *REPORTS}):
        if (folder / file).exists():
            sources[file] = _plain(folder, file)
        elif file in REPORTS and reports and file in reports:
            sources[file] = reports[file].encode()
    listing = Listing(
        run=name,
        suite=VERSION,
        judged_by=tuple(sorted({one.suite for one in run.header.invocations})),
        members=tuple(_member(file, source) for file, source in sources.items()),
        left_out=tuple(_left_out(folder, sources)),
    )
    largest = max(member.bytes for member in listing.members)
    if len(sources) >= form.MAX_FILES or listing.bytes > form.MAX_BYTES or largest > form.MAX_FILE:
        extent = f"{len(sources):,} files of {listing.bytes:,} bytes"
        most = f"{form.MAX_FILES:,} files and {form.MAX_BYTES >> 30} GiB"
        remedy = f"a bundle holds at most {most}: copy the folder"
        raise SelectionError(Problem("the run is too big for a bundle", remedy, extent))
    try:
        return Packed(output, listing, _write(output, listing, sources, force))
    except OSError as error:
        why, remedy = f"cannot be written: {error.strerror or error}", "name another --output"
        raise SelectionError(Problem(why, remedy, file=str(output))) from None


def _plain(folder: Path, name: str) -> Path:
    """The file ``name`` of the run, if it is one, under a name that any machine can have."""
    path = folder / name
    if form.unsafe(name) or not path.is_file() or path.resolve() != folder.resolve() / name:
        remedy = "copy the run without links; names have only letters, digits and ._+=@,-"
        raise SelectionError(Problem("cannot be packed", remedy, file=str(path)))
    return path


def _left_out(folder: Path, packed: Mapping[str, Any]) -> Iterator[str]:
    """The part of the folder that is not packed: files of its first level, others by their
    folder.
    """
    inside: Counter[str] = Counter()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in packed or (path.is_dir() and not path.is_symlink()):
            continue
        top, _, rest = name.partition("/")
        inside[f"{top}/" if rest else top] += 1
    for name, count in sorted(inside.items()):
        yield f"{name} ({count} files)" if name.endswith("/") else name


def _member(name: str, source: Path | bytes) -> Member:
    with _open(source) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        return Member(name=name, bytes=stream.seek(0, os.SEEK_END), sha256=digest)


def _open(source: Path | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


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
                listed = listing.text().encode()
                archive.addfile(_header(listing.run, form.LISTING, len(listed)), io.BytesIO(listed))
                for member in listing.members:
                    with _open(sources[member.name]) as source, _whole(member):
                        info = _header(listing.run, member.name, member.bytes)
                        archive.addfile(info, source)
                for member in listing.members:
                    if _member(member.name, sources[member.name]) != member:
                        raise _moving(member)
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
        _publish(partial, output, force)
    finally:
        partial.unlink(missing_ok=True)
    return size


@contextmanager
def _whole(member: Member) -> Iterator[None]:
    """:raises SelectionError: what is inside found the end of the file of ``member`` too early."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # tarfile's own
            raise _moving(member) from None
        raise


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
    remedy = "add --force to replace the file, or name another by --output"
    return SelectionError(Problem("the file exists", remedy, file=str(output)))
