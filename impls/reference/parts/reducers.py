"""How a bucket of gradients is summed over the data axis.

This is where compression and hand-written all-reduce algorithms plug in.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shardproof.comm import Comm


class Work(Protocol):
    """A reduction in flight."""

    def wait(self) -> object:
        """Return when the result is visible in the bucket."""


class Reducer(Protocol):
    """Sums buckets over the ranks of a communicator."""

    def reduce(self, bucket: Tensor, comm: Comm) -> Work:
        """Start summing the contiguous, one-dimensional ``bucket`` over ``comm``, in place."""


class AllReduce:
    """The backend's own all-reduce, asynchronous."""

    def reduce(self, bucket: Tensor, comm: Comm) -> Work:
        """Start one all-reduce."""
        work: Work = comm.all_reduce(bucket, async_op=True)
        return work
