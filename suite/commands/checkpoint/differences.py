"""How two checkpoints differ: what only one has, what is said of the training, and elements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch

from shardproof.errors import shorten
from shardproof.registry.checkpoints import blocks
from shardproof.table import Table

if TYPE_CHECKING:
    from shardproof.registry.checkpoints import Checkpoint

#: Of the training; who saved it in which files is no difference.
_COMPARED = ("step", "optimizer", "scaler", "data", "extra")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """What rows say of the copies of a name behind it."""
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
    """What a row says of two tensors of one shape, or nothing if all bits are equal."""
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
