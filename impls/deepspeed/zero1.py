"""DeepSpeed ZeRO-1: optimizer state and its fp32 masters are sharded.

    what                        where
    parameters                  every rank, whole, views of one flat buffer per group
    gradients                   whole until the boundary; then this rank's partition
    fp32 master, optimizer      this rank's partition of every group (in fp32 a second copy)

    step     micro-batches but the last   gradients add up locally
             last micro-batch             copied into a bucket of ``reduce_bucket_size`` elements,
                                          all-reduced when full; each rank keeps its partition
             engine.step()                norm over the partitions, clip, update, all-gather

Cost: ``deepspeed_zero1.payload_bytes``.  Buckets are *all-reduced* although the option is called
``reduce_scatter``, because ``use_multi_rank_bucket_allreduce`` is on by default (``average_tensor``
in ``stage_1_and_2.py``): 3 (N-1) Psi instead of ZeRO's 2 (N-1) Psi.  With it off each partition is
reduced to its owner, which is ZeRO's volume.  The norm of every group is all-reduced whether or not
gradients are clipped.  Numbers: the mean over ranks of losses times N.
"""

from __future__ import annotations

from shardproof.impls.deepspeed.partitions import FlatPartitions
from shardproof.impls.reference.engine.choices import USUAL


class DeepSpeedZero1(FlatPartitions):
    """The adapter of stage 1."""

    strategy = "deepspeed_zero1"
    depth = "layout"
    stage = 1
    features = USUAL | {"accumulation_without_communication", "sharded_optimizer"}


IMPLEMENTATION = DeepSpeedZero1
