"""Faults of top-k, and of how strategies use a compressed sum."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.compression.triggers import (
    TOPK,
    sent_by,
)
from shardproof.impls.mutants.triggers import gpt
from shardproof.impls.reference.ddp import DDP, ReferenceDDP
from shardproof.impls.reference.parts.buckets import GradientBucket
from shardproof.impls.reference.parts.compressors.topk import TopK
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work
from shardproof.impls.reference.zero1 import ReferenceZero1

mutant = declare.family(
    ReferenceDDP, ReferenceZero1, options=sent_by(TOPK), killed_by=("equivalence",)
)


@mutant("topk_by_value", says="other elements are sent", zoo=("G17",))
class ByValue(TopK):
    """The largest signed values are sent, so large negative values never are."""

    def choose(self, values: Tensor, number: int) -> Tensor:
        return values.topk(number, sorted=False).indices


@mutant("topk_of_the_smallest", says="other elements are sent")
class OfTheSmallest(TopK):
    """The smallest elements are sent: each value is right, but nothing is trained."""

    def choose(self, values: Tensor, number: int) -> Tensor:
        return values.abs().topk(number, largest=False, sorted=False).indices


@mutant("topk_index_base", says="other elements are sent")
class IndexBase(TopK):
    """Indices relative to the parameter are used as positions in the bucket."""

    def begin(self, part: Part) -> int:
        return 0


@mutant("topk_without_signs", says="signs are lost")
class WithoutSigns(TopK):
    """The chosen values are sent without their signs."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        bucket.flat.abs_()
        return super().start(bucket, comm)


@mutant(
    "topk_sends_one_less",
    says="all_gather: .* bytes",
    killed_by=("equivalence", "traffic"),
)
class SendsOneLess(TopK):
    """The number of elements is rounded down instead of up."""

    def choose(self, values: Tensor, number: int) -> Tensor:
        return super().choose(values, max(number - 1, 0))


@mutant("topk_sends_everything", says="no such call is made", killed_by=("traffic",))
class SendsEverything(TopK):
    """Zeros are sent as well, so the sum is right but no bytes are saved."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        left, flat = bucket.flat.clone(), bucket.flat
        for part in bucket.parts:
            number = -(-part.numel // 10)
            part.of_shard(left)[self.choose(part.of_shard(flat), number)] = 0.0
        flat.sub_(left)
        self.keep(bucket, left)
        return Reducer.all_reduce(self, bucket, comm)


@mutant(
    "topk_adds_its_own_first",
    says="replicas 0 and 1 differ",
    killed_by=("replicas",),
    mesh={"replicate": 3},
    options=sent_by({**TOPK, "density": 0.5}),
)
class AddsItsOwnFirst(TopK):
    """Every rank adds its own values first, so the last bits differ between ranks."""

    def order(self, comm: Comm) -> Iterable[int]:
        return [(comm.rank + away) % comm.size for away in range(comm.size)]


@mutant(
    "compressed_hook_with_uneven_inputs",
    says="ranks 0-1 call all_gather.*rank 2 calls all_reduce",
    zoo=("G10",),
    killed_by=("crash",),
    crash_says="all_reduce",
    workload=gpt(global_batch=2, micro_batches=1),
    mesh={"replicate": 3},
)
class HookWithUnevenInputs(DDP):
    """A rank without data makes plain all-reduces, as it would without compression."""

    def reduce(self, bucket: GradientBucket) -> Work:
        if self.computed:
            return super().reduce(bucket)
        return Reducer().all_reduce(bucket.outgoing(self.step), self.comm)


@mutant(
    "compressed_shard_of_another",
    parent=ReferenceZero1,
    says="other elements are sent",
    options={"bucket_bytes": 8 * 1024, "compress": TOPK},
    mesh={"shard": 2},
)
class ShardOfAnother(TopK):
    """A rank takes its neighbour's part of the whole sum."""

    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:
        work = super().reduce_scatter(bucket, comm, shard)
        parts = bucket.flat.view(comm.size, -1)
        whole = parts.clone()
        shard.copy_(whole[(comm.rank + 1) % comm.size])
        return work
