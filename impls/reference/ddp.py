"""Distributed data parallelism: every rank holds the whole model and a share of the batch.

Problem.  Ranks see different data, so their gradients differ; the model must be updated with their
sum.  Summing after backward leaves the network idle while backward computes, and one call for each
parameter pays a whole call's latency each time.  So gradients are packed into buckets, and the
reduction of a bucket starts as soon as its last gradient exists, while backward goes on.

    what                        where
    parameters, gradients       every rank, whole and equal
    optimizer state             every rank, whole and equal
    buffers                     every rank; rank 0's are copied to all at the start of a step
    buckets                     every rank; all gradients, flat

    step     before_step                [1] rank 0's buffers -> all
             micro-batches but the last [2] forward, backward; gradients add up locally
             last micro-batch           [3] forward; backward:    g9 g8 | g7 g6 | g5 ...
                                            each moves into its bucket and is a view of it from
                                            then on
                                        [4] a bucket is full:     [b0]    [b1]   all-reduces start
             finish                     [5] buckets not yet sent, in order; who used what (integers)
                                        [6] wait b0, b1, ...
             clip, update               local, the same on all ranks
             after_step                 [7] new buckets, if the ranks' use of parameters changed

Two rules keep the ranks together.  (a) All launch the same buckets in the same order: a full bucket
waits for those before it.  The first step uses reverse registration order, later ones the order in
which rank 0's gradients arrived.  (b) A parameter that some rank did not use in its last backward
would hold up every bucket behind it: from the next step on it is in the last bucket.  It stays
there, or a branch that comes and goes would hold up every other step.

A rank contributes zero for a parameter that it did not use; one that no rank used has no gradient.

Cost: floating-point bytes sent a step, over all N ranks: 2 (N-1) trainable bytes (an all-reduce
moves 2 (N-1)/N of the payload a rank: ZeRO, arXiv 1910.02054, section VII-A) + (N-1) float buffer
bytes.
Numbers: the gradient is the plain sum over ranks (the weights sum to 1 over the global batch),
hence equal to one device's up to the order of summation; replicas stay equal bit for bit.
Left out: join (ranks that run out of data for good; a step without data is fine), sparse gradients,
reentrant checkpointing (a second gradient for a bucket that was sent is an error).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import Capabilities, Kind, Refused
from shardproof.impls.reference.engine.choices import (
    FORMATS,
    Compressing,
    Followed,
    OfWholes,
    Saved,
    declared,
    lossy,
)
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, Handle, Replicated
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.parts.buckets import GradientBucket, plan_buckets
from shardproof.impls.reference.parts.reducers import Reducer, Work


@dataclass(frozen=True)
class Options(OfWholes, Compressing, Followed, Saved):
    """``bucket_bytes`` limits a bucket, ``first_bucket_bytes`` the first one to be sent;
    ``recompute_every``: see engine/recompute.py.
    """

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    broadcast_buffers: bool = True
    join: bool = False
    recompute_every: int = 0

    def __post_init__(self) -> None:
        at_least("bucket_bytes", self.bucket_bytes, 1)
        at_least("first_bucket_bytes", self.first_bucket_bytes, 1)
        at_least("recompute_every", self.recompute_every, 0)
        if self.join:
            raise Refused(
                "option 'join' = True: ranks that run out of data are not supported; set join "
                "to false"
            )


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> DDP:
    """Replicate ``module`` over ``comms["replicate"]``, starting from rank 0's values."""
    return DDP(module, comms["replicate"], options, context.reducer)


class DDP(Replicated):
    """The handle: buckets, hooks, and the agreement of ranks on both."""

    def __init__(
        self, module: nn.Module, comm: Comm, options: Options, reducer: Reducer | None = None
    ) -> None:
        super().__init__(module, comm)
        self.options = options
        self.reducer = reducer or Reducer()
        self.reducer.check(comm.size)
        self.broadcast_initial()
        self.order = list(reversed(range(len(self.parameters))))
        self.learned = False  # whether ``order`` is that of a backward
        self.late: set[int] = set()  # parameters that once kept a bucket waiting
        self.newly_late: set[int] = set()  # those of this step, from all ranks
        self.lay_out()
        self.start_step()
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self.arrived, index))
            for index, parameter in enumerate(self.parameters)
        ]

    # ------------------------------------------------------------------------------ rank 0's values

    def broadcast_initial(self) -> None:
        """Broadcast parameters (including frozen ones) and buffers of rank 0."""
        broadcast_tensors(list(named_state(self.module).values()), self.comm)

    def buffers(self) -> dict[str, Tensor]:
        """Name -> buffer, looked up each time, because a module may bind a new tensor to the
        name.
        """
        return dict(self.module.named_buffers())

    def broadcast_buffers(self) -> None:
        """Broadcast the buffers of rank 0."""
        broadcast_tensors(list(self.buffers().values()), self.comm)

    # -------------------------------------------------------------------------------------- a step

    def before_step(self, micro_batches: int) -> None:
        """Start from rank 0's buffers."""
        self.start_step()
        if self.options.broadcast_buffers:  # [1]
            self.broadcast_buffers()

    def start_step(self) -> None:
        """Clear the arrivals of the last step."""
        self.syncing = False
        self.computed = False  # whether this rank has any micro-batch in this step
        self.arrivals: dict[int, None] = {}  # an ordered set
        self.launched = 0
        for bucket in self.buckets:
            bucket.reset()

    def accumulate(self, is_last: bool) -> None:
        """Let gradients be sent during the last micro-batch's backward only."""
        self.computed = True
        # Earlier ones add up in ``parameter.grad`` [2], so that a step has one reduction.
        self.syncing = is_last

    def arrived(self, index: int, parameter: Tensor) -> None:  # [3]
        """Hook: ``parameter.grad`` is complete, including earlier micro-batches.

        It moves into its bucket at once, so that its own memory serves the next gradient.
        """
        if not self.syncing:
            return
        bucket = self.bucket_of[index]
        if bucket.work is not None:
            raise RuntimeError(
                f"{self.names[index]!r} received a second gradient in one micro-batch, after its "
                "bucket was sent: run one forward and one backward per micro-batch; with "
                "activation checkpointing, set use_reentrant=False or use option 'recompute_every'"
            )
        if parameter.grad is not None:
            parameter.grad = bucket.views[index].copy_(parameter.grad)
        self.arrivals[index] = None
        bucket.missing.discard(index)
        self.launch_full_buckets()

    def launch_full_buckets(self) -> None:  # [4]
        """Launch buckets in the agreed order, up to the first that still waits for a gradient."""
        # Rule (a): backends match calls by their order, so a bucket that is full early must wait.
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self.launch(self.buckets[self.launched])

    def launch(self, bucket: GradientBucket) -> None:
        """Pack ``bucket`` and start its reduction."""
        bucket.pack(self.contribution(index) for index in bucket.members)
        bucket.work = self.reduce(bucket)
        self.launched += 1

    def reduce(self, bucket: GradientBucket) -> Work:
        """Start summing ``bucket`` over the ranks."""
        return self.reducer.all_reduce(bucket.outgoing(self.step), self.comm)

    def contribution(self, index: int) -> Tensor | None:
        """This rank's gradient of a parameter; ``None`` (zero) if it was not used."""
        return self.parameters[index].grad

    def backward_ended(self) -> None:
        """Send the incomplete buckets before those of another stage."""
        if self.syncing:
            self.launch_rest()

    def sit_out(self) -> None:
        """Contribute zeros to all buckets."""
        self.launch_rest()

    def launch_rest(self) -> None:
        """Launch the incomplete buckets."""
        for bucket in self.buckets[self.launched :]:
            self.launch(bucket)

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and drop gradients that no rank used."""
        self.launch_rest()  # [5]
        # Before the waits: afterwards every parameter has a gradient, used or not.
        votes = self.comm.begin_agreement(self.usage_votes(), "sum")
        for bucket in self.buckets:  # [6]
            self.wait_and_publish(bucket)
        self.count(votes.wait())

    def wait_and_publish(self, bucket: GradientBucket) -> None:
        """Wait for ``bucket`` and make its members' gradients views of it."""
        assert bucket.work is not None
        bucket.work.wait()
        for index, view in bucket.views.items():
            self.parameters[index].grad = view

    # ------------------------------------------------------------------------- agreement on use

    def usage_votes(self) -> list[int]:
        """Used in this step (per parameter), arrived in the last backward (per parameter), 1 if
        this rank computed at all, 1 if rank 0 did."""
        used = [int(parameter.grad is not None) for parameter in self.parameters]
        arrived = [int(index in self.arrivals) for index in range(len(self.parameters))]
        root = int(self.computed and self.comm.rank == 0)
        return [*used, *arrived, int(self.computed), root]

    def count(self, votes: Sequence[int]) -> None:
        """Read the sum of the votes: parameters that no rank used, and late ones."""
        *of_parameters, computed, root = votes
        used = of_parameters[: len(self.parameters)]
        arrived = of_parameters[len(self.parameters) :]
        for index, parameter in enumerate(self.parameters):
            if not used[index]:
                # Not zero but none, or weight decay and momentum would move unused parameters.
                parameter.grad = None
        # Late on a rank: it ran a backward (counts as computed) in which the gradient did not come.
        self.newly_late = {i for i, n in enumerate(arrived) if n < computed} - self.late
        self.root_computed = bool(root)

    def after_step(self) -> None:
        """Clear gradients; agree again on the buckets if use has changed."""
        # First, for gradients are views of the buckets: old and new ones would both have memory.
        super().after_step()
        # Both come from summed votes, so that all ranks enter the broadcast or none does.  [7]
        if self.newly_late or (self.root_computed and not self.learned):
            self.late |= self.newly_late
            self.learned |= self.root_computed
            self.agree_on_order()
            self.lay_out()

    def agree_on_order(self) -> None:
        """Adopt rank 0's order of arrival; parameters that did not arrive there go to the end, in
        order.
        """
        rest = [index for index in self.order if index not in self.arrivals]
        self.order = self.comm.agree([*self.arrivals, *rest], "first", dtype=torch.int64)

    def lay_out(self) -> None:
        """Build the buckets: prompt parameters in order, then the late ones together (rule b)."""
        prompt = [index for index in self.order if index not in self.late]
        late = [index for index in self.order if index in self.late]
        limits = (self.options.first_bucket_bytes, self.options.bucket_bytes)
        plan = plan_buckets(prompt, self.parameters, *limits)
        # Without a limit: late gradients leave after backward, when nothing is gained by cutting.
        plan += plan_buckets(late, self.parameters, None, None)
        self.buckets = [GradientBucket(one, self.names, self.parameters) for one in plan]
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.members}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()


class ReferenceDDP(Engine):
    """The strategy as a system under test."""

    strategy = "ddp"
    depth = "layout"
    options_type = Options
    handle_type: type[DDP] = DDP

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities that the ``ddp`` profile requires."""
        chosen = parse_options(Options, options)
        features, buffers = ["accumulation_without_communication", "overlap"], "per_rank"
        if chosen.broadcast_buffers:
            features, buffers = [*features, "buffer_broadcast"], "rank0"
        return lossy(declared(*features, buffers=buffers, checkpoints=FORMATS), chosen)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the replicate axis."""
        chosen = parse_options(Options, options)
        return self.handle_type(module, mesh.comm("replicate"), chosen, self.reducer)

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Copies of this rank's replica, which is whole."""
        return {piece.name: piece.tensor.clone() for piece in self.local_state(kind)}


IMPLEMENTATION = ReferenceDDP
