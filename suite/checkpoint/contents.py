"""The content of a checkpoint, in sentences, tables and a digest; and how two differ."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch

from shardproof import tensor_bytes
from shardproof.errors import shorten
from shardproof.registry.checkpoints import blocks
from shardproof.table import Table

if TYPE_CHECKING:
    from shardproof.registry.checkpoints import Checkpoint


#: Of the training; who saved it in which files is no difference.
_COMPARED = ("step", "optimizer", "scaler", "data", "extra")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def size(checkpoint: Checkpoint) -> str:
    """Tensors, bytes and files."""
    files = checkpoint.files.values()
    tensors, held = len(checkpoint.copies), sum(file.bytes for file in files)
    return f"{tensors} names in {len(files)} files of {held:,} bytes"


def sentences(checkpoint: Checkpoint) -> Iterator[str]:
    """The system that saved each checkpoint, a line each."""
    manifest, about = checkpoint.manifest, checkpoint.manifest.about
    mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in about.mesh.items())
    yield f"{checkpoint.folder}: {manifest.kind}, {size(checkpoint)}"
    yield f"step {about.step} of run {manifest.run}, saved by {about.strategy} on {mesh}"
    for name in ("optimizer", "scaler", "data", "extra"):
        if fields := getattr(about, name):
            yield f"{name}: {shorten(json.dumps(fields), 200)}"


def kinds(checkpoint: Checkpoint) -> Table:
    """A row for each kind."""
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in checkpoint.copies):
        entries = [e for f in checkpoint.files.values() for e in f.entries if e.kind == kind]
        dtypes = ", ".join(sorted({e.dtype for e in entries}))
        names, held = len(checkpoint.names(kind)), sum(e.end - e.begin for e in entries)
        rows.append((kind, f"{names:,}", dtypes, f"{len(entries):,}", f"{held:,}"))
    headings = ("kind", "names", "dtypes", "parts", "bytes")
    return Table("Tensors", headings, rows, align="lrlrr")


def tensors(checkpoint: Checkpoint) -> Table:
    """A row for each name."""
    rows = []
    for (kind, name), copies in sorted(checkpoint.copies.items()):
        parts = [entry for entries in copies.values() for entry in entries]
        owners = ", ".join(map(str, sorted({entry.owner for entry in parts})))
        shape = " x ".join(map(str, parts[0].place.shape)) or "one number"
        where = str(parts[0].place) if len(parts) == 1 else f"{len(parts)} parts"
        rows.append((kind, shorten(name), parts[0].dtype, shape, where, shorten(owners)))
    headings = ("kind", "name", "dtype", "shape", "place", "ranks")
    return Table("Tensors", headings, rows)


def digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over every copy of every name, in the order of names."""
    found = hashlib.sha256()
    for (kind, name), copies in sorted(checkpoint.copies.items()):
        for copy, (replica, entries) in enumerate(sorted(copies.items())):
            first = entries[0]
            head = [kind, name, copy, first.dtype, first.place.shape]
            found.update(json.dumps(head).encode())
            elements = 0
            for begin, block in blocks(checkpoint, kind, name, replica):
                assert begin == elements
                elements += block.numel()
                found.update(tensor_bytes.raw(block))
            assert elements == math.prod(first.place.shape)
    return found.hexdigest()


def of_metadata(one: Checkpoint, two: Checkpoint) -> list[str]:
    """A line for each field that differs."""
    said = []
    for name in _COMPARED:
        a, b = (getattr(c.manifest.about, name) for c in (one, two))
        if json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True):
            left, right = (shorten(json.dumps(value)) for value in (a, b))
            said.append(f"{name}: {left} and {right}")
    return said


def of_tensors(one: Checkpoint, two: Checkpoint) -> Table:
    """A row for each name that differs in bits, dtype or shape, or that only one has."""
    names = sorted(one.copies.keys() | two.copies.keys())
    rows = [(kind, shorten(n), *row) for kind, n in names for row in _of_name(one, two, kind, n)]
    headings = ("kind", "name", "first difference", "norm", "other norm", "norm of difference")
    return Table("Differences", headings, rows, align="lllrrr")


def _of_name(one: Checkpoint, two: Checkpoint, kind: str, name: str) -> Iterator[tuple[str, ...]]:
    """The note on copies that follows a name in rows."""
    empty = "", "", ""
    first, second = (checkpoint.copies.get((kind, name)) for checkpoint in (one, two))
    if not first or not second:
        yield f"only in {'OTHER' if second else 'PATH'}", *empty
        return
    if len(first) != len(second):
        yield f"{len(first)} copies and {len(second)}", *empty
    for a, b in zip(sorted(first), sorted(second), strict=False):  # as many as both have
        entries = first[a][0], second[b][0]
        if len({(entry.dtype, entry.place.shape) for entry in entries}) > 1:
            yield " and ".join(f"{e.dtype} {list(e.place.shape)}" for e in entries), *empty
        elif row := _elements(one, two, kind, name, a, b):
            yield row


def _elements(
    one: Checkpoint, two: Checkpoint, kind: str, name: str, a: int, b: int
) -> tuple[str, ...] | None:
    """The note on two tensors of one shape, or nothing if all bits are equal."""
    first: str | None = None
    sums = [0.0, 0.0, 0.0]
    shape = one.copies[kind, name][a][0].place.shape
    pairs = zip(blocks(one, kind, name, a), blocks(two, kind, name, b), strict=True)
    for (begin, left), (_, right) in pairs:
        bits = _BITS[left.element_size()]
        wrong = (left.view(bits) != right.view(bits)).nonzero()
        if first is None and len(wrong):
            at = int(wrong[0])
            place = [int(n) for n in numpy.unravel_index(begin + at, shape)] if shape else []
            first = f"element {place}: {left[at].item()!r} and {right[at].item()!r}"
        wide: list[Any] = [tensor.double() for tensor in (left, right)]
        for number, tensor in enumerate((*wide, wide[0] - wide[1])):
            sums[number] += float(tensor.square().sum())
    return None if first is None else (first, *(f"{math.sqrt(total):.6g}" for total in sums))
