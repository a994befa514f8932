"""Flat layouts: named tensors laid end to end and cut into equal shards, one per rank.

Collectives move equal contiguous chunks, models are made of tensors of any shape.  So tensors of
one dtype are laid end to end, padding is added at the end until every shard has the same length,
and each rank owns one shard: a shard may start or end inside a tensor, hold several, or nothing
but padding.

    tensors      | a (5)           | b (2) | c (4)        | pad |
    flat         0                 5       7              11   12
    shards       |    rank 0    |    rank 1    |    rank 2    |      of 4 elements each
    parts        a[0:4]          a[4:5] b[0:2] c[0:1]   c[1:4]

Padding: at most ``shards - 1`` elements (FSDP, arXiv 2304.11277, section 3.2.1).  Elements of a
tensor are counted in row-major order of its shape, whatever its strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof.contract import Piece


@dataclass(frozen=True)
class Part:
    """Elements ``start`` to ``stop - 1`` of the flattened tensor ``name``, as stored in a shard (or
    in the whole flat tensor, the shard of a single rank).

    ``shape`` is that of the whole tensor, ``offset`` the place of the first element in the shard.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements held."""
        return self.stop - self.start

    def of_shard(self, shard: Tensor) -> Tensor:
        """The one-dimensional view of ``shard`` that holds this part."""
        return shard[self.offset : self.offset + self.numel]

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """This part of the whole ``tensor``: a view if its strides allow one, else a copy."""
        return tensor.reshape(-1)[self.start : self.stop]

    def piece(self, tensor: Tensor, name: str | None = None, replica: int = 0) -> Piece:
        """``tensor``, laid out like this part, as a piece (``name``: if not the tensor's own)."""
        span = (self.start, self.stop)
        return Piece(name or self.name, self.shape, tensor, flat_range=span, replica=replica)


class FlatLayout:
    """The positions of ``tensors`` in one flat tensor of ``padded_numel`` elements, and in its
    shards.

    Only shapes and dtype of ``tensors`` are read (the meta device will do); all have one dtype.  A
    tensor without elements belongs to the shard in which it would start.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shards: int) -> None:
        if shards < 1:
            raise ValueError(f"a layout needs at least 1 shard, not {shards}")
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            listed = ", ".join(sorted(map(str, dtypes))) or "none"
            raise ValueError(f"a flat layout holds tensors of one dtype, not {listed}")
        self.dtype: torch.dtype = dtypes.pop()
        self.shards = shards
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sizes = [tensor.numel() for tensor in tensors.values()]
        starts = [0, *itertools.accumulate(sizes)]
        #: First element and the one after the last, in the flat tensor, per name.
        self.spans = dict(zip(self.shapes, itertools.pairwise(starts), strict=True))
        self.numel = starts[-1]
        # Rounded up: collectives move equal chunks, so the last shard is padded rather than short.
        self.shard_numel = -(-self.numel // shards)
        self.padded_numel = self.shard_numel * shards

    @property
    def whole(self) -> tuple[Part, ...]:
        """Every tensor as one part of the whole flat tensor, in order."""
        return tuple(
            Part(name, self.shapes[name], 0, stop - start, start)
            for name, (start, stop) in self.spans.items()
        )

    @property
    def names(self) -> list[str]:
        """Names in the order of the layout."""
        return list(self.spans)

    @property
    def padding(self) -> int:
        """Elements at the end that belong to no tensor."""
        return self.padded_numel - self.numel

    def empty(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """A flat tensor of ``padded_numel`` elements with zeros as padding; the rest is
        uninitialized.
        """
        flat = torch.empty(self.padded_numel, dtype=dtype or self.dtype, device=device)
        flat[self.numel :].zero_()
        return flat

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The contiguous view of ``flat`` that holds the tensor ``name``, in its shape."""
        start, stop = self.spans[name]
        return flat[start:stop].view(self.shapes[name])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of the tensor."""
        return {name: self.view(flat, name) for name in self.spans}

    @torch.no_grad()
    def pack(self, flat: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
        """Copy ``tensors`` into ``flat``; ``None`` or a missing name becomes zero, like padding.

        Values are converted to the dtype of ``flat``.
        """
        for name, view in self.views(flat).items():
            tensor = tensors.get(name)
            view.zero_() if tensor is None else view.copy_(tensor)
        flat[self.numel :].zero_()

    def shard_range(self, rank: int) -> tuple[int, int]:
        """First element of the shard of ``rank`` in the flat tensor, and the end of the shard."""
        if not 0 <= rank < self.shards:
            raise ValueError(
                f"the layout has no shard {rank}, only the shards 0 to {self.shards - 1}"
            )
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The view of ``flat`` that is the shard of ``rank``."""
        start, stop = self.shard_range(rank)
        return flat[start:stop]

    def parts(self, rank: int) -> list[Part]:
        """The parts in the shard of ``rank``, in order, without tensors that have none there."""
        low, high = self.shard_range(rank)
        parts = []
        for name, (start, stop) in self.spans.items():
            first, last = max(start, low), min(stop, high)
            # A tensor without elements overlaps no shard, yet one rank must answer for its slots.
            if first < last or (start == stop and self._home(start) == rank):
                part = Part(name, self.shapes[name], first - start, last - start, first - low)
                parts.append(part)
        return parts

    def _home(self, start: int) -> int:
        """The rank of an empty tensor at ``start``."""
        return min(start // self.shard_numel, self.shards - 1) if self.shard_numel else 0
