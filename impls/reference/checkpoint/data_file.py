"""Tensors in a file of the safetensors format, with a checksum of every chunk of them.

The format (huggingface/safetensors, README "Format")::

    8 bytes    n, the length of the header, little endian
    n bytes    JSON: {key: {"dtype", "shape", "data_offsets": [begin, end]}, ...}, then spaces
    the rest   the tensors' elements, row-major, little endian, without gaps

The upstream package writes a whole file at once, by itself: it can neither stream from tensors that
must not be copied nor go through the file layer.  Its reader knows no checksums, and takes 100 MB
of header.  So both are written here; tests read the files with the upstream package.

Each tensor is cut into chunks, whose checksums go into the file's index (checksum.py).  A tensor is
written block by block: what was summed is still in the processor's cache, and of a tensor that is
not contiguous, or not in host memory, no more than a block is copied at a time.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.impls.reference.checkpoint.checksum import Sums, chunk_for, crc32
from shardproof.impls.reference.checkpoint.errors import TAKE_ANOTHER, CheckpointError
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.reading.guarded_json import Fields, parse
from shardproof.impls.reference.checkpoint.reading.regions import Place

#: Names of the format -> dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes that are summed and written, or read and verified, at once; a multiple of most chunks.
BLOCK = 4 << 20
_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a data file: its ``place`` in the tensor ``name``, and its bytes in the file.

    ``begin`` and ``end`` are bytes of the file; ``first_sum`` is the number of the first checksum.
    ``replica`` and ``owner``: which copy of the name it is, and the rank that held it.
    """

    file: str
    key: str
    kind: str
    name: str
    dtype: str
    place: Place
    replica: int
    owner: int
    begin: int
    end: int
    first_sum: int

    @property
    def chunk(self) -> int:
        """Number of bytes that share a checksum."""
        return chunk_for(self.end - self.begin)


@dataclass(frozen=True)
class Held:
    """A tensor to write: its elements and the fields of :class:`Entry`."""

    key: str
    kind: str
    name: str
    place: Place
    replica: int
    owner: int
    tensor: Tensor

    @property
    def bytes(self) -> int:
        """Size of its elements."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class DataFile:
    """The description of a data file: its tensors in order, and the checksums of their chunks."""

    name: str
    bytes: int
    header_bytes: int
    header_sum: int
    sums: array[int]
    entries: tuple[Entry, ...]


def blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The elements in file order, block by block; no block is larger than :data:`BLOCK`.

    The tensor's own memory where that is contiguous and of the host, else copies of a block each.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        data = bytes_of(tensor)
        yield from (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
    elif tensor.numel() * tensor.element_size() <= BLOCK:
        yield bytes_of(tensor.cpu().contiguous())
    else:  # halves along the first dim that can be cut, which follow one another in the file
        dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
        half = tensor.shape[dim] // 2
        for part in tensor.split([half, tensor.shape[dim] - half], dim):
            yield from blocks_of(part)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    if not tensor.numel():
        return memoryview(b"")
    elements: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(elements)


class Streamed:
    """A data file being written, whose tensors arrive one at a time in the order of ``tensors``.

    That order is by size of an element, the largest first, so that every tensor lies aligned.  What
    is told at first may lie on the meta device; what is added has that shape and dtype.
    """

    def __init__(
        self, layer: FileLayer, path: Path, tensors: Sequence[Held], identity: dict[str, str]
    ) -> None:
        assert sys.byteorder == "little"  # as the format; so is every machine that torch runs on
        self.layer, self.path = layer, path
        self.tensors = sorted(tensors, key=lambda held: -held.tensor.element_size())
        self.head = _head(path, self.tensors, identity)
        self.sums = array("I")
        self.entries: list[Entry] = []
        self.at = len(self.head)

    def __enter__(self) -> Streamed:
        self.file = self.layer.create(self.path)
        try:
            self.layer.write(self.path, self.file, memoryview(self.head))
        except BaseException:
            self.layer.close(self.file)
            raise
        return self

    def add(self, tensor: Tensor) -> None:
        """Append the next of :attr:`tensors`."""
        held, sums = self.tensors[len(self.entries)], Sums(chunk_for(tensor.nbytes))
        assert tensor.nbytes == held.bytes, held.key
        for block in blocks_of(tensor):
            sums.feed(block)
            self.layer.write(self.path, self.file, block)
        sums.end()
        end = self.at + held.bytes
        self.entries.append(
            Entry(
                *(self.path.name, held.key, held.kind, held.name, NAMES[held.tensor.dtype]),
                *(held.place, held.replica, held.owner),
                *(self.at, end, len(self.sums)),
            )
        )
        self.sums.extend(sums.found)
        self.at = end

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                assert len(self.entries) == len(self.tensors)
                self.layer.sync(self.path, self.file)
        finally:
            self.layer.close(self.file)

    @property
    def result(self) -> DataFile:
        """The description of the written file."""
        head = self.head
        found = self.path.name, self.at, len(head), crc32(head), self.sums
        return DataFile(*found, tuple(self.entries))


def _head(path: Path, tensors: Sequence[Held], identity: dict[str, str]) -> bytes:
    """The length and the header, padded so that data begins at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": identity}
    at = 0
    for held in tensors:
        dtype = held.tensor.dtype
        if dtype not in NAMES:
            what = f"{held.kind} {held.name!r} has the dtype {dtype}, which the format cannot store"
            raise CheckpointError(path, what, f"use one of the dtypes {', '.join(map(str, NAMES))}")
        if held.key in header:
            what = f"two tensors of this rank have the same name and range: {held.key!r}"
            raise CheckpointError(path, what, "give each saved piece its own range of elements")
        shape = list(held.place.own_shape)
        offsets = [at, at + held.bytes]
        header[held.key] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": offsets}
        at += held.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text


def read_head(
    data: bytes, size: int, file: Path
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Key -> dtype, shape, begin and end in the file, from a header that starts with its length.

    ``size`` is that of the whole file.

    :raises CheckpointError: the tensors are not what a file of that size can hold.
    """
    fields = parse(data[_LENGTH:], file)
    fields.pop("__metadata__", None)
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for key, value in fields.items():
        one = Fields(value, file, f"{key[:100]!r}: ")
        dtype, shape, offsets = one.text("dtype"), one.numbers("shape"), one.numbers("data_offsets")
        if dtype not in DTYPES:
            raise one.wrong("dtype", f"one of {', '.join(DTYPES)}", dtype)
        if len(offsets) != 2:
            raise one.wrong("data_offsets", "two numbers", offsets)
        if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
            raise one.wrong(
                "data_offsets",
                f"a range of {math.prod(shape) * DTYPES[dtype].itemsize} bytes",
                offsets,
            )
        found[key] = (dtype, shape, len(data) + offsets[0], len(data) + offsets[1])
    at = len(data)
    for key, (_, _, begin, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin != at:
            what = f"{key[:100]!r} begins at byte {begin}, but the tensor before ends at byte {at}"
            raise CheckpointError(file, what, TAKE_ANOTHER)
        at = end
    if at != size:
        what = f"the file has {size} bytes, but its header describes {at}"
        raise CheckpointError(file, what, TAKE_ANOTHER)
    return found


def head_bytes(start: bytes, size: int, file: Path, most: int) -> int:
    """Size of header and length field, from the first bytes of the file.

    :raises CheckpointError: no such file, or a header of over ``most`` bytes.
    """
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH or length > min(size - _LENGTH, most):
        what = (
            f"the file has {size} bytes, but its header would have {length} (accepted: at most "
            f"{most})"
        )
        raise CheckpointError(file, what, TAKE_ANOTHER)
    return _LENGTH + length
