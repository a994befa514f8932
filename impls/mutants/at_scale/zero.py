"""Faults of ZeRO-1 and ZeRO-2: a rule fails for small shards or large buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.mutants.at_scale.sums import FEW, WholeIfFew
from shardproof.impls.reference.engine.masters import Masters
from shardproof.impls.reference.parts import owned_bucket
from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.owned_bucket import OwnedBucket
from shardproof.impls.reference.zero1 import ReferenceZero1, Zero1
from shardproof.impls.reference.zero2 import ReferenceZero2, Zero2

zero1_at_scale = declare.family(ReferenceZero1, mesh={"shard": 4096})
zero2_at_scale = declare.family(ReferenceZero2, mesh={"shard": 1024})


def in_32_bits(number: int) -> int:
    """``number`` as a signed integer of 32 bits keeps it."""
    return (number + 2**31) % 2**32 - 2**31


@zero1_at_scale(
    "zero1_keeps_offsets_in_32_bits",
    says="after_update: optimizer state: .* bytes promised, 0 held",
    mesh={"shard": 64},
    shape={"layers": 3, "hidden": 8192, "heads": 64},
    options={"bucket_bytes": 2**40},
)
class KeepsOffsetsIn32Bits(Zero1):
    """The offset of a part in its bucket is kept in 32 bits; if it overflows below 0, no rank
    owns the part.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for bucket in self.buckets:
            start, _ = bucket.layout.shard_range(self.comm.rank)
            for name, part in [*bucket.parts.items()]:
                if in_32_bits(start + part.offset) < 0:
                    del bucket.parts[name], self.targets[name]


@zero1_at_scale(
    "zero1_updates_small_buckets_whole",
    says="after_update: optimizer state: .* bytes promised",
    options={"bucket_bytes": 2**20},
)
class UpdatesSmallBucketsWhole(Zero1):
    """A bucket with fewer than 1,024 elements a rank is updated whole on every rank."""

    def __init__(self, module: nn.Module, comm: Comm, options: Any, reducer: Any = None) -> None:
        super().__init__(module, comm, options, WholeIfFew())
        for bucket in self.buckets:
            if bucket.layout.shard_numel < FEW:
                bucket.parts = {part.name: part for part in bucket.layout.whole}
                views = {n: p.of_shard(bucket.parameters.flat) for n, p in bucket.parts.items()}
                self.targets |= views

    def gradient(self, bucket: OwnedBucket) -> Tensor:
        return bucket.flat() if bucket.layout.shard_numel < FEW else super().gradient(bucket)


@zero1_at_scale(
    "zero1_sums_small_buckets_whole",
    says="reduce-scatter along shard: .* bytes promised",
    options={"bucket_bytes": 2**20},
)
class SumsSmallBucketsWhole(Zero1):
    """A bucket with fewer than 1,024 elements a rank is summed by an all-reduce."""

    def __init__(self, module: nn.Module, comm: Comm, options: Any, reducer: Any = None) -> None:
        super().__init__(module, comm, options, WholeIfFew())


@zero1_at_scale(
    "zero1_pads_masters_to_ranks", says="after_update: masters: .* bytes promised", accounting="A16"
)
class PadsMastersToRanks(Masters):
    """A master is padded to a multiple of half the number of ranks."""

    def _master(self, name: str, working: Tensor) -> Tensor:
        master, half = (
            super()._master(name, working),
            max(1, torch.distributed.get_world_size() // 2),
        )
        if master is not working:
            room = master.new_empty(-(-master.numel() // half) * half)[: master.numel()]
            master = room.copy_(master)
            self.pairs[name] = working, master
        return master


class SquareLayout(FlatLayout):
    """Shards whose size is a multiple of half the number of shards."""

    def __init__(self, tensors: Mapping[str, Tensor], shards: int) -> None:
        super().__init__(tensors, shards)
        half = max(1, shards // 2)
        self.shard_numel = -(-self.shard_numel // half) * half
        self.padded_numel = self.shard_numel * shards


@zero2_at_scale("zero2_pads_to_the_square_of_ranks", says="parameters: .* bytes promised")
class PadsToTheSquareOfRanks(Zero2):
    """Buckets are padded to a multiple of half the square of the number of ranks."""

    def __init__(self, *args: Any) -> None:
        with patch.object(owned_bucket, "FlatLayout", SquareLayout):
            super().__init__(*args)


@zero2_at_scale(
    "zero2_keeps_sums_of_micro_batches",
    says="after_update: communication: .* bytes promised",
    mesh={"shard": 64},
    micro_batches=8,
)
class KeepsSumsOfMicroBatches(Zero2):
    """With more than 4 micro-batches, the sums of each are kept in a list until the step ends."""

    listed: tuple[Tensor, ...] = ()

    def wait_and_accumulate(self) -> None:
        sums = [*self.sums.values()] if self.rounds > 4 else []
        super().wait_and_accumulate()
        self.listed = (*self.listed, *sums)

    def after_step(self) -> None:
        super().after_step()
        self.listed = ()
