"""Faults of casts: the dtype of messages and the dtype of sums."""

from __future__ import annotations

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.compression.triggers import (
    PLAIN_FP16,
    sent_by,
)
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.parts.compressors.cast import Cast
from shardproof.impls.reference.parts.compressors.compressor import Finish
from shardproof.impls.reference.parts.reducers import Bucket, Work

mutant = declare.family(ReferenceDDP, options=sent_by(PLAIN_FP16), killed_by=("equivalence",))


@mutant("cast_to_another_dtype", says="are those of rounding to bfloat16 or float16")
class ToAnotherDtype(Cast):
    """Values are rounded to bf16, and sent as fp16."""

    def rounded(self, bucket: Bucket) -> Tensor:
        bucket.flat.copy_(bucket.flat.to(torch.bfloat16))
        return super().rounded(bucket)


@mutant(
    "cast_adds_in_fp16",
    says="all_reduce: .* no such call is promised",
    killed_by=("equivalence", "traffic"),
    mesh={"replicate": 3},
)
class AddsInFp16(Cast):
    """Values are added in the dtype of the message, so every addition rounds."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        values = self.rounded(bucket)
        work = comm.all_reduce(values, async_op=True)
        return Finish([work], lambda: bucket.flat.copy_(values))


@mutant("cast_sends_wide", says="all_reduce: .* no such call is promised", killed_by=("traffic",))
class SendsWide(Cast):
    """Values are rounded but sent in their original dtype."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        bucket.flat.copy_(self.rounded(bucket))
        work = comm.all_reduce(bucket.flat, async_op=True)
        return Finish([work], lambda: bucket.flat.copy_(bucket.flat.to(self.chosen.dtype)))


@mutant("cast_divides_by_ranks", says="too small")
class DividesByRanks(Cast):
    """The sum is divided by the ranks, as torch's hook does it, but never multiplied back."""

    def rounded(self, bucket: Bucket) -> Tensor:
        bucket.flat.div_(self.ranks)
        return super().rounded(bucket)
