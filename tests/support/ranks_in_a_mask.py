"""Data parallelism that notes who takes part in a mask of 32 bits, driven by test_scale."""

from __future__ import annotations

from shardproof.impls.reference.ddp import DDP, ReferenceDDP
from shardproof.impls.reference.parts.buckets import GradientBucket
from shardproof.impls.reference.parts.reducers import Work

BITS = 32


class Masked(DDP):
    """Ranks from 32 on have no bit, so they contribute nothing to the sums."""

    def reduce(self, bucket: GradientBucket) -> Work:
        if self.comm.rank >= BITS:
            bucket.flat.zero_()
        return super().reduce(bucket)


class Faulty(ReferenceDDP):
    """The system."""

    handle_type = Masked
