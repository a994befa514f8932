"""Sums that are correct, but cost too much on many ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work

#: Fewest elements of a shard that the faults below reduce into shards.
FEW = 1024


class Done:
    """The handle of a finished sum."""

    def wait(self) -> None:
        """Return at once."""


class Together:
    """One handle for several calls."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """Return when all calls have ended."""
        for work in self.works:
            work.wait()


class WholeIfFew(Reducer):
    """All-reduces buckets whose shards are small, and takes the shard from the sum."""

    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:
        """All-reduce a small bucket."""
        if shard.numel() >= FEW:
            return super().reduce_scatter(bucket, comm, shard)
        comm.all_reduce(bucket.flat)
        shard.copy_(bucket.flat.view(comm.size, -1)[comm.rank])
        return Done()


def gathered_sum(flat: Tensor, comm: Comm) -> Work:
    """Gather the tensors of all ranks and add them in the order of ranks, in place."""
    every = flat.new_empty(comm.size, flat.numel())
    comm.all_gather(every.view(-1), flat)
    flat.copy_(every.sum(0))
    return Done()


class GatheredIfMany(Reducer):
    """Over more than 8 ranks, gathers buckets and adds them in the order of ranks."""

    def all_reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """The sum, in place."""
        if comm.size <= 8:
            return super().all_reduce(bucket, comm)
        return gathered_sum(bucket.flat, comm)
