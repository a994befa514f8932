"""DeepSpeed ZeRO-2: gradients are sharded too.

    what                        where
    parameters                  every rank, whole, views of one flat buffer per group
    gradients                   this rank's partition, outside of the bucket being filled
    fp32 master, optimizer      this rank's partition of every group (in fp32 a second copy)

    step     every micro-batch   a bucket is reduced when full, during backward; the rank's
                                 partition is added to what it has
             engine.step()       norm over the partitions, clip, update, all-gather

Cost: ``deepspeed_zero2.payload_bytes``: one reduction *a micro-batch*, by all-reduce unless
``use_multi_rank_bucket_allreduce`` is off (see ``zero1``): 2 m + 1 instead of m + 1 times
(N-1) Psi.
Numbers: the mean over ranks of losses times N.
"""

from __future__ import annotations

from shardproof.impls.deepspeed.engine import EVERY_MICRO_BATCH
from shardproof.impls.deepspeed.partitions import FlatPartitions
from shardproof.impls.reference.engine.choices import USUAL


class DeepSpeedZero2(FlatPartitions):
    """The adapter of stage 2."""

    strategy = "deepspeed_zero2"
    depth = "layout"
    stage = 2
    declines = EVERY_MICRO_BATCH
    features = USUAL | {"sharded_optimizer", "sharded_gradients"}


IMPLEMENTATION = DeepSpeedZero2
