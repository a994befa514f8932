"""The metadata of a checkpoint: the manifest, and an index for each data file.

    manifest.json       about the training: strategy, mesh, optimizer, scaler, step, data progress;
                        the names of all data files, with the CRC-32 of their indexes
    rank-00000.json     about one data file: its bytes, the CRC-32 of its header and of each chunk;
                        of each tensor kind, name, dtype, global shape, place, replica, owner

Written by different ranks, each knows the checkpoint's id, so a file of another step or run shows.
Everything is checked when it is read: kinds of values, sizes, places, sums.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardproof.axes import roles
from shardproof.impls.reference.checkpoint.data_file import DTYPES, DataFile, Entry
from shardproof.impls.reference.checkpoint.errors import TAKE_ANOTHER, CheckpointError
from shardproof.impls.reference.checkpoint.reading.guarded_json import (
    MOST_BYTES,
    Fields,
    seal,
    unseal,
)
from shardproof.impls.reference.checkpoint.reading.regions import Place

FORMAT, VERSION = "shardproof checkpoint", 2
MANIFEST = "manifest.json"
DATA, INDEX = ".safetensors", ".json"
#: What is saved; ``rng`` and ``extra`` are tensors that belong to one rank or to nobody.
KINDS = ("parameters", "buffers", "optimizer", "rng", "extra")
#: Data files of a checkpoint; tensors, and bytes of checksums, over all of them.  A tensor is known
#: by its place for a few hundred bytes, which had to stand in an index: no small file takes much.
MOST_FILES, MOST_TENSORS, MOST_SUM_BYTES = 1 << 14, 1 << 20, 64 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class About:
    """Metadata about the training, apart from tensors.

    ``step`` counts the optimizer steps that were made.  ``mesh`` maps axes to their sizes;
    ``optimizer`` are the fields of an ``OptimizerSpec``; ``scaler`` is the state of loss scaling;
    ``precision`` names dtypes; ``aliases`` maps further names of tied tensors to the one that is
    saved; ``data`` is the progress in the data; ``extra`` whatever else the caller wants back, as
    JSON; ``versions`` are those of the packages that saved.
    """

    step: int
    strategy: str
    mesh: Mapping[str, int]
    optimizer: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    precision: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks that saved."""
        return math.prod(self.mesh.values())

    def has_ranks_of(self, mesh: Mapping[str, int]) -> bool:
        """Whether every rank of ``mesh`` has the data, stage and layer parts of the saved rank of
        its number. Only then does per-rank state, such as a generator, have a meaning.
        """
        if self.world != math.prod(mesh.values()):
            return False
        one, other = self.mesh, mesh
        return all(_coordinates(one, axes) == _coordinates(other, axes) for axes in roles())


def _coordinates(mesh: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """For each rank, its number along ``axes`` together; the last axis of ``mesh`` is innermost."""
    found = [0]
    for axis, size in mesh.items():
        step = size if axis in axes else 1
        found = [at * step + (n if axis in axes else 0) for at in found for n in range(size)]
    return found


@dataclass(frozen=True)
class Listed:
    """The manifest's entry for a data file and its index, without file endings."""

    name: str
    index_sum: int


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint; every file of it contains ``id``.

    ``before`` are the ids of those that this one comes from and that stood beside it, the newest
    first.
    """

    kind: str
    id: str
    run: str
    before: tuple[str, ...]
    about: About
    files: tuple[Listed, ...]

    def to_json(self) -> bytes:
        """The file content, with its checksum."""
        files = [asdict(file) for file in self.files]
        fields = {"format": FORMAT, "version": VERSION, "kind": self.kind, "id": self.id}
        fields |= {"run": self.run, "before": self.before}
        return seal(fields | asdict(self.about) | {"files": files})


def read_manifest(data: bytes, file: Path) -> Manifest:
    """Parse the output of :meth:`Manifest.to_json`.

    :raises CheckpointError: changed since, of another version, or not what a manifest says.
    """
    fields = Fields(unseal(data, file), file)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT), fields.text("format"))
    if fields.number("version") != VERSION:
        what = (
            f"the manifest has format version {fields.number('version')}, but this reader "
            f"supports only {VERSION}"
        )
        raise CheckpointError(
            file, what, "read the checkpoint with the version of Shardproof that wrote it"
        )
    mesh = fields.mapping("mesh")
    if any(type(size) is not int or not 1 <= size <= 1 << 20 for size in mesh.values()):
        raise fields.wrong("mesh", "axes and their sizes", mesh)
    wanted = ("precision", "aliases", "versions", "data", "extra")
    mappings = {name: fields.mapping(name) for name in wanted}
    optional = ("optimizer", "scaler")
    mappings |= {n: fields.mapping(n) for n in optional if fields.data.get(n) is not None}
    about = About(fields.number("step"), fields.text("strategy"), mesh, **mappings)
    items = fields.items("files")
    if not 1 <= len(items) <= MOST_FILES:
        raise fields.wrong("files", f"a list with 1 to {MOST_FILES} entries", items)
    listed = [Fields(item, file, f"files[{at}].") for at, item in enumerate(items)]
    files = tuple(Listed(_safe(one), one.number("index_sum", 1 << 32)) for one in listed)
    if len({one.name for one in files}) < len(files):
        raise CheckpointError(file, "the manifest lists one data file twice", TAKE_ANOTHER)
    before = fields.items("before")
    if not all(isinstance(one, str) and _NAME.fullmatch(one) for one in before):
        raise fields.wrong("before", "a list of plain folder names", before)
    names = fields.text("kind"), fields.text("id"), fields.text("run")
    return Manifest(*names, tuple(before), about, files)


def _safe(fields: Fields) -> str:
    """A name that cannot point outside the folder."""
    name = fields.text("name")
    if not _NAME.fullmatch(name):
        raise fields.wrong("name", "a plain file name inside the checkpoint's folder", name)
    return name


def index_to_json(data: DataFile, identity: str) -> bytes:
    """The index of a data file, with its checksum."""
    tensors = [
        {
            "key": e.key,
            "kind": e.kind,
            "name": e.name,
            "dtype": e.dtype,
            "shape": e.place.shape,
            **({"slices": e.place.slices} if e.place.flat_range is None else {}),
            **({"flat_range": e.place.flat_range} if e.place.flat_range is not None else {}),
            "replica": e.replica,
            "owner": e.owner,
            "bytes": [e.begin, e.end],
        }
        for e in data.entries
    ]
    return seal(
        {
            "format": FORMAT,
            "id": identity,
            "file": data.name,
            "bytes": data.bytes,
            "header_bytes": data.header_bytes,
            "header_sum": data.header_sum,
            "sums": data.sums.tobytes().hex(),
            "tensors": tensors,
        }
    )


def read_index(data: bytes, file: Path, identity: str) -> DataFile:
    """Parse the output of :func:`index_to_json` for the checkpoint ``identity``.

    :raises CheckpointError: changed since, of another checkpoint, or not what an index says.
    """
    fields = Fields(unseal(data, file), file)
    if fields.text("id") != identity:
        what = (
            f"this file belongs to checkpoint {fields.text('id')[:80]!r}, but its manifest to "
            f"{identity!r}"
        )
        raise CheckpointError(file, what, f"copy this file from checkpoint {identity!r}")
    name = file.name.removesuffix(INDEX) + DATA
    if fields.text("file") != name:
        raise fields.wrong("file", repr(name), fields.text("file"))
    head, size = fields.number("header_bytes"), fields.number("bytes")
    sums = _sums(fields)
    entries, at, first = [], head, 0
    for number, item in enumerate(fields.items("tensors")):
        entry = _entry(Fields(item, file, f"tensors[{number}]."), name, first)
        if entry.begin != at:
            what = f"{entry.key[:100]!r} begins at byte {entry.begin}, but must begin at byte {at}"
            raise CheckpointError(file, what, TAKE_ANOTHER)
        at, first = entry.end, first + -(-(entry.end - entry.begin) // entry.chunk)
        entries.append(entry)
    if at != size or first != len(sums):
        what = (
            f"the index lists {at} bytes and {first} chunks, but states {size} bytes and "
            f"{len(sums)} checksums"
        )
        raise CheckpointError(file, what, TAKE_ANOTHER)
    header_sum = fields.number("header_sum", 1 << 32)
    return DataFile(name, size, head, header_sum, sums, tuple(entries))


def _sums(fields: Fields) -> array[int]:
    text = fields.text("sums", MOST_BYTES)
    sums = array("I")
    try:
        sums.frombytes(bytes.fromhex(text))
    except ValueError:
        raise fields.wrong("sums", "checksums of 8 hexadecimal digits", text[:80]) from None
    return sums


def _entry(fields: Fields, file: str, first_sum: int) -> Entry:
    kind, dtype, shape = fields.text("kind"), fields.text("dtype"), fields.numbers("shape")
    if kind not in KINDS:
        raise fields.wrong("kind", f"one of {', '.join(KINDS)}", kind)
    if dtype not in DTYPES:
        raise fields.wrong("dtype", f"one of {', '.join(DTYPES)}", dtype)
    if math.prod(max(size, 1) for size in shape) > 1 << 58:
        raise fields.wrong("shape", "a tensor of at most 2 ** 58 elements", list(shape))
    place = Place(shape, None, None)
    if "flat_range" in fields.data:
        bounds = fields.numbers("flat_range")
        if len(bounds) != 2:
            raise fields.wrong("flat_range", "two numbers", bounds)
        place = place._replace(flat_range=(bounds[0], bounds[1]))
    else:
        items = fields.items("slices")
        if len(items) > 64 or any(
            not isinstance(b, list) or len(b) != 2 or {type(b[0]), type(b[1])} != {int}
            for b in items
        ):
            raise fields.wrong("slices", "a pair of numbers for each dimension", items)
        place = place._replace(slices=tuple((b[0], b[1]) for b in items))
    if problem := place.problem():
        raise CheckpointError(fields.file, fields.place + problem, TAKE_ANOTHER)
    ends = fields.numbers("bytes")
    if len(ends) != 2 or ends[1] - ends[0] != place.elements * DTYPES[dtype].itemsize:
        raise fields.wrong(
            "bytes", f"the [begin, end] byte offsets of {place.elements} {dtype} elements", ends
        )
    replica, owner = fields.number("replica"), fields.number("owner")
    names = (fields.text("key", 1200), kind, fields.text("name"))
    return Entry(file, *names, dtype, place, replica, owner, *ends, first_sum)
