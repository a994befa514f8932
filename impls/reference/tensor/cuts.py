"""The part of a tensor on a rank if the tensor is split by rows, columns or heads.

The local tensor is made of blocks of the whole, end to end along one dimension: three blocks of a
fused projection of queries, keys and values.  Several ranks may hold the same block (a KV head that
more than one rank attends with).  Then each has one term of its gradient, and the ranks that share
it must sum them.  So must all ranks for a tensor that stands whole on each of them while each works
on other positions of the sequence.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardproof.contract import Piece

#: One ``(start, stop)`` per dimension.
Box = tuple[tuple[int, int], ...]


class Cut(ABC):
    """The layout of a tensor of ``shape`` on the ranks of an axis; one object per rank."""

    shape: tuple[int, ...]

    @abstractmethod
    def local(self, whole: Tensor) -> Tensor:
        """This rank's part of ``whole`` (a view only if it is the whole)."""

    @abstractmethod
    def place(self, piece: Piece) -> list[Piece]:
        """Pieces of the whole tensor from a piece of the local one.

        A replica number grows by this axis: ``replica * copies + copy``.
        """

    @abstractmethod
    def term(self, local: Tensor) -> Tensor | None:
        """This rank's term of a gradient's sum over the axis (``None``: none)."""

    @abstractmethod
    def take(self, local: Tensor, total: Tensor) -> None:
        """Put the sum of all ranks' terms in place."""

    def pieces(self, name: str, local: Tensor) -> list[Piece]:
        """The local tensor of ``name`` as pieces of the whole one."""
        return self.place(Piece.whole(name, local))


@dataclass(frozen=True)
class Uncut(Cut):
    """A tensor that each of ``copies`` ranks holds whole; ``is_partial``: its gradients are terms
    of a sum.
    """

    shape: tuple[int, ...]
    copy: int
    copies: int
    is_partial: bool = False

    def local(self, whole: Tensor) -> Tensor:
        """The whole tensor."""
        return whole

    def place(self, piece: Piece) -> list[Piece]:
        """The same place."""
        return [replace(piece, replica=piece.replica * self.copies + self.copy)]

    def term(self, local: Tensor) -> Tensor | None:
        """The gradient, if it is a term."""
        return local if self.is_partial else None

    def take(self, local: Tensor, total: Tensor) -> None:
        """Take the whole sum."""
        local.copy_(total.view_as(local))


@dataclass(frozen=True)
class Block:
    """Rows ``start`` to ``stop - 1``, held by ``copies`` ranks; this is copy number ``copy``."""

    start: int
    stop: int
    copy: int = 0
    copies: int = 1


@dataclass(frozen=True)
class Split(Cut):
    """Blocks along dimension ``dim``; those with several copies lie contiguously in rows ``shared``
    of the whole.
    """

    shape: tuple[int, ...]
    dim: int
    blocks: tuple[Block, ...]
    shared: tuple[int, int] = (0, 0)

    def local(self, whole: Tensor) -> Tensor:
        """The blocks, end to end, as a copy: a view would keep the whole in memory."""
        parts = [whole.narrow(self.dim, b.start, b.stop - b.start) for b in self.blocks]
        return torch.cat(parts, self.dim)

    def place(self, piece: Piece) -> list[Piece]:
        """One piece per block that it touches (several if a flat range breaks rows)."""
        pieces = []
        for box, tensor in _boxes(piece):
            start, stop = box[self.dim]
            for block, offset in self._offsets():
                low = max(start, offset)
                high = min(stop, offset + block.stop - block.start)
                if low >= high:
                    continue
                move = block.start - offset
                place = (*box[: self.dim], (low + move, high + move), *box[self.dim + 1 :])
                pieces.append(
                    Piece(
                        piece.name,
                        self.shape,
                        tensor.narrow(self.dim, low - start, high - low),
                        slices=place,
                        replica=piece.replica * block.copies + block.copy,
                        source=piece.source,
                        incomplete=block.copies > 1,
                    )
                )
        return pieces

    def term(self, local: Tensor) -> Tensor | None:
        """The shared rows, with zeros for rows of other ranks."""
        first, last = self.shared
        if first == last:
            return None
        # All shared rows, not this rank's only: so one sum over all ranks serves every block.
        rows = local.new_zeros([*self.shape[: self.dim], last - first, *self.shape[self.dim + 1 :]])
        for mine, slot in self._shared(local, rows):
            slot.copy_(mine)
        return rows

    def take(self, local: Tensor, total: Tensor) -> None:
        """Take this rank's rows of the sum."""
        first, last = self.shared
        shape = [*self.shape[: self.dim], last - first, *self.shape[self.dim + 1 :]]
        for mine, slot in self._shared(local, total.view(shape)):
            mine.copy_(slot)

    def _offsets(self) -> Iterator[tuple[Block, int]]:
        """Blocks and their offsets in the local tensor."""
        offset = 0
        for block in self.blocks:
            yield block, offset
            offset += block.stop - block.start

    def _shared(self, local: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of each shared block in the local tensor and in all shared rows."""
        for block, offset in self._offsets():
            if block.copies > 1:
                size = block.stop - block.start
                mine = local.narrow(self.dim, offset, size)
                yield mine, rows.narrow(self.dim, block.start - self.shared[0], size)


def _boxes(piece: Piece) -> Iterator[tuple[Box, Tensor]]:
    """The blocks of ``piece``, with their elements in that shape."""
    if piece.flat_range is None:
        yield piece.slices or tuple((0, n) for n in piece.global_shape), piece.tensor
        return
    start, stop = piece.flat_range
    flat, at = piece.tensor.reshape(-1), 0
    for box in _covering(piece.global_shape, start, stop):
        shape = [b - a for a, b in box]
        yield box, flat[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)


def _covering(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Blocks that cover elements ``start`` to ``stop - 1`` in row-major order, in that order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start, stop),) if shape else ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        for box in _covering(shape[1:], start - last * row, stop - last * row):
            yield ((last, last + 1), *box)
        return
    for box in _covering(shape[1:], start - (first - 1) * row, row) if start < first * row else ():
        yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:]))
    for box in _covering(shape[1:], 0, stop - last * row):
        yield ((last, last + 1), *box)
