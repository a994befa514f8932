"""Elastic data parallelism: members join, leave and die during training.

Problem.  Machines are taken away and given back.  Who restarts everything each time loses work;
who goes on with whoever is there must take care that a step is everybody's or nobody's, that a
joiner has all that training depends on, and that every sample is trained on once.

    what                        where
    parameters, optimizer       every member, whole
    gradients                   every member, whole, in buckets
    buffers, generators         every member, its own; a joiner's begin as the first member's
    residuals (``compress``)    every member, its own; who leaves hands them over to the first that
                                stays, who dies takes them along, and who joins owes nothing
    progress, first number      every member: samples trained on, steps, members at the start

    step         remember       [1] copies of what a step moves before it is committed
                 micro-batches  forward, backward; gradients add up locally
                 finish         [2] buckets are summed over the members
                                [3] vote: who used what, how many samples; the last call of a step
                 clip, update   [4] committed; no call, so that no member can be alone in one
    a member is gone            [5] a wait of [2] or [3] fails on all others: what [1] remembered is
                                    put back, and the step repeated over the members left
    reconfigure                 [6] members compare their numbers of steps; those with fewer than
                                    the most take over the state of the first with the most

The vote is the commit: it ends on a member only when all have put their gradients in, and have
seen the sums of all.  A backend whose calls end on some and fail on others may still leave one
member a step ahead; in [6] that one brings the others up to date (their residuals are a step old).

Two rules for what becomes of the batch when the number n of members changes (option ``batch``).
``global``: the batch stays, and each member's share changes; numbers are those of one process,
whoever takes part.  ``local``: each member's share stays; the batch is n / n0 times that of the n0
members that began, and so is the learning rate (Goyal et al., arXiv 1706.02677).

Cost: floating-point bytes a step, over all n members: 2 (n-1) trainable bytes.  A joiner: a message
of parameters, optimizer state and buffers to each member.  Memory beyond data parallelism's: a copy
of the buffers.
Numbers: those of one process that is told the same members, fp64 to 1e-12; equal bits from one run
of a history to the next.
Processes.  torchrun tells running workers nothing: it starts all anew, and they go on from the last
checkpoint.  Then the rename of its manifest is the commit, and what is a rank's own goes by rank: a
rank that there was not before begins as the first (``python -m tools.studies elastic``).
Left out: errors that native backends raise in place of PeerGone; overlap of sums with backward;
loss scales; factors of PowerSGD over a change of members, which begin anew; masks of dropout that
differ between a joiner and the member that it has its generators of; draws from torch's own
generators on ranks that are threads (not the main one), which share them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Generator, Tensor, nn

from shardproof.comm import Comm, Mesh, PeerGone
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.reference.engine.choices import Compressing, lossy
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Replicated
from shardproof.impls.reference.engine.late import late
from shardproof.impls.reference.engine.options import at_least, parse_options
from shardproof.impls.reference.engine.state import (
    broadcast_tensors,
    generators_of,
    load_state,
    named_state,
)
from shardproof.impls.reference.parts.buckets import GradientBucket, plan_buckets
from shardproof.impls.reference.parts.reducers import Reducer, pieces_on, slot_of

if TYPE_CHECKING:
    from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
    from shardproof.impls.reference.checkpoint.saver import Saver
    from shardproof.impls.reference.parts.compressors.owed import Owed

#: Among what a checkpoint holds beside tensors.
PROGRESS = "elastic"


@dataclass(frozen=True)
class Options(Compressing):
    """``batch``: the batch that stays constant when members change. ``bucket_bytes``: the largest
    bucket. ``compress``: every member keeps its own residuals.
    """

    batch: Literal["global", "local"] = "global"
    bucket_bytes: int = 25 * 2**20

    def __post_init__(self) -> None:
        at_least("bucket_bytes", self.bucket_bytes, 1)
        if self.compress is not None and self.compress.method == "onebit":
            raise Refused(
                "option 'compress.method' = 'onebit': the residuals depend on the number of "
                "workers, which can change; use 'cast', 'topk', 'randomk', 'powersgd' or 'sign'"
            )


class Elastic(Replicated):
    """The handle: gradients are summed over the members, who vote on each step."""

    def __init__(self, module: nn.Module, comm: Comm, options: Options, reducer: Reducer) -> None:
        super().__init__(module, comm)
        self.options, self.reducer = options, reducer
        self.samples = 0  # of this member in the step under way; of all, once they have voted
        order = list(reversed(range(len(self.parameters))))  # as backward makes gradients
        plan = plan_buckets(order, self.parameters, options.bucket_bytes, options.bucket_bytes)
        self.buckets = [GradientBucket(one, self.names, self.parameters) for one in plan]
        broadcast_tensors(list(named_state(module).values()), comm)

    def regroup(self, comm: Comm, reducer: Reducer) -> None:
        """Continue over ``comm``, without calls of the previous group."""
        self.comm, self.reducer, self.replica = comm, reducer, comm.rank
        self.forget()

    def forget(self) -> None:
        """Drop gradients and pending calls."""
        self.after_step()
        for bucket in self.buckets:
            bucket.reset()

    def finish(self) -> None:
        """Sum and vote; on return the step is committed on all members."""
        votes = self.votes()
        for bucket in self.buckets:  # [2]
            bucket.pack(self.parameters[index].grad for index in bucket.members)
            bucket.work = self.reducer.all_reduce(bucket.outgoing(self.step), self.comm)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
        *used, self.samples = self.comm.agree(votes, "sum")  # [3]
        for bucket in self.buckets:
            for index, view in bucket.views.items():
                # Not zero but none, or weight decay and momentum would move unused parameters.
                self.parameters[index].grad = view if used[index] else None

    def votes(self) -> list[int]:
        """The parameters that this member used, and its number of samples."""
        used = [int(parameter.grad is not None) for parameter in self.parameters]
        return [*used, self.samples]


@dataclass(frozen=True)
class Progress:
    """``samples`` and ``steps`` that are committed; ``began``: the number of members in the first
    step.
    """

    samples: int
    steps: int
    began: int


@dataclass(frozen=True)
class Moved:
    """State that a step changes before it is committed; ``kept``: that of the reducer."""

    buffers: Mapping[str, Tensor]
    generators: Mapping[str, Tensor]
    kept: Sequence[Piece]


class ReferenceElastic(Engine):
    """The strategy as a system under test."""

    strategy = "elastic_ddp"
    depth = "layout"
    options_type = Options
    handle_type: type[Elastic] = Elastic

    @late
    def checkpointing_type(cls) -> type[Checkpointing]:
        """Save and load with any number of members."""
        from shardproof.impls.reference.parts.joining import MembersCheckpoints

        return MembersCheckpoints

    @late
    def owed_type(cls) -> type[Owed]:
        """Keep the residuals of a member that is alone."""
        from shardproof.impls.reference.parts.compressors.owed import Owed

        return Owed

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Plain sums, whichever member computes them."""
        chosen = parse_options(Options, options)
        exact = Capabilities(
            dtypes=("float64", "float32"),
            buffers="per_rank",
            batch=chosen.batch,
            features=frozenset({"clipping", "accumulation", "initial_broadcast", "elastic"}),
            declines={
                "overflow_on_one_rank": "ranks commit a step before they can agree to skip it"
            },
        )
        return lossy(exact, chosen)

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Set up as usual; a later joiner sets up alone, and its state does not count."""
        if optimizer.scaler is not None:
            raise Refused(
                "optimizer.scaler: after an overflow all ranks must skip the step, but a rank "
                "updates parameters before it knows of other ranks' overflows; leave the scaler out"
            )
        self.chosen = parse_options(Options, options)
        self.asked = optimizer
        self.committed = Progress(0, 0, mesh.size("replicate"))
        self.handed: list[Piece] = []
        super().setup(build, state, optimizer, mesh, options)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Elastic:
        """Apply the handle along the replicate axis."""
        return self.handle_type(module, mesh.comm("replicate"), self.chosen, self.reducer)

    def make_reducer(self) -> Reducer:
        """Create the reducer: a member that is alone sends nothing but may keep residuals for
        others.
        """
        is_alone = self.chosen.compress is not None and self.mesh.size("replicate") == 1
        return self.owed_type() if is_alone else super().make_reducer()

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """A step of all members, or of none.

        :raises PeerGone: a member is gone; everything is as before.
        """
        handle: Elastic = self.handle  # type: ignore[assignment]
        handle.samples = sum(len(micro.sample_ids) for micro in batch.micro_batches)
        before = self.remember()  # [1]
        try:
            result = super().step(batch, observe)
        except PeerGone:  # [5]
            self.put_back(before)
            raise
        done = self.committed
        self.committed = replace(done, samples=done.samples + handle.samples, steps=done.steps + 1)
        return result

    def remember(self) -> Moved:
        """Copy the state that a step changes before it is committed."""
        return Moved(
            {name: buffer.clone() for name, buffer in self.module.named_buffers()},
            {name: g.get_state() for name, g in self.generators().items()},
            [replace(piece, tensor=piece.tensor.clone()) for piece in self.reducer.pieces()],
        )

    @torch.no_grad()
    def put_back(self, before: Moved) -> None:
        """Restore the state from before the step."""
        for name, buffer in self.module.named_buffers():
            buffer.copy_(before.buffers[name])
        for name, generator in self.generators().items():
            generator.set_state(before.generators[name])
        self.reducer.load_pieces(before.kept)
        self.handle.forget()  # type: ignore[attr-defined]

    def generators(self) -> dict[str, Generator]:
        """Name -> generator of a dropout, without those that rank threads share."""
        found = generators_of(self.module, torch.device(self.mesh.device))
        is_process = threading.current_thread() is threading.main_thread()
        return {n: g for n, g in found.items() if is_process or n not in ("torch", "cuda")}

    def progress(self) -> int:
        """Samples in committed steps."""
        return self.committed.samples

    def hand_over(self, left: Sequence[int]) -> None:
        """Pass the residuals of leaving members to the first one that stays."""
        own = self.reducer.pieces() if self.mesh.rank in left else []
        given = self.mesh.comm("replicate").all_gather_object(own)
        if self.mesh.rank == next(rank for rank in self.mesh.ranks if rank not in left):
            self.handed = [piece for pieces in given for piece in pieces]

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        """Continue over ``mesh``; members that are behind copy the state of the others."""
        comm = mesh.comm("replicate")
        self.mesh = mesh
        owed = [*self.reducer.pieces(), *self.handed]
        self.reducer, self.handed = self.make_reducer(), []
        kept = [piece for piece in owed if slot_of(piece.name) == "residual"]
        self.reducer.load_pieces(pieces_on(mesh.device, kept))
        self.handle.regroup(comm, self.reducer)  # type: ignore[attr-defined]
        own = -1 if mesh.rank in joined else self.committed.steps
        steps = comm.all_gather_object(own)  # [6]
        most = max(steps)
        if min(steps) < most:
            root = steps.index(most)
            state = comm.broadcast_object(self.held() if comm.rank == root else None, root)
            if own < most:
                self.take(state)
        self.follow()

    def follow(self) -> None:
        """Scale the learning rate with the members if the batch follows them."""
        if self.chosen.batch == "local":
            # 1, with all its bits, among as many members as began
            rate = self.mesh.size("replicate") / self.committed.began
            self.spec = replace(self.asked, lr=self.asked.lr * rate)

    def save(self, path: Path, extra: Mapping[str, Any]) -> Saver:
        """Save as usual, with the progress, for members in restarted processes."""
        return super().save(path, {**extra, PROGRESS: asdict(self.committed)})

    def load(self, path: Path) -> Mapping[str, Any]:
        """Load as usual and continue with the current number of members."""
        extra = dict(super().load(path))
        if PROGRESS in extra:  # else another strategy saved it
            self.committed = Progress(**extra.pop(PROGRESS))
            self.follow()
        return extra

    def held(self) -> dict[str, Any]:
        """All state that training depends on."""
        return {
            "model": named_state(self.module),
            "optimizer": self.optimizer.state_dict(),
            "generators": {name: g.get_state() for name, g in self.generators().items()},
            "committed": self.committed,
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Continue as the member that held ``state``."""
        self.finish_copies()
        load_state(self.module, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, generator in self.generators().items():
            generator.set_state(state["generators"][name])
        self.committed = state["committed"]


IMPLEMENTATION = ReferenceElastic
