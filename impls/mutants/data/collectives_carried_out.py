"""Faults of the executor of collectives over send and recv, and of its reducer.

The schedules are right (see ``collectives.py`` for wrong ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.data.collectives import summed_by
from shardproof.impls.reference.collectives.executor import Running
from shardproof.impls.reference.collectives.reducer import ByAlgorithm
from shardproof.impls.reference.collectives.schedule import Reduce
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work
from shardproof.impls.reference.zero1 import ReferenceZero1
from shardproof.impls.reference.zero2 import ReferenceZero2

RINGS: Mapping[str, Any] = {"reduce_scatter": "ring", "all_gather": "ring"}

mutant = declare.family(
    *(ReferenceDDP, ReferenceZero1, ReferenceZero2),
    mesh={"replicate": 3},
    killed_by=("equivalence",),
)


@mutant(
    "algorithm_option_ignored",
    says="all_reduce: .* no such call is promised",
    options=summed_by("rabenseifner"),
    killed_by=("traffic",),
)
class OptionIgnored(ReferenceDDP):
    """The option is read but not used: the backend sums."""

    def make_reducer(self) -> Reducer:
        return Reducer()


# ---------------------------------------------------------------------------------- carrying it out


def carried_out_by(kind: type[Running]) -> type[ByAlgorithm]:
    """A reducer whose collectives ``kind`` executes."""
    return type("Spoilt", (ByAlgorithm,), {"running_type": kind})


class SpoiltReducer(ReferenceDDP):
    """The parent with a faulty reducer."""

    reducer_kind: type[ByAlgorithm]

    def make_reducer(self) -> Reducer:
        reducer = super().make_reducer()
        assert isinstance(reducer, ByAlgorithm)
        return self.reducer_kind(reducer.chosen)


class _Stale(Running):
    before: Tensor | None = None

    def combine(self, one: Reduce, received: Tensor) -> None:
        stale = self.before if self.before is not None else received
        self.before = received.clone()
        super().combine(one, stale)


@mutant(
    "receive_buffer_is_stale",
    says="data coordinate 1 counts 2 times",
    killed_by=("equivalence", "replicas"),
    options=summed_by("recursive_doubling"),
    mesh={"replicate": 4},
)
class ReceiveBufferIsStale(SpoiltReducer):
    """Each round adds the data received in the previous round."""

    reducer_kind = carried_out_by(_Stale)


class _Averaging(Running):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named | {"op": "avg"})


@mutant("operation_is_ignored", says="3 times too small", options=summed_by("ring"))
class OperationIsIgnored(SpoiltReducer):
    """A sum is requested and an average is computed."""

    reducer_kind = carried_out_by(_Averaging)


class _Largest(Running):
    def combine(self, one: Reduce, received: Tensor) -> None:
        own = self.data[one.elements.start : one.elements.stop]
        torch.maximum(own, received, out=own)


@mutant(
    "keeps_the_larger_of_two",
    says=r"(contain only data coordinate \d.*){3}",
    options=summed_by("rabenseifner"),
)
class KeepsTheLargerOfTwo(SpoiltReducer):
    """Two parts are combined by their maximum, whatever the operation."""

    reducer_kind = carried_out_by(_Largest)


class _NoSecondRound(Running):
    def wait(self) -> None:
        self.finish()


@mutant(
    "wait_ends_after_one_round",
    says="recv: 9 calls over all ranks",
    options=summed_by("ring"),
    killed_by=("equivalence", "replicas", "traffic"),
)
class WaitEndsAfterOneRound(SpoiltReducer):
    """A wait returns after the first round, and the other rounds never start."""

    reducer_kind = carried_out_by(_NoSecondRound)


# ------------------------------------------------------------------------------------------ shards


@mutant(
    "scatter_returns_neighbours_chunk",
    says="chunk of another rank",
    options=RINGS,
    mesh={"shard": 3},
)
class ScatterReturnsNeighboursChunk(ReferenceZero2):
    """A rank takes its neighbour's chunk of the flat tensor, which is a sum of fewer ranks."""

    def make_reducer(self) -> Reducer:
        return _TakesNeighbour(_chosen(super().make_reducer()))


class _TakesNeighbour(ByAlgorithm):
    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:
        work = super().reduce_scatter(bucket, comm, shard)
        work.wait()
        shard.copy_(bucket.flat.view(comm.size, -1)[comm.rank - 1].clone())
        return work


@mutant(
    "gather_puts_shards_one_place_on",
    says="shard of another rank",
    options=RINGS,
    mesh={"shard": 3},
)
class GatherPutsShardsOnePlaceOn(ReferenceZero1):
    """Gathered shards are shifted by one rank, so parameters get values of the wrong shards."""

    def make_reducer(self) -> Reducer:
        return _Shifted(_chosen(super().make_reducer()))


class _Shifted(ByAlgorithm):
    def all_gather(self, output: Tensor, shard: Tensor, comm: Comm) -> Work:
        work = super().all_gather(output, shard, comm)
        output.copy_(output.view(comm.size, -1).roll(1, 0).view(-1).clone())
        return work


def _chosen(reducer: Reducer) -> Any:
    assert isinstance(reducer, ByAlgorithm)
    return reducer.chosen
