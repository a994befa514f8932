"""Faults of replicas: calls, buffers and groups whose number grows with the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch.distributed as dist

from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.mutants.at_scale.sums import Together, gathered_sum
from shardproof.impls.reference.ddp import DDP, ReferenceDDP
from shardproof.impls.reference.parts.buckets import GradientBucket
from shardproof.impls.reference.parts.reducers import Work

fault_at_scale = declare.family(ReferenceDDP, mesh={"replicate": 256})


@fault_at_scale("ddp_cuts_buckets_by_ranks", says="all-reduce along replicate: .* calls promised")
class CutsBucketsByRanks(DDP):
    """A bucket is sent in as many pieces as there are groups of 4 ranks, in a call each."""

    def reduce(self, bucket: GradientBucket) -> Work:
        pieces = bucket.flat.chunk(max(1, self.comm.size // 4))
        return Together([self.comm.all_reduce(piece, async_op=True) for piece in pieces])


@fault_at_scale("ddp_gathers_all_gradients", says="all-gather along replicate: 0 bytes promised")
class GathersAllGradients(DDP):
    """Over more than 8 ranks, a bucket of each rank is gathered, and all are added in order."""

    def reduce(self, bucket: GradientBucket) -> Work:
        if self.comm.size <= 8:
            return super().reduce(bucket)
        return gathered_sum(bucket.flat, self.comm)


@fault_at_scale("ddp_votes_in_a_table", says="integers: at most")
class VotesInATable(DDP):
    """Votes on use are summed in a table with a row for each rank."""

    def usage_votes(self) -> list[int]:
        own, (size, rank) = super().usage_votes(), (self.comm.size, self.comm.rank)
        return [vote if row == rank else 0 for row in range(size) for vote in own]

    def count(self, votes: Sequence[int]) -> None:
        width = len(votes) // self.comm.size
        super().count([sum(votes[column::width]) for column in range(width)])


@fault_at_scale("ddp_makes_a_group_a_pair", says="process groups: .* made", mesh={"replicate": 64})
class MakesAGroupAPair(DDP):
    """Over more than 8 ranks, each pair of ranks gets a process group."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ranks = dist.get_process_group_ranks(self.comm.group)
        pairs = combinations(ranks, 2) if len(ranks) > 8 else ()
        self.pairs = [dist.new_group(list(pair)) for pair in pairs]
