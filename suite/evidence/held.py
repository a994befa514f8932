"""The state of a rank at one moment, as few tensors: a flat copy for each dtype, and its layout.

A model of 42 parameters is copied, packed, read and compared as one tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from shardproof import tensor_bytes
from shardproof.contract import Piece

#: How what is held at one moment is like that of another.
Likeness = Literal["same", "recut", "changed"]
#: Contents so far, and their parts by shapes, under what is cheap to tell of them: dtype, elements
#: and the first few bytes.  See :meth:`Held.share`.
Shared = dict[tuple[str, int, bytes], list[tuple[Tensor, dict[str, list[Tensor]]]]]


class Held:
    """Copies of pieces on the host.

    ``layout`` is JSON: of every piece the name, global shape, slices, flat range, replica,
    ``incomplete``, dtype and shape; ``flats`` are their elements in that order, by dtype.
    """

    def __init__(self, layout: str, flats: dict[str, Tensor]) -> None:
        self.layout, self.flats = layout, flats
        self._parts: dict[str, list[Tensor]] | None = None

    @classmethod
    def copied(cls, pieces: Iterable[Piece]) -> Held:
        """Copies, so that what the system does next cannot change what was seen.

        :raises NotPlain: of a piece that is no plain dense tensor.
        """
        rows = []
        parts: dict[str, list[Tensor]] = {}
        for piece in pieces:
            tensor = piece.tensor.detach()
            tensor_bytes.require_plain(tensor, f"piece {piece.name!r}")
            dtype = tensor_bytes.dtype_name(tensor)
            parts.setdefault(dtype, []).append(tensor.reshape(-1))
            where = (piece.name, piece.global_shape, piece.slices, piece.flat_range)
            rows.append((*where, piece.replica, piece.incomplete, dtype, tensor.shape))
        return cls(json.dumps(rows), {d: _joined(flat) for d, flat in parts.items()})

    def __iter__(self) -> Iterator[Piece]:
        rows = _rows(self.layout)
        parts = self._parts or _parts(rows, self.flats)
        following = {dtype: iter(tensors) for dtype, tensors in parts.items()}
        for name, whole, slices, span, replica, incomplete, dtype, _ in rows:
            tensor = next(following[dtype])
            yield Piece(name, whole, tensor, slices, span, replica, incomplete=incomplete)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Name and elements of every piece."""
        return ((row[0], math.prod(row[-1])) for row in _rows(self.layout))

    def places(self) -> dict[str, str]:
        """Name -> a short digest of where its pieces lie."""
        found: dict[str, list[str]] = {}
        for name, whole, slices, span, _, _, _, shape in _rows(self.layout):
            if math.prod(shape):
                place = span or slices or tuple((0, size) for size in whole)
                found.setdefault(name, []).append(str(place))
        return {
            name: hashlib.sha256(" ".join(sorted(places)).encode()).hexdigest()[:12]
            for name, places in found.items()
        }

    def equals(self, other: Held) -> bool:
        """Whether the other holds the same names, places and bits."""
        return self.layout == other.layout and all(
            _same_bits(flat, other.flats[dtype]) for dtype, flat in self.flats.items()
        )

    def likeness(self, other: Held) -> Likeness:
        """How the other is like this: ``same`` elements with the same bits, however they are cut
        and called; ``recut``: one of them has more elements, and the others are the same.
        """
        if self.equals(other):
            return "same"
        mine, theirs = self._elements(), other._elements()
        if not theirs.keys() >= mine.keys():
            return "changed"
        more = bool(theirs.keys() - mine.keys())
        for key, own in mine.items():
            sizes = {len(own), len(theirs[key])}
            if len(torch.cat([own, theirs[key]]).unique(dim=0)) != max(sizes):
                return "changed"
            more = more or len(sizes) > 1
        return "recut" if more else "same"

    def _elements(self) -> dict[tuple[Any, ...], Tensor]:
        """By name, global shape and dtype a row for every element: its number, and its bytes."""
        rows: dict[tuple[Any, ...], list[Tensor]] = {}
        for piece in self:
            numbers = torch.arange(math.prod(piece.global_shape)).reshape(piece.global_shape)
            at, held = part(piece, numbers).reshape(-1, 1), piece.tensor.reshape(-1, 1)
            if not len(held) or len(at) != len(held):
                continue  # nothing, or no sound piece, which is told where pieces are put together
            key = (piece.name, piece.global_shape, held.dtype, piece.incomplete)
            rows.setdefault(key, []).append(torch.cat([at, held.view(torch.uint8)], dim=1))
        return {key: torch.cat(each).unique(dim=0) for key, each in rows.items()}

    def share(self, known: Shared) -> None:
        """Take the tensors of what is equal to this and in ``known`` already: replicas, as a rule.

        Then one of them is measured for all.
        """
        rows, self._parts = _rows(self.layout), {}
        for dtype, own in self.flats.items():
            alike = known.setdefault((dtype, own.numel(), tensor_bytes.raw(own[:16])), [])
            flat, cuts = next((one for one in alike if _same_bits(one[0], own)), (own, {}))
            if flat is own:
                alike.append((own, cuts))
            shapes = str([row[-1] for row in rows if row[6] == dtype])
            if shapes not in cuts:
                cuts[shapes] = _parts(rows, {dtype: flat})[dtype]
            self.flats[dtype], self._parts[dtype] = flat, cuts[shapes]

    def to_dict(self) -> dict[str, Any]:
        """The stored form, with tensors."""
        return {"layout": self.layout, "flats": self.flats}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Held:
        """The instance that :meth:`to_dict` described."""
        return cls(**data)


def part(piece: Piece, whole: Tensor) -> Tensor:
    """The part of the contiguous ``whole`` where ``piece`` lies: a view."""
    if piece.flat_range is not None:
        return whole.reshape(-1)[slice(*piece.flat_range)]
    bounds = piece.slices if piece.slices is not None else [(0, n) for n in whole.shape]
    return whole[tuple(slice(start, stop) for start, stop in bounds)]


def _joined(tensors: list[Tensor]) -> Tensor:
    """One flat copy on the host; a system may have some tensors there and others on a GPU."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.cat(tensors).cpu()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    # Not values: a NaN equals itself, and 0 is not -0.
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@cache
def _rows(layout: str) -> list[Any]:
    """The rows of a layout, with tuples for lists."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return [*map(tuples, json.loads(layout))]


def _parts(rows: list[Any], flats: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The tensors that lie in ``flats``, in the order of ``rows``."""
    parts = {}
    for dtype, flat in flats.items():
        shapes = [row[-1] for row in rows if row[6] == dtype]
        pieces = flat.split([math.prod(shape) for shape in shapes])
        parts[dtype] = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return parts
