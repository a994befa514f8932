"""The sum of a bucket of gradients over ranks, and the gather of parameter shards.

This is where hand-written collectives (collectives/) and lossy compression plug in.  A strategy
decides *when* a bucket leaves and over which ranks; a :class:`Reducer` decides *how*.

    bucket     names, shapes and element ranges of what lies in one flat tensor; the step
    reducer    all_reduce(bucket, comm)              the sum replaces the bucket's elements
               reduce_scatter(bucket, comm, shard)   this rank's equal part of the sum -> shard
               all_gather(output, shard, comm)       all ranks' shards -> output
               pieces(), load_pieces(...)            state of its own, e.g. an error carried over

All ranks of ``comm`` reduce the same buckets in the same order.  Until ``wait`` has returned,
nobody else touches the flat tensor or the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.contract import Piece
from shardproof.impls.reference.parts.flat import Part


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Return when the result is visible."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients of named parameters, end to end in one flat tensor.

    ``flat`` is contiguous and one-dimensional; elements that no part covers are padding and zero.
    ``parts`` say which elements of which parameter lie where; a part is less than its parameter
    where ``flat`` is a shard.  ``step`` is the number of the optimizer step, counted from 0; one
    step may reduce a parameter several times.
    """

    flat: Tensor
    parts: tuple[Part, ...]
    step: int

    @property
    def names(self) -> list[str]:
        """The parameters in storage order."""
        return [part.name for part in self.parts]

    def views(self) -> dict[str, Tensor]:
        """Name -> the one-dimensional view of ``flat`` with the parameter's part."""
        return {part.name: part.of_shard(self.flat) for part in self.parts}


class Reducer:
    """The backend's own collectives, asynchronous and stateless; the base of all other reducers.

    ``slots`` name what others keep from step to step.
    """

    slots: tuple[str, ...] = ()

    def all_reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """Start to sum ``bucket`` over ``comm``, in place."""
        work: Work = comm.all_reduce(bucket.flat, async_op=True)
        return work

    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:
        """Start to sum ``bucket`` over ``comm``; ``shard`` receives this rank's part of the sum.

        ``bucket.flat`` has ``comm.size`` times the elements of ``shard``, which may be this rank's
        part of it.  What the rest of ``bucket.flat`` holds afterwards is undefined.
        """
        work: Work = comm.reduce_scatter(shard, bucket.flat, async_op=True)
        return work

    def all_gather(self, output: Tensor, shard: Tensor, comm: Comm) -> Work:
        """Start to gather the shards of all ranks of ``comm`` into ``output``, in rank order.

        ``shard`` may be this rank's part of ``output``.
        """
        work: Work = comm.all_gather(output, shard, async_op=True)
        return work

    def settle(self, works: Sequence[Work]) -> None:
        """Wait for those of ``works`` that progress only while all ranks wait: none here."""

    def check(self, ranks: int) -> None:
        """Raise :class:`~shardproof.contract.Refused` if ``ranks`` cannot sum whole buckets."""

    def pieces(self) -> list[Piece]:
        """State that a checkpoint must keep, as optimizer slots ``<parameter>.<slot>``."""
        return []

    def wanted(self, names: Sequence[str]) -> list[str]:
        """The ``names`` of saved state, of any number of ranks, that this rank takes."""
        return []

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy in those of ``pieces`` that belong to this reducer; return the others.

        What was there is replaced.  Pieces may come before the reducer has any state, which is then
        made from them.
        """
        return list(pieces)


def rank_piece(name: str, tensor: Tensor, rank: int) -> Piece:
    """State of this rank only, such as a residual, as ``<parameter>.<slot>@<rank>``.

    ``rank`` is its number among those that sum together; whatever has an ``@`` is a reducer's.

    The name keeps it from being taken for a copy, or a part, of what other ranks hold: they may
    have other values, other shapes, or nothing of the kind.
    """
    return Piece.whole(f"{name}@{rank}", tensor)


def pieces_on(device: str | torch.device, pieces: Sequence[Piece]) -> list[Piece]:
    """``pieces`` with those of a reducer (:func:`rank_piece`) on ``device``, like gradients.

    What a file or another rank gave lies elsewhere.
    """
    return [
        replace(piece, tensor=piece.tensor.to(device)) if "@" in piece.name else piece
        for piece in pieces
    ]


def slot_of(name: str) -> str:
    """The slot of ``<parameter>.<slot>@<rank>``."""
    return name.rpartition("@")[0].rpartition(".")[2]


def parameter_of(name: str) -> str:
    """The parameter of ``<parameter>.<slot>@<rank>``."""
    return name.rpartition("@")[0].rpartition(".")[0]
