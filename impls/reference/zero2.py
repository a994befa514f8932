"""ZeRO-2: optimizer state and gradients are sharded; only parameters are whole.

Problem.  Under ZeRO-1 every rank still holds a gradient for every parameter, though it updates 1/N
of them.  ZeRO-2 keeps only the reduced shard.  The whole gradients of a bucket live from the first
one that backward makes until the bucket has been reduced and scattered; then they are freed.

    what                        where
    parameters                  every rank, whole; views of flat buckets
    gradients                   until the step ends, one shard of each bucket, the sum over ranks
                                and micro-batches; whole only in the one in flight, the one that
                                fills and the next one begun
    optimizer state             one shard of each bucket
    buffers                     every rank its own

    step     before_step          [1] how many rounds? the most micro-batches of any rank (int32)
             each micro-batch     [2] a round: forward; backward:  g9 g8 | g7 g6       | g5 ...
                                  [3] a bucket is full:            [b0]   wait b0, [b1]
                                  [4] after a wait: the sums of b0 are added to its kept shard,
                                      its whole gradients are freed
             next micro-batch,    [5] buckets that the backward left unsent are sent: when the
             or finish                next micro-batch begins (accumulate), else in finish; in a
                                      pipeline at once (backward_ended)
             finish               [6] rounds that other ranks still have, with zeros; wait
                                  [7] who used what (integers)
             clip, update         own shards only; the norm is a sum over ranks
             after_update         all-gather of every bucket's parameters, in place

Rounds are in parts/sharded_update.py, buckets in parts/owned_bucket.py.  Gradients
cannot add up locally over micro-batches, because no rank keeps them whole: each of m micro-batches
has its own reduction.

Cost: floating-point bytes sent a step, over all N ranks: m (N-1) padded gradient bytes
(reduce-scatter; m is the largest number of micro-batches of a rank) + (N-1) padded parameter bytes
(all-gather): ZeRO, arXiv 1910.02054, sections V-B and VII-B.  With clipping one float64 is
all-reduced.  Memory: P + (G + O)/N bytes of parameters, gradients and optimizer state, and at most
three buckets of whole gradients during backward.
Numbers: summed over ranks first, then over micro-batches, hence equal to DDP's but for the order of
summation.
Left out: offload of parameters (they are whole), optimizers that are not element-wise, reentrant
checkpointing (a second gradient for a bucket that was sent is an error).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Kind
from shardproof.impls.reference.engine.choices import FORMATS, Reduction, declared, lossy
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, Handle
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import gather_pieces
from shardproof.impls.reference.parts import sharded_update
from shardproof.impls.reference.parts.owned_bucket import OwnedBucket
from shardproof.impls.reference.parts.sharded_update import ShardedUpdate


@dataclass(frozen=True)
class Options(sharded_update.Options):
    """Smaller buckets than in ZeRO-1: at most three buckets of whole gradients exist at a time."""

    bucket_bytes: int = 4 * 2**20

    @property
    def reduction(self) -> Reduction:
        """Into shards, in every round."""
        return Reduction(scattered=True, each_round=True)


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> Zero2:
    """Shard update and gradients of ``module`` over ``comms["shard"]``, from rank 0's values."""
    return Zero2(module, comms["shard"], options, context.reducer)


class Zero2(ShardedUpdate):
    """The handle: one round per micro-batch of the busiest rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: This rank's shard of each bucket's sum over ranks and micro-batches, until the step ends.
        self.kept: dict[OwnedBucket, Tensor] = {}
        self.sums: dict[OwnedBucket, Tensor] = {}  # shards of this round's sums, in flight
        self.rounds = self.begun = 0
        self.computing = False  # whether the running round has a micro-batch of this rank

    def before_step(self, micro_batches: int) -> None:
        """Agree on the number of rounds."""
        # [1] A rank that ran fewer rounds than another would leave it waiting in a reduction.
        [self.rounds] = self.comm.agree([micro_batches], "max")
        self.begun = 0

    def accumulate(self, is_last: bool) -> None:
        """Start a micro-batch, which is a round of its own."""
        self.close_round()
        self.begin_round(computing=True)

    def backward_ended(self) -> None:
        """Send the remaining buckets of this backward, which others may wait for."""
        self.close_round()

    def begin_round(self, computing: bool) -> None:  # [2]
        """Start the next round, with or without a micro-batch on this rank."""
        # Before its first gradient: the bucket in flight may be the one that it belongs to.
        self.wait_and_accumulate()
        self.begun += 1
        self.computing = computing
        self.start_round()

    def close_round(self) -> None:  # [5]
        """Send the remaining buckets of the current round."""
        if self.sending:
            self.end_round(self.computing)

    def send(self, bucket: OwnedBucket) -> None:  # [3]
        """Reduce into this rank's shard."""
        # The wait comes first: without it a fourth bucket could hold whole gradients (see Cost).
        self.wait_and_accumulate()
        parameters = bucket.parameters
        sums = torch.empty_like(parameters.shard, dtype=parameters.gradient_dtype)
        self.sums[bucket] = sums
        self.reduce_scatter(bucket, sums)

    def wait_and_accumulate(self) -> None:  # [4]
        """Wait for pending reductions, add them to the kept shard, and free the whole gradients."""
        for bucket, sums in self.sums.items():
            assert bucket.work is not None
            bucket.work.wait()
            if bucket in self.kept:
                self.kept[bucket] += sums
            else:
                self.kept[bucket] = sums  # the first round: keep this tensor, no copy
            bucket.release()  # only now: until here the reduction was reading them
            bucket.work = None
        self.sums.clear()

    def gradient(self, bucket: OwnedBucket) -> Tensor:
        """The kept shard; a bucket that was not sent has none."""
        unsent = bucket.parameters.shard[:0].to(bucket.parameters.gradient_dtype)
        return self.kept.get(bucket, unsent)

    def finish(self) -> None:
        """Join the remaining rounds of other ranks; agree on use."""
        self.close_round()
        while self.begun < self.rounds:  # [6]
            self.begin_round(computing=False)
            self.close_round()
        self.wait_and_accumulate()
        self.publish_gradients()  # [7]

    def after_step(self) -> None:
        """Free the kept shards, because forward needs the memory."""
        super().after_step()
        self.kept.clear()


class ReferenceZero2(Engine):
    """The strategy as a system under test."""

    strategy = "zero2"
    depth = "layout"
    options_type = Options
    handle_type: type[Zero2] = Zero2

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities that the ``zero2`` profile requires."""
        exact = declared(
            "sharded_optimizer", "sharded_gradients", axes=("shard",), checkpoints=FORMATS
        )
        return lossy(exact, parse_options(Options, options))

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the shard axis."""
        chosen = parse_options(Options, options)
        return self.handle_type(module, mesh.comm("shard"), chosen, self.reducer)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors, gathered if they lie in shards."""
        return gather_pieces(self.local_state(kind), self.mesh.comm("shard"))


IMPLEMENTATION = ReferenceZero2
