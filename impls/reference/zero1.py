"""ZeRO-1: every rank holds the model, but only a shard of the optimizer state.

Problem.  Data parallelism keeps the optimizer's state, Adam's two moments and perhaps fp32 masters,
on every rank, although all ranks compute the same update.  In ZeRO-1 each rank updates 1/N of the
parameters.  It needs the summed gradient of its own shard only, and all ranks need the result.

An all-reduce is a reduce-scatter followed by an all-gather.  ZeRO-1 puts the update in between:
first gradients are scattered, then *parameters* are gathered, and no more bytes are sent than by
DDP.  (All-reduce and then all-gather, the naive way, would send half as much again.)

    what                        where
    parameters                  every rank, whole; views of flat buckets
    gradients                   every rank, whole and its own, in flat buckets; of each bucket one
                                shard holds the sum over ranks
    optimizer state             one shard of each bucket
    buffers                     every rank its own

    step     micro-batches but the last [1] forward, backward; gradients add up in the buckets
             last micro-batch           [2] a round: forward; backward:  g9 g8 | g7 g6 | g5 ...
                                        [3] a bucket is full:            [b0]   [b1]    sent
             finish                     [4] buckets not yet sent, in order
                                        [5] wait b0, b1, ...; who used what (integers)
             clip, update               own shards only; the norm is a sum over ranks
             after_update               all-gather of every bucket's parameters, in place

Rounds are in parts/sharded_update.py, buckets in parts/owned_bucket.py.  A gradient moves into its
bucket as soon as backward has made it, so no second copy exists.  The sums need no memory of their
own either: both collectives work in place.

Cost: floating-point bytes sent a step, over all N ranks, whatever the number of micro-batches:
(N-1) padded gradient bytes (reduce-scatter) + (N-1) padded parameter bytes (all-gather): ZeRO,
arXiv 1910.02054, sections V-A and VII-A; DDP's traffic but for the padding.  With clipping one
float64 is all-reduced.  Memory: P + G + O/N.
Numbers: the gradient is the plain sum over ranks, equal to DDP's bit for bit where both collectives
add in rank order; the norm is added in another order than DDP's.
Left out: offload of parameters (they are whole), optimizers that are not element-wise, reentrant
checkpointing (a second gradient for a bucket that was sent is an error).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Kind
from shardproof.impls.reference.engine.choices import FORMATS, declared, lossy
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, Handle
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import gather_pieces
from shardproof.impls.reference.parts.owned_bucket import OwnedBucket
from shardproof.impls.reference.parts.sharded_update import Options, ShardedUpdate


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> Zero1:
    """Shard the update of ``module`` over ``comms["shard"]``, starting from rank 0's values."""
    return Zero1(module, comms["shard"], options, context.reducer)


class Zero1(ShardedUpdate):
    """The handle: one round per step, during the last micro-batch's backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.computed = False  # whether this rank has any micro-batch in this step
        for bucket in self.buckets:
            bucket.flat()  # kept for good: the memory of a step does not depend on its order

    def before_step(self, micro_batches: int) -> None:
        """Drop the last step's gradients."""
        self.computed, self.sent_count = micro_batches > 0, 0
        for bucket in self.buckets:
            bucket.filled.clear()  # the memory stays, what lies in it no longer counts
            bucket.start_round()

    def accumulate(self, is_last: bool) -> None:
        """Let gradients be sent during the last micro-batch's backward only."""
        # Until then they add up in their buckets [1]: reducing each would cost m times the traffic.
        if is_last:
            self.start_round()  # [2]

    def send(self, bucket: OwnedBucket) -> None:  # [3]
        """Reduce in place: the sum replaces this rank's shard."""
        self.reduce_scatter(bucket, bucket.own_gradients())

    def gradient(self, bucket: OwnedBucket) -> Tensor:
        """The shard of the bucket that holds sums."""
        return bucket.own_gradients()

    def backward_ended(self) -> None:
        """Send the incomplete buckets before those of another stage."""
        if self.sending:
            self.end_round(computed=True)

    def sit_out(self) -> None:
        """Contribute zeros once on a rank without data."""
        if self.sent_count < len(self.queue):
            self.start_round()
            self.end_round(computed=False)

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and agree on use."""
        if self.computed:
            self.end_round(computed=True)  # [4]
        else:
            self.sit_out()
        for bucket in self.buckets:  # [5]
            if bucket.work is not None:
                bucket.work.wait()
        self.publish_gradients()


class ReferenceZero1(Engine):
    """The strategy as a system under test."""

    strategy = "zero1"
    depth = "layout"
    options_type = Options
    handle_type: type[Zero1] = Zero1

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities that the ``zero1`` profile requires."""
        exact = declared("sharded_optimizer", axes=("shard",), checkpoints=FORMATS)
        return lossy(exact, parse_options(Options, options))

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the shard axis."""
        chosen = parse_options(Options, options)
        return self.handle_type(module, mesh.comm("shard"), chosen, self.reducer)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors, gathered if they lie in shards."""
        return gather_pieces(self.local_state(kind), self.mesh.comm("shard"))


IMPLEMENTATION = ReferenceZero1
