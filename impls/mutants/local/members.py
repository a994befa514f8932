"""Faults of elastic groups: joiners with missing state, steps committed by some, samples repeated
or lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardproof.case import Death, WorkloadSpec
from shardproof.comm import Comm, Mesh, PeerGone
from shardproof.contract import Batch, Observe, StepResult
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import ADAMW, gpt
from shardproof.impls.reference.elastic import Elastic, Moved, ReferenceElastic
from shardproof.impls.reference.parts.compressors.owed import Owed
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work

BUCKETS: Mapping[str, Any] = {"bucket_bytes": 4000}
LOCAL: Mapping[str, Any] = {**BUCKETS, "batch": "local"}
CNN = WorkloadSpec("digits_cnn", global_batch=12, params={"layers": 1})
#: Rank 1 leaves and comes back.
BACK: Mapping[str, Any] = {"membership": {"1": (0, 2), "2": (0, 1, 2)}}
LEAVES: Mapping[str, Any] = {"membership": {"1": (0, 2)}}
TOPK: Mapping[str, Any] = {**BUCKETS, "compress": {"method": "topk", "density": 0.1}}
KEPT = ("compression", "equivalence")
#: It dies when two buckets of the second step are summed.
DIES: Mapping[str, Any] = {"deaths": (Death(1, 1, 2),)}

mutant = declare.family(
    ReferenceElastic,
    options=BUCKETS,
    mesh={"replicate": 3},
    steps=3,
    killed_by=("equivalence",),
)


@mutant(
    "elastic_joiner_without_parameters",
    says="only rank 1, which joined",
    killed_by=("equivalence", "replicas"),
    **BACK,
)
class JoinerWithoutParameters(ReferenceElastic):
    """A joiner starts from the parameters that it was built with."""

    def take(self, state: Mapping[str, Any]) -> None:
        built = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        super().take({**state, "model": {**state["model"], **built}})


@mutant(
    "elastic_joiner_without_optimizer",
    says="only rank 1, which joined",
    optimizer=ADAMW,
    killed_by=("equivalence", "replicas"),
    **BACK,
)
class JoinerWithoutOptimizer(ReferenceElastic):
    """A joiner gets the parameters but keeps a fresh optimizer."""

    def take(self, state: Mapping[str, Any]) -> None:
        fresh = self.optimizer.state_dict()
        super().take({**state, "optimizer": fresh})


@mutant("elastic_joiner_without_buffers", says="only rank 1, which joined", workload=CNN, **BACK)
class JoinerWithoutBuffers(ReferenceElastic):
    """A joiner keeps its initial running statistics."""

    def take(self, state: Mapping[str, Any]) -> None:
        own = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        super().take({**state, "model": {**state["model"], **own}})


@mutant(
    "elastic_joiner_without_draws",
    says="only rank 1, which joined",
    workload=gpt("dropout_stateful"),
    **BACK,
)
class JoinerWithoutDraws(ReferenceElastic):
    """A joiner draws its dropout masks from the start of the sequence."""

    def take(self, state: Mapping[str, Any]) -> None:
        own = {name: g.get_state() for name, g in self.generators().items()}
        super().take({**state, "generators": own})


@mutant(
    "elastic_joiner_without_progress",
    says="rank 1 trains again on sample .",
    killed_by=("membership", "equivalence"),
    zoo=("G08",),
    **BACK,
)
class JoinerWithoutProgress(ReferenceElastic):
    """A joiner starts at the beginning of the data."""

    def take(self, state: Mapping[str, Any]) -> None:
        super().take({**state, "committed": replace(state["committed"], samples=0)})


@mutant(
    "elastic_progress_of_the_newest",
    says="rank 0 trains again on sample .",
    killed_by=("membership", "equivalence"),
    zoo=("G08",),
    **BACK,
)
class ProgressOfTheNewest(ReferenceElastic):
    """All members take the progress of the newest member, which has none."""

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        own = self.committed
        super().reconfigure(mesh, joined, left)
        told = mesh.comm("replicate").all_gather_object(own)
        if joined:
            self.committed = told[mesh.ranks.index(joined[-1])]


@mutant("elastic_rate_stays", says="every update is 1.5 times", options=LOCAL, **LEAVES)
class RateStays(ReferenceElastic):
    """The batch shrinks with the members, but the learning rate does not."""

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        super().reconfigure(mesh, joined, left)
        self.spec = self.asked


@mutant(
    "elastic_rate_of_the_joiner",
    says="on rank 1, every update is 3 times",
    options=LOCAL,
    killed_by=("equivalence", "replicas"),
    **BACK,
)
class RateOfTheJoiner(ReferenceElastic):
    """A joiner takes itself for the only initial member and scales its rate by that."""

    def take(self, state: Mapping[str, Any]) -> None:
        super().take({**state, "committed": replace(state["committed"], began=1)})


@mutant("elastic_rate_scaled_twice", says="every update is 0.6667 times", options=LOCAL, **LEAVES)
class RateScaledTwice(ReferenceElastic):
    """Both the learning rate and the gradients are scaled with the members."""

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        super().reconfigure(mesh, joined, left)
        times = self.spec.lr / self.asked.lr
        self.spec = replace(self.spec, lr=self.spec.lr * times)


@mutant("elastic_rate_scales_under_global", says="every update is 0.6667 times", **LEAVES)
class RateScalesUnderGlobal(ReferenceElastic):
    """The learning rate follows the members, although the batch does not."""

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        super().reconfigure(mesh, joined, left)
        rate = self.asked.lr * mesh.size("replicate") / self.committed.began
        self.spec = replace(self.asked, lr=rate)


@mutant("elastic_divides_by_the_first_group", says="every gradient is 1.5 times", **LEAVES)
class DividesByTheFirstGroup(Elastic):
    """The mean divides by the initial number of members and multiplies by the current one."""

    first = 0

    def finish(self) -> None:
        super().finish()
        self.first = self.first or self.comm.size
        self.scale_gradients(torch.tensor(self.comm.size / self.first, dtype=torch.float64))


@mutant("elastic_keeps_half_a_step", says="repeated without", **DIES)
class KeepsHalfAStep(Elastic):
    """Gradients of an abandoned step are not cleared, so the next ones are added to them."""

    def forget(self) -> None:
        for bucket in self.buckets:
            bucket.reset()


@mutant("elastic_keeps_the_reducer", says="repeated without", options=LOCAL, zoo=("G11",), **DIES)
class KeepsTheReducer(Elastic):
    """Buckets summed before a member died count as summed in the new group."""

    def forget(self) -> None:
        self.after_step()

    def finish(self) -> None:
        left = [bucket for bucket in self.buckets if bucket.work is not None]
        kept = {id(bucket): bucket.flat.clone() for bucket in left[:2]}
        super().finish()
        for bucket in self.buckets:
            bucket.flat.copy_(kept.get(id(bucket), bucket.flat))
            bucket.reset()


@mutant("elastic_keeps_moved_buffers", says="repeated without", workload=CNN, **DIES)
class KeepsMovedBuffers(ReferenceElastic):
    """Running statistics of an abandoned step are kept and updated again."""

    def put_back(self, before: Moved) -> None:
        super().put_back(replace(before, buffers=self.remember().buffers))


@mutant(
    "elastic_keeps_what_was_drawn",
    says="repeated without",
    workload=gpt("dropout_stateful"),
    **DIES,
)
class KeepsWhatWasDrawn(ReferenceElastic):
    """Masks of an abandoned step are not redrawn: the next ones are used."""

    def put_back(self, before: Moved) -> None:
        super().put_back(replace(before, generators=self.remember().generators))


@mutant(
    "elastic_counts_a_step_given_up",
    says="trains again on sample ..|expected one of",
    killed_by=("membership", "equivalence"),
    **DIES,
)
class CountsAStepGivenUp(ReferenceElastic):
    """Progress advances when a batch is read, so the samples of an abandoned step are skipped."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        try:
            return super().step(batch, observe)
        except PeerGone:
            done = self.committed
            read = 3 * sum(len(micro.sample_ids) for micro in batch.micro_batches)
            self.committed = replace(done, samples=done.samples + read)
            raise


@mutant(
    "elastic_committed_by_the_first",
    says="yet ranks? .*committed it",
    killed_by=("membership",),
    **DIES,
)
class CommittedByTheFirst(ReferenceElastic):
    """The first member commits a step as soon as it has its own gradients."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        try:
            return super().step(batch, observe)
        except PeerGone:
            if self.mesh.rank == self.mesh.ranks[0]:
                return StepResult(torch.zeros(()))
            raise


@mutant(
    "elastic_committed_without_a_vote",
    says="died in it, yet ranks 0,2 committed it",
    killed_by=("membership", "equivalence"),
    deaths=(Death(1, 1, 5),),
)
class CommittedWithoutAVote(Elastic):
    """A member with all sums commits without a vote, so a death before the vote is noticed one step
    late.
    """

    def finish(self) -> None:
        try:
            super().finish()
        except PeerGone:
            if any(bucket.work is None for bucket in self.buckets):
                raise


@mutant("elastic_copies_numbered_as_before", says="owned more than once", **BACK)
class CopiesNumberedAsBefore(Elastic):
    """Copies are numbered by ranks of the previous group, and a joiner gets the same number."""

    def regroup(self, comm: Comm, reducer: Reducer) -> None:
        before = self.replica
        super().regroup(comm, reducer)
        self.replica = before


@mutant("elastic_counts_micro_batches_on", says="repeated without", zoo=("G07",), **DIES)
class CountsMicroBatchesOn(ReferenceElastic):
    """The accumulation counter of an abandoned step is not reset, so the next step reduces before
    its last micro-batch.
    """

    counted = 0

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        micro_batches, self.counted = batch.micro_batches[self.counted :], 0
        try:
            return super().step(replace(batch, windows=(tuple(micro_batches),)), observe)
        except PeerGone:
            self.counted = 1
            raise


@mutant(
    "elastic_rounds_by_chance",
    says="again does not hold",
    killed_by=("relations",),
    expect={"relation": "again"},
    **LEAVES,
)
class RoundsByChance(Elastic):
    """The last digits of gradients are rounded at random without a seed: equal on all members,
    different in every run.
    """

    def finish(self) -> None:
        super().finish()
        drawn = torch.tensor([*os.urandom(len(self.parameters))], dtype=torch.int32)
        self.comm.broadcast(drawn)
        for parameter, places in zip(self.parameters, drawn.tolist(), strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(1 + places * 2.0**-52)


@mutant(
    "elastic_residuals_lost_on_resize",
    says="residual@0' at step 1",
    options=TOPK,
    killed_by=KEPT,
    **LEAVES,
)
class ResidualsLostOnResize(ReferenceElastic):
    """A new group gets a new compressor with empty residuals."""

    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        self.reducer.load_pieces([])
        super().reconfigure(mesh, joined, left)


@mutant(
    "elastic_residual_leaves_as_well",
    says="residual@0' at step 1",
    options=TOPK,
    killed_by=KEPT,
    **LEAVES,
)
class ResidualLeavesAsWell(ReferenceElastic):
    """The residuals of a member are lost when it leaves in order."""

    def hand_over(self, left: Sequence[int]) -> None:
        super().hand_over(left)
        self.handed = []


@mutant(
    "elastic_residual_handed_to_all",
    says="residual@1' at step 1",
    options=TOPK,
    killed_by=KEPT,
    **LEAVES,
)
class ResidualHandedToAll(ReferenceElastic):
    """Every remaining member takes the residuals of the one that leaves, so they are sent several
    times.
    """

    def hand_over(self, left: Sequence[int]) -> None:
        super().hand_over(left)
        self.handed = self.mesh.comm("replicate").broadcast_object(self.handed)


@mutant(
    "elastic_residual_of_a_step_given_up",
    says="residual@0' at step 1",
    options=TOPK,
    killed_by=KEPT,
    **DIES,
)
class ResidualOfAStepGivenUp(ReferenceElastic):
    """Residuals of an abandoned step are added to those of its repetition."""

    def put_back(self, before: Moved) -> None:
        super().put_back(replace(before, kept=self.remember().kept))


@mutant(
    "elastic_joiner_owes_as_another",
    says="residual@1' at step 2",
    options=TOPK,
    killed_by=KEPT,
    **BACK,
)
class JoinerOwesAsAnother(ReferenceElastic):
    """A joiner copies the residuals of the member that synchronizes it, together with all other
    state.
    """

    def held(self) -> dict[str, Any]:
        return {**super().held(), "owed": self.reducer.pieces()}

    def take(self, state: Mapping[str, Any]) -> None:
        super().take(state)
        self.reducer.load_pieces(state["owed"])


@mutant(
    "elastic_alone_owes_for_ever",
    says="residual@0' at step 1",
    options=TOPK,
    killed_by=KEPT,
    membership={"1": (2,)},
)
class AloneOwesForEver(Owed):
    """The last remaining member adds its residuals to its gradients in every step."""

    def all_reduce(self, bucket: Bucket, comm: Comm) -> Work:
        kept = dict(self.feedback.residuals)
        work = super().all_reduce(bucket, comm)
        self.feedback.residuals = kept
        return work


@mutant("elastic_sums_twice_over_few", says="2 times as many", killed_by=("traffic",), **LEAVES)
class SumsTwiceOverFew(Elastic):
    """A smaller group sums all buckets a second time and discards the result."""

    def finish(self) -> None:
        super().finish()
        if self.comm.size < 3:
            for bucket in self.buckets:
                self.comm.all_reduce(bucket.flat.clone())
