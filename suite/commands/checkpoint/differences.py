"""How two checkpoints differ: what only one has, what is said of the training, and elements."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy
import torch

from shardproof.errors import shorten
from shardproof.registry.checkpoints import blocks
from shardproof.table import Table

if TYPE_CHECKING:
    from torch import Tensor

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
    rows: list[tuple[str, ...]] = []
    for kind, name in sorted(one.copies.keys() | two.copies.keys()):
        copies = [c.copies.get((kind, name)) for c in (one, two)]
        if not copies[0] or not copies[1]:
            rows.append(
                (kind, shorten(name), f"only in {'OTHER' if copies[1] else 'PATH'}", "", "", "")
            )
            continue
        numbers = [sorted(found) for found in copies if found]
        if len(numbers[0]) != len(numbers[1]):
            what = f"{len(numbers[0])} copies and {len(numbers[1])}"
            rows.append((kind, shorten(name), what, "", "", ""))
        for a, b in zip(*numbers, strict=False):  # as many as both have
            first, second = copies[0][a][0], copies[1][b][0]
            if (first.dtype, first.place.shape) != (second.dtype, second.place.shape):
                what = " and ".join(f"{e.dtype} {list(e.place.shape)}" for e in (first, second))
                rows.append((kind, shorten(name), what, "", "", ""))
            elif row := _elements(one, two, kind, name, a, b):
                rows.append((kind, shorten(name), *row))
    headings = ("kind", "name", "first difference", "norm", "other norm", "norm of difference")
    return Table("Differences", headings, rows, align="lllrrr")


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
            sums[number] += _square(tensor)
    return None if first is None else (first, *(f"{math.sqrt(total):.6g}" for total in sums))


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())
