"""A folder of ``torch.distributed.checkpoint`` with the interface of the suite's own checkpoints.

Names are taken apart as ``state`` puts them together; other tensors keep their keys, as ``extra``.
Nothing is carried out: ``.metadata`` is read by ``metadata``, tensors by ``torch.load`` with
``weights_only=True``, once their file has been looked at.

    in the folder                           here
    model.<name>                            a parameter, or a buffer where progress.about says so
    optimizer.state.<name>.<slot>           optimizer state ``<name>.<slot>``
    rng.<rank>.<generator>                  rng ``<generator>@<rank>``
    progress.step, .extra, .scaler, .about  what the manifest says of the training
    optimizer.param_groups...               left out: follows from the optimizer in progress.about

torch writes each chunk as a zip file, which has a CRC-32 of its elements, and does not look at it
when it loads.  Here it is compared, so that a flipped bit shows.  ``.metadata`` itself has none.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from shardproof.impls.pytorch.checkpoint import folders, metadata
from shardproof.impls.pytorch.checkpoint.metadata import Chunk, Stored
from shardproof.impls.reference.checkpoint.data_file import NAMES, DataFile, Entry, bytes_of
from shardproof.impls.reference.checkpoint.errors import (
    TAKE_ANOTHER,
    CheckpointError,
    NotCommitted,
)
from shardproof.impls.reference.checkpoint.manifest import About, Listed, Manifest
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.regions import Place
from shardproof.impls.reference.checkpoint.reading.reshape import Read
from shardproof.impls.reference.checkpoint.reading.safe_files import (
    exactly,
    read_small,
    size_of,
)

KIND = "dcp"
#: Bytes of a value that is no tensor, and what a zip file has beside elements.
MOST_VALUE, MOST_WRAPPING = 1 << 20, 1 << 16
_DTYPES = {str(dtype).removeprefix("torch."): name for dtype, name in NAMES.items()}
_PROGRESS = "progress."


@dataclass
class DcpCheckpoint(Checkpoint):
    """An open folder; ``chunks`` maps entries to chunks."""

    caveats = (
        "the CRC-32 of each tensor and value was compared; .metadata has no CRC-32, so its "
        "content was only checked for plausibility",
    )
    chunks: dict[Entry, Chunk] = field(default_factory=dict)
    values: dict[str, Chunk] = field(default_factory=dict)
    _last: tuple[Entry | None, bytes] = (None, b"")

    @classmethod
    def open(cls, path: Path) -> Self:
        """The checkpoint in ``path``, or the newest of the root ``path``.

        :raises NotCommitted: there is none.
        :raises CheckpointError: it is damaged, hostile, or in a form that is not read here.
        """
        folder = find(path)
        data = _small(folder / folders.DCP)
        stored = metadata.read(data, folder / folders.DCP)
        one = cls(folder, _manifest(folder, About(0, "unknown", {})), {}, len(data))
        try:
            one.values = {key: s.chunks[0] for key, s in stored.items() if not s.dtype}
            for chunk in (chunk for s in stored.values() for chunk in s.chunks):
                one._require_inside(chunk)
            about, buffers = one._about()
            one._read_entries(stored, buffers, about.aliases)
            one.manifest = _manifest(folder, about, sorted(one.files))
            one._require_whole()
        except BaseException:
            one.close()
            raise
        return one

    def _require_inside(self, chunk: Chunk) -> None:
        """:raises CheckpointError: the name points elsewhere, or the file is too short."""
        path = self.folder / chunk.file
        if Path(chunk.file).name != chunk.file or chunk.file in (".", "..", folders.DCP):
            what = f"the metadata names {chunk.file[:80]!r}, which is not a file of this folder"
            raise CheckpointError(self.folder / folders.DCP, what, TAKE_ANOTHER)
        if chunk.file not in self.files:
            self.files[chunk.file] = DataFile(chunk.file, size_of(path), 0, 0, array("I"), ())
        if chunk.begin + chunk.length > self.files[chunk.file].bytes:
            what = (
                f"the file ends at byte {self.files[chunk.file].bytes}, before the end of a chunk"
            )
            raise CheckpointError(path, what, TAKE_ANOTHER)

    def _about(self) -> tuple[About, frozenset[str]]:
        """Metadata of the training, and the names of buffers."""
        said: Mapping[str, Any] = self._json("about", {})
        extra: Mapping[str, Any] = self._json("extra", {})
        scale, good = self._value("scaler.scale"), self._value("scaler._growth_tracker")
        try:
            about = About(
                int(self._value("step", 0)),
                str(said.get("strategy", "unknown")),
                {str(axis): int(size) for axis, size in said.get("mesh", {}).items()},
                optimizer=said.get("optimizer"),
                scaler=None if scale is None else {"scale": float(scale), "good": int(good)},
                aliases={str(n): str(first) for n, first in said.get("aliases", {}).items()},
                data=extra.get("data", {}),
                extra={name: value for name, value in extra.items() if name != "data"},
            )
            return about, frozenset(map(str, said.get("buffers", ())))
        except (TypeError, ValueError, AttributeError) as error:
            what = f"the file that describes the training run has an unexpected form: {error}"
            raise CheckpointError(self.folder / folders.DCP, what, TAKE_ANOTHER) from None

    def _json(self, name: str, missing: Any) -> Any:
        text = self._value(name)
        try:
            return missing if text is None else json.loads(str(text))
        except (ValueError, RecursionError) as error:
            what = f"{_PROGRESS}{name} is not JSON: {error}"
            raise CheckpointError(self.folder / folders.DCP, what, TAKE_ANOTHER) from None

    def _value(self, name: str, missing: Any = None) -> Any:
        """A number or text of the training's progress."""
        chunk = self.values.get(_PROGRESS + name)
        if chunk is None:
            return missing
        if chunk.length > MOST_VALUE:
            what = f"{_PROGRESS}{name} has {chunk.length} bytes, more than {MOST_VALUE}"
            raise CheckpointError(self.folder / chunk.file, what, TAKE_ANOTHER)
        found = self._load(chunk, MOST_VALUE)
        if not isinstance(found, (int, float, str)):
            what = f"{_PROGRESS}{name} must be a number or a text, not a {type(found).__name__}"
            raise CheckpointError(self.folder / chunk.file, what, TAKE_ANOTHER)
        return found

    def _read_entries(
        self, stored: Mapping[str, Stored], buffers: frozenset[str], aliases: Mapping[str, str]
    ) -> None:
        entries: dict[str, list[Entry]] = defaultdict(list)
        for key, one in sorted(stored.items()):
            kind, name = kind_of(key, buffers)
            if kind in ("parameters", "buffers") and name in aliases:
                continue  # of a tied tensor, which is there under its first name
            for chunk in one.chunks if one.dtype else ():
                entry = self._entry(kind, name, key, one, chunk)
                self.chunks[entry] = chunk
                entries[chunk.file].append(entry)
        for file, found in self.files.items():
            size = found.bytes
            self.files[file] = DataFile(file, size, 0, 0, array("I"), tuple(entries[file]))

    def _entry(self, kind: str, name: str, key: str, one: Stored, chunk: Chunk) -> Entry:
        """The entry of a chunk, once it can be described."""
        place_of = self.folder / folders.DCP
        if one.dtype not in _DTYPES:
            what = (
                f"{key[:200]!r} has the dtype {one.dtype:.40}, which this reader does not support"
            )
            raise CheckpointError(
                place_of, what, f"save this tensor with one of these dtypes: {', '.join(_DTYPES)}"
            )
        slices = tuple((o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=False))
        place = Place(one.shape, slices, None)
        if len(chunk.offsets) != len(chunk.sizes) or place.problem():
            problem = place.problem() or "a chunk has different numbers of offsets and sizes"
            raise CheckpointError(place_of, f"{key[:200]!r}: {problem}", TAKE_ANOTHER)
        size = math.prod(chunk.sizes) * _itemsize(one.dtype)
        if size > chunk.length or chunk.length > size + MOST_WRAPPING:
            what = (
                f"{key[:200]!r} has a chunk of {size} bytes, but {chunk.length} bytes are "
                "stored for the chunk"
            )
            raise CheckpointError(place_of, what, TAKE_ANOTHER)
        text = chunk.file.strip("_").partition("_")[0]
        owner = int(text) if text.isdecimal() and len(text) < 10 else 0
        return Entry(
            *(chunk.file, key + str(place), kind, name, _DTYPES[one.dtype], place),
            *(0, owner, chunk.begin, chunk.begin + size, 0),
        )

    # --------------------------------------------------------------------------------- elements

    def _blocks(self, read: Read) -> Iterator[tuple[int, memoryview]]:
        """The whole chunk in one block, because a zip file is read as a whole."""
        entry, data = self._last
        if entry != read.entry:
            data = self._elements(read.entry)
            self._last = (read.entry, data)
        yield 0, memoryview(data)

    def _elements(self, entry: Entry) -> bytes:
        """The bytes of a chunk's elements, row-major.

        :raises CheckpointError: they are not as they were written.
        """
        chunk = self.chunks[entry]
        tensor = self._load(chunk, entry.end - entry.begin)
        shape, dtype = tuple(chunk.sizes), entry.dtype
        if (
            not isinstance(tensor, Tensor)
            or tensor.layout != torch.strided
            or tuple(tensor.shape) != shape
            or NAMES.get(tensor.dtype) != dtype
        ):
            what = (
                f"the stored object of {entry.kind} {entry.name[:200]!r} is not a tensor of "
                f"{dtype} with shape {list(shape)}"
            )
            raise CheckpointError(self.folder / entry.file, what, TAKE_ANOTHER)
        return bytes(bytes_of(tensor.contiguous()))

    def _load(self, chunk: Chunk, most: int) -> Any:
        """The object that torch saved in ``chunk``, with at most ``most`` bytes of elements."""
        path = self.folder / chunk.file
        data = exactly(self._file(chunk.file), path, chunk.begin, chunk.begin + chunk.length)
        self.bytes_read += len(data)
        where = f"bytes {chunk.begin} to {chunk.begin + chunk.length}"
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as found:
                # Before anything is unpacked: nothing is larger than it lies there.
                sizes = [(i.compress_type, i.file_size > len(data)) for i in found.infolist()]
                if any(kind != zipfile.ZIP_STORED or large for kind, large in sizes):
                    raise zipfile.BadZipFile(
                        "torch did not write this archive: one of its members is compressed, or "
                        "is larger than the archive"
                    )
                wrong = found.testzip()
            if wrong is not None:
                what = (
                    f"{where} were changed since they were written: the CRC-32 of {wrong} differs"
                )
                raise CheckpointError(path, what, TAKE_ANOTHER)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001 - of two readers, for any bytes at all
            first = str(error).splitlines() or [type(error).__name__]
            what = f"{where} are not an object that torch saved: {first[0]:.200}"
            raise CheckpointError(path, what, TAKE_ANOTHER) from None

    def verify(self) -> Iterator[CheckpointError]:
        """All problems: every chunk and value against its own checksum."""
        for entry in self.chunks:
            try:
                self._elements(entry)
            except CheckpointError as error:
                yield error
        for chunk in self.values.values():
            try:
                self._load(chunk, MOST_VALUE)
            except CheckpointError as error:
                yield error


def kind_of(key: str, buffers: frozenset[str]) -> tuple[str, str]:
    """The kind and the name of a tensor that is saved under ``key``."""
    if key.startswith("model."):
        name = key.removeprefix("model.")
        return ("buffers" if name in buffers else "parameters"), name
    if key.startswith("optimizer.state."):
        return "optimizer", key.removeprefix("optimizer.state.")
    first, _, rest = key.partition(".")
    rank, _, generator = rest.partition(".")
    if first == "rng" and rank.isdecimal():
        return "rng", f"{generator}@{rank}"
    return "extra", key


def find(path: Path) -> Path:
    """The folder ``path``, or the newest in it.

    :raises NotCommitted: there is none of torch's.
    """
    try:
        found = folders.find(path)
    except OSError as error:
        remedy = "give the path of a checkpoint, or of a folder that contains checkpoints"
        what = (
            f"this path holds no checkpoint{': ' if error.strerror else ''}{error.strerror or ''}"
        )
        raise NotCommitted(path, what, remedy) from None
    if not (found / folders.DCP).is_file():
        what = f"the folder holds {folders.FULL}, a single file of torch, and no sharded checkpoint"
        raise NotCommitted(found, what, "load this file by torch.load(weights_only=True)")
    return found


def _manifest(folder: Path, about: About, files: list[str] | None = None) -> Manifest:
    listed = tuple(Listed(name, 0) for name in files or ())
    return Manifest(KIND, folder.name, "0" * 8, (), about, listed)


def _small(path: Path) -> bytes:
    """The whole content of a small file."""
    size = size_of(path)
    if size > metadata.MOST_BYTES:
        what = f"the file has {size} bytes, but this reader accepts at most {metadata.MOST_BYTES}"
        raise CheckpointError(path, what, "read the file with torch, if you trust its author")
    return read_small(path)


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size
