"""Cast compression: values in a narrower dtype.

Problem.  Gradients are noisy, and half of their bits tell nothing that training needs.  So they are
sent in fp16 or bf16, and nothing else changes.

    what                        where
    residuals                   every rank its own, with ``feedback`` only

    all_reduce      [1] round this rank's values, exchange (exchange.py): sums are made wide
            wait    [2] the sum, rounded once more, replaces the gradients
    reduce_scatter  [3] the same, but a rank keeps the wide sum of its shard: nothing is sent back

Cost: bytes sent, over all N ranks and b bytes per element: 2 (N-1) b n for an all-reduce, (N-1) b n
padded for a reduce-scatter: half of fp32's (torch, default_hooks.py, fp16_compress_hook).
Memory: with feedback n elements per rank.
Numbers: every rank's values rounded to ``dtype``, added in the gradients' own, the sum rounded once
where it is sent back.  The dtype that gradients have: the backend's own sum, bit for bit.
Left out: scaling against overflow (torch's hook divides by N before it rounds); feedback of what is
lost when the sum is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.parts.compressors.compressor import Compressor, Finish
from shardproof.impls.reference.parts.compressors.exchange import fold, sum_over
from shardproof.impls.reference.parts.reducers import Bucket, Work


class Cast(Compressor):
    """Rounds to ``chosen.dtype``."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        """Round and exchange."""
        return sum_over(self.rounded(bucket), bucket.flat.dtype, comm, bucket.flat.copy_)  # [2]

    def rounded(self, bucket: Bucket) -> Tensor:  # [1]
        """This rank's values in the dtype of the message."""
        values = bucket.flat.to(self.chosen.dtype, copy=True)
        if self.chosen.feeds_back:  # or the difference costs as much as the rounding
            self.keep(bucket, (bucket.flat - values).to(bucket.flat.dtype))
        return values

    @torch.no_grad()
    def reduce_scatter(self, bucket: Bucket, comm: Comm, shard: Tensor) -> Work:  # [3]
        """Start to sum into ``shard``, without further rounding."""
        if self.chosen.feeds_back:
            self.feedback.add_to(bucket)
        values = self.rounded(bucket)
        if values.dtype == shard.dtype:
            work: Work = comm.reduce_scatter(shard, values, async_op=True)
            return Finish([work], lambda: None)
        arrived = torch.empty_like(values)
        work = comm.all_to_all(arrived, values, async_op=True)
        rows = arrived.view(comm.size, shard.numel())
        return Finish([work], lambda: shard.copy_(fold(rows, shard.dtype)))
