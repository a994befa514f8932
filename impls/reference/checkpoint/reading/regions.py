"""Parts of a tensor as runs of elements: their intersection, and its position in each part.

A part is a box (``slices``) or a range of the flattened tensor (``flat_range``).  Either is a
sequence of *runs*, elements that are neighbours in the flattened tensor, all of one length::

    a tensor of 4 x 6, its box [1:3, 2:5]          the range 9:16 of it flattened
    .  .  .  .  .  .                               .  .  .  .  .  .
    .  .  8  9 10  .      runs 8:11, 14:17         .  .  .  9 10 11      run 9:16
    .  . 14 15 16  .                              12 13 14 15  .  .
    .  .  .  .  .  .                               .  .  .  .  .  .

    shared: 9:11 and 14:16; in the box elements 1:3 and 3:5, in the range 0:2 and 5:7

Runs follow the order in which the part's own elements lie, so run k begins at k times the length.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy

#: Runs of a part, and of what two parts share: 8 bytes each, in a handful of arrays.
MOST_RUNS = 1 << 20

Slices = tuple[tuple[int, int], ...]


class TooFine(ValueError):
    """A part of more than :data:`MOST_RUNS` runs."""


class Place(NamedTuple):
    """A part of a tensor of ``shape``: a box, or a range of the flattened tensor."""

    shape: tuple[int, ...]
    slices: Slices | None
    flat_range: tuple[int, int] | None

    @classmethod
    def all_of(cls, shape: tuple[int, ...]) -> Place:
        """The whole tensor."""
        return cls(shape, tuple((0, size) for size in shape), None)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of a tensor that holds only this part."""
        if self.flat_range is not None:
            return (self.flat_range[1] - self.flat_range[0],)
        return tuple(stop - start for start, stop in self.slices or ())

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.own_shape)

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tensor in its own shape."""
        return self.flat_range is None and self.own_shape == self.shape

    def __str__(self) -> str:
        if self.flat_range is not None:
            return f"[{self.flat_range[0]}:{self.flat_range[1]} of the flattened]"
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in self.slices or ()) + "]"

    def problem(self) -> str:
        """Why the part is invalid; empty if it is valid."""
        if self.flat_range is not None:
            start, stop = self.flat_range
            fits = 0 <= start <= stop <= math.prod(self.shape)
        else:
            bounds = self.slices or ()
            fits = len(bounds) == len(self.shape) and all(
                0 <= start <= stop <= size
                for (start, stop), size in zip(bounds, self.shape, strict=True)
            )
        return "" if fits else f"{self} is not a part of a tensor of shape {list(self.shape)}"


class Runs(NamedTuple):
    """``starts`` in the flattened tensor, ascending, and the ``length`` of every run."""

    starts: Any
    length: int


def runs_of(place: Place) -> Runs:
    """The runs of a part.

    :raises TooFine: there are too many.
    """
    if place.elements == 0:
        return Runs(numpy.empty(0, numpy.int64), 0)
    if place.flat_range is not None:
        start, stop = place.flat_range
        return Runs(numpy.array([start], numpy.int64), stop - start)
    slices, shape = place.slices or (), place.shape
    # From the innermost dim outwards: dims that are whole, and the first that is not, are one run.
    dim, stride = len(shape), 1
    while dim and (dim == len(shape) or slices[dim] == (0, shape[dim])):
        dim -= 1
        stride *= shape[dim]
    length, base = 1, 0
    if shape:
        stride //= shape[dim]
        start, stop = slices[dim]
        length, base = (stop - start) * stride, start * stride
        stride *= shape[dim]
    if math.prod(stop - start for start, stop in slices[:dim]) > MOST_RUNS:
        raise TooFine(
            f"the part {place} of a tensor of shape {list(shape)} has too many "
            f"contiguous ranges of {length} elements each (limit: {MOST_RUNS})"
        )
    starts = numpy.array([base], numpy.int64)
    for outer in reversed(range(dim)):
        start, stop = slices[outer]
        steps = numpy.arange(start, stop, dtype=numpy.int64) * stride
        starts = (steps[:, None] + starts[None, :]).reshape(-1)
        stride *= shape[outer]
    return Runs(starts, length)


class Shared(NamedTuple):
    """The intersection of two parts: the first element of each run in either, and the lengths."""

    in_first: Any
    in_second: Any
    lengths: Any


def shared(first: Runs, second: Runs) -> Shared:
    """The intersection of two parts of one tensor, in the order of the tensor.

    :raises TooFine: over :data:`MOST_RUNS` runs.
    """
    (a, a_length), (b, b_length) = first, second
    # Of each run of the first part: which runs of the second it meets.
    low = numpy.searchsorted(b + b_length, a, side="right")
    high = numpy.searchsorted(b, a + a_length, side="left")
    counts = numpy.maximum(high - low, 0)
    total = int(counts.sum())
    if total > MOST_RUNS:
        raise TooFine(f"two parts overlap in more than {MOST_RUNS} contiguous ranges")
    i = numpy.repeat(numpy.arange(len(a)), counts)
    before = numpy.repeat(numpy.cumsum(counts) - counts, counts)
    j = numpy.repeat(low, counts) + numpy.arange(total) - before
    begin = numpy.maximum(a[i], b[j])
    end = numpy.minimum(a[i] + a_length, b[j] + b_length)
    return Shared(i * a_length + begin - a[i], j * b_length + begin - b[j], end - begin)


def hole_or_overlap(places: list[Place]) -> str:
    """Why ``places`` do not tile a tensor; empty if every element lies in exactly one of them.

    :raises TooFine: one is cut into too many runs, or all together are.
    """
    if len(places) == 1 and places[0].is_whole:
        return ""
    found = [runs_of(place) for place in places]
    if sum(len(runs.starts) for runs in found) > 4 * MOST_RUNS:
        raise TooFine(f"its parts have more than {4 * MOST_RUNS} contiguous ranges")
    starts = numpy.concatenate([runs.starts for runs in found])
    lengths = numpy.concatenate([numpy.full(len(r.starts), r.length) for r in found])
    order = numpy.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    numel = math.prod(places[0].shape)
    if not len(starts):
        return "" if numel == 0 else "element 0 lies in no part"
    begins = numpy.append(starts, numel)
    stops = numpy.concatenate([[0], ends])
    wrong = numpy.flatnonzero(begins != stops)
    if not len(wrong):
        return ""
    at = int(wrong[0])
    if begins[at] > stops[at]:
        return f"element {int(stops[at])} lies in no part"
    return f"element {int(begins[at])} lies in two parts"
