"""An open checkpoint: its metadata is checked, its tensors are read and verified chunk by chunk.

Nothing that a file says is believed before it is checked: sizes before memory is taken, places and
sums before anything is planned, bytes before they reach a tensor.  Reading never runs code.

    open      manifest -> every index -> length and header of every data file
              (each has a checksum in the one before it; cover: every name is there, once a copy)
    check     the chunks that hold what is wanted, each against its checksum; nothing is kept
    fill      the same again, and what is wanted of it into the caller's tensor
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy
from torch import Tensor

from shardproof.impls.reference.checkpoint.agreement import require_cover
from shardproof.impls.reference.checkpoint.checksum import crc32
from shardproof.impls.reference.checkpoint.data_file import (
    BLOCK,
    DataFile,
    Entry,
    bytes_of,
    head_bytes,
    read_head,
)
from shardproof.impls.reference.checkpoint.errors import (
    TAKE_ANOTHER,
    CheckpointError,
    NotCommitted,
)
from shardproof.impls.reference.checkpoint.manifest import (
    DATA,
    INDEX,
    MANIFEST,
    MOST_SUM_BYTES,
    MOST_TENSORS,
    Manifest,
    read_index,
    read_manifest,
)
from shardproof.impls.reference.checkpoint.reading.guarded_json import MOST_BYTES
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.reading.reshape import Read, plan
from shardproof.impls.reference.checkpoint.reading.safe_files import (
    exactly,
    open_regular,
    read_into,
    read_small,
)
from shardproof.impls.reference.checkpoint.root import PART, folders, newest

_MOST_OPEN = 64
#: (kind, name)
Name = tuple[str, str]


@dataclass
class Checkpoint:
    """An open checkpoint; a context manager, because its data files stay open.

    ``bytes_read`` counts data, as often as it is read; ``metadata_bytes`` manifest, indexes and
    headers.
    """

    #: What :meth:`verify` cannot see, in sentences.
    caveats: ClassVar[tuple[str, ...]] = ()
    folder: Path
    manifest: Manifest
    files: dict[str, DataFile]
    metadata_bytes: int
    bytes_read: int = 0
    _open: dict[str, int] = field(default_factory=dict)
    _scratch: bytearray = field(default_factory=bytearray)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The checkpoint in ``path``, or the newest of the root ``path``.

        :raises NotCommitted: there is none.
        :raises CheckpointError: it is damaged, hostile, or of another version.
        """
        folder = find(path)
        place = folder / MANIFEST
        data = read_small(place)
        manifest = read_manifest(data, place)
        one = cls(folder, manifest, {}, len(data))
        try:
            one._read_indexes()
            one._require_whole()
        except BaseException:
            one.close()
            raise
        return one

    def _read_indexes(self) -> None:
        tensors = sums = 0
        for listed in self.manifest.files:
            path = self.folder / (listed.name + INDEX)
            data = read_small(path)
            self.metadata_bytes += len(data)
            if crc32(data) != listed.index_sum:
                what = "this is not the index that the manifest lists: it was changed or replaced"
                raise CheckpointError(path, what, TAKE_ANOTHER)
            index = read_index(data, path, self.manifest.id)
            tensors, sums = tensors + len(index.entries), sums + 4 * len(index.sums)
            if tensors > MOST_TENSORS or sums > MOST_SUM_BYTES:
                what = f"at most {MOST_TENSORS} tensors or {MOST_SUM_BYTES} checksum bytes are read"
                raise CheckpointError(self.folder / MANIFEST, what, "save fewer tensors")
            self.files[index.name] = index
            self._check_head(index)

    def _check_head(self, index: DataFile) -> None:
        """Check that the data file has its length and its header."""
        path = self.folder / index.name
        file = self._file(index.name)
        size = os.fstat(file).st_size
        if size != index.bytes:
            what = f"expected {index.bytes} bytes, found {size}: the file was cut off or replaced"
            raise CheckpointError(path, what, TAKE_ANOTHER)
        if not 8 <= index.header_bytes <= min(size, MOST_BYTES):
            what = f"the index states an impossible header of {index.header_bytes} bytes"
            raise CheckpointError(path, what, TAKE_ANOTHER)
        head = exactly(file, path, 0, index.header_bytes)
        self.metadata_bytes += len(head)
        if crc32(head) != index.header_sum:
            raise CheckpointError(path, "the header was changed after it was written", TAKE_ANOTHER)

    def _file(self, name: str) -> int:
        """The open data file; only a few are open at once, because a process may have few."""
        if name not in self._open:
            while len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[name] = open_regular(self.folder / name)
        return self._open[name]

    def _require_whole(self) -> None:
        for (kind, name), copies in self.copies.items():
            for entries in copies.values():
                places = [entry.place for entry in entries]
                require_cover(kind, name, places, self.folder / MANIFEST)
            kinds = {(e.dtype, e.place.shape) for some in copies.values() for e in some}
            if len(kinds) > 1:
                what = f"{kind} {name[:200]!r} has parts of different dtypes or shapes"
                raise CheckpointError(self.folder / MANIFEST, what, TAKE_ANOTHER)

    @cached_property
    def copies(self) -> dict[Name, dict[int, list[Entry]]]:
        """Kind and name -> the entries of each copy, by the copy's number."""
        found: dict[Name, dict[int, list[Entry]]] = {}
        for file in self.files.values():
            for entry in file.entries:
                by_replica = found.setdefault((entry.kind, entry.name), {})
                by_replica.setdefault(entry.replica, []).append(entry)
        return found

    def names(self, kind: str) -> list[str]:
        """Names of ``kind``, sorted."""
        return sorted(name for own, name in self.copies if own == kind)

    @cached_property
    def slots(self) -> dict[str, list[str]]:
        """Parameter -> names of its slots, ``<parameter>.<slot>``."""
        found: dict[str, list[str]] = {}
        for name in self.names("optimizer"):
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    @cached_property
    def own_copies(self) -> set[int]:
        """Numbers of the copies of optimizer state if ranks that train alone saved it."""
        slots = (each for (kind, _), each in self.copies.items() if kind == "optimizer")
        return {number for each in slots if len(each) > 1 for number in each}

    def slots_of(self, parameter: str, copy: int | None) -> list[str]:
        """Names of a parameter's slots; those of ``copy`` only, if ranks that train alone saved
        it.
        """
        names = self.slots.get(parameter, [])
        is_own = copy in self.own_copies
        return [n for n in names if not is_own or copy in self.copies["optimizer", n]]

    def entries(self, name: Name, replica: int = 0) -> list[Entry]:
        """The entries of one copy: number ``replica``, or the first. KeyError if the name is
        unknown.
        """
        copies = self.copies[name]
        return copies.get(replica) or copies[min(copies)]

    def plan(self, wanted: Place, name: Name, replica: int = 0) -> list[Read]:
        """The reads of one copy of ``name`` that fill the place ``wanted`` (reshape.py).

        :raises ValueError: it has another shape, or is cut into too many runs.
        """
        return plan(wanted, self.entries(name, replica))

    # --------------------------------------------------------------------------------- elements

    def check(self, reads: Sequence[Read]) -> None:
        """:raises CheckpointError: a chunk that ``reads`` need differs from what was written."""
        for read in reads:
            for _ in self._blocks(read):
                pass

    def fill(self, target: Tensor, reads: Sequence[Read]) -> None:
        """Copy ``reads`` into ``target``, a contiguous host tensor of the stored dtype.

        :raises CheckpointError: a chunk is not as it was written.
        """
        memory = numpy.frombuffer(bytes_of(target), numpy.uint8)
        for read in reads:
            for begin, data in self._blocks(read):
                _scatter(memory, read, begin, numpy.frombuffer(data, numpy.uint8))

    def _blocks(self, read: Read) -> Iterator[tuple[int, memoryview]]:
        """First byte (of the stored tensor) and bytes of each block of chunks that ``read`` needs.

        A block is valid until the next one.
        """
        chunk, ends = read.entry.chunk, read.sources + read.lengths
        most = max(1, BLOCK // chunk)
        for low, high in _spans(read.sources // chunk, (ends - 1) // chunk, most):
            yield low * chunk, self._chunks(read.entry, low, high)

    def _chunks(self, entry: Entry, low: int, high: int) -> memoryview:
        """Chunks ``low`` to ``high - 1`` of a tensor, in their stored form."""
        path, chunk = self.folder / entry.file, entry.chunk
        begin = entry.begin + low * chunk
        length = min(entry.end, begin + (high - low) * chunk) - begin
        if len(self._scratch) < length:
            self._scratch = bytearray()  # never two
            self._scratch = bytearray(length)
        view = memoryview(self._scratch)[:length]
        read_into(view, self._file(entry.file), path, begin)
        self.bytes_read += length
        sums = self.files[entry.file].sums
        for number in range(low, high):
            at = (number - low) * chunk
            part = view[at : at + chunk]
            if crc32(part) != sums[entry.first_sum + number]:
                what = (
                    f"{entry.kind} {entry.name[:200]!r} {entry.place}: bytes {begin + at} to "
                    f"{begin + at + len(part)} were changed since they were written"
                )
                raise CheckpointError(path, what, TAKE_ANOTHER)
        return view

    def verify(self) -> Iterator[CheckpointError]:
        """All problems: every header against its index, every chunk against its checksum."""
        for file in self.files.values():
            try:
                self._verify_head(file)
            except CheckpointError as error:
                yield error
            for entry in file.entries:
                step = max(1, BLOCK // entry.chunk)
                count = -(-(entry.end - entry.begin) // entry.chunk)
                for low in range(0, count, step):
                    try:
                        self._chunks(entry, low, min(low + step, count))
                    except CheckpointError as error:
                        yield error

    def _verify_head(self, file: DataFile) -> None:
        path = self.folder / file.name
        data = exactly(self._file(file.name), path, 0, file.header_bytes)
        if head_bytes(data[:8], file.bytes, path, MOST_BYTES) != file.header_bytes:
            raise CheckpointError(path, "the index gives another header length", TAKE_ANOTHER)
        found = read_head(data, file.bytes, path)
        told = {e.key: (e.dtype, e.place.own_shape, e.begin, e.end) for e in file.entries}
        for key in sorted(found.keys() | told.keys()):
            if found.get(key) != told.get(key):
                what = f"{key[:200]!r}: the header has {found.get(key)}, the index {told.get(key)}"
                raise CheckpointError(path, what, TAKE_ANOTHER)

    def close(self) -> None:
        """Close the data files."""
        self._scratch = bytearray()
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find(path: Path) -> Path:
    """The checkpoint ``path``, or the newest one in it.

    :raises NotCommitted: there is none.
    """
    if not path.is_dir():
        raise NotCommitted(path, "this path is not a folder", "name the folder of a checkpoint")
    if (path / MANIFEST).exists():
        if path.is_symlink():
            raise NotCommitted(path, "links are not followed", "name the folder that it points to")
        return path
    try:
        folder = newest(path)
        torn = [one.path.name for one in folders(path)]
    except OSError as error:
        what = f"this folder cannot be read: {error.strerror}"
        raise NotCommitted(path, what, "name a folder that you may read") from None
    if folder is not None:
        return folder
    if torn or (path / PART).exists() or any(path.glob("*" + DATA)):
        what = f"this folder has no {MANIFEST}: the save was cut short, so there is no checkpoint"
        raise NotCommitted(path, what, "load an earlier, complete checkpoint, or save a new one")
    raise NotCommitted(path, "this folder holds no checkpoint", "name a folder with checkpoints")


def _scatter(memory: Any, read: Read, begin: int, block: Any) -> None:
    """Copy the part of ``block`` that ``read`` wants into ``memory``; the block begins at byte
    ``begin``.
    """
    stop, ends = begin + len(block), read.sources + read.lengths
    first = numpy.searchsorted(ends, begin, "right")
    last = numpy.searchsorted(read.sources, stop, "left")
    for run in range(int(first), int(last)):
        source, target = int(read.sources[run]), int(read.targets[run])
        left, right = max(source, begin), min(int(ends[run]), stop)
        at = target + left - source
        memory[at : at + right - left] = block[left - begin : right - begin]


def _spans(first: Any, last: Any, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of length at most ``most`` that cover the ascending ``first`` to ``last``, each
    once.
    """
    if not len(first):
        return
    gaps = numpy.flatnonzero(first[1:] > last[:-1] + 1)
    lows = first[numpy.concatenate([[0], gaps + 1])]
    highs = last[numpy.concatenate([gaps, [len(last) - 1]])] + 1
    for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
        for begin in range(low, high, most):
            yield begin, min(begin + most, high)
