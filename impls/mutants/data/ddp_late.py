"""Faults of data parallelism that show late, at some worlds only, or between steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.case import WorkloadSpec
from shardproof.comm import Comm
from shardproof.contract import Batch, Kind, Observe, OptimizerSpec, StepResult
from shardproof.impls.mutants.data.ddp import CNN_BUCKETS, mutant
from shardproof.impls.mutants.triggers import CLIP, Nothing, gpt
from shardproof.impls.reference.ddp import DDP, Options, ReferenceDDP
from shardproof.impls.reference.parts.buckets import GradientBucket
from shardproof.impls.reference.parts.reducers import Reducer, Work

CNN = WorkloadSpec("digits_cnn")
UNEQUAL_CNN = WorkloadSpec("digits_cnn", traits=("unequal_micro_batches",))
PENALTY = WorkloadSpec("digits_penalty", params={"channels": 4, "layers": 2})
WARMUP = OptimizerSpec(lr=0.1, warmup_steps=3)

# ------------------------------------------------------------------------- late, or on some ranks


@mutant(
    "ddp_last_bucket_lost_after_step_3",
    says="not (reduced|summed).*at step 3",
    killed_by=("equivalence", "replicas"),
    steps=5,
)
class LastBucketLostAfterStep3(DDP):
    """From step 3, the last bucket is not reduced."""

    done = 0

    def after_step(self) -> None:
        super().after_step()
        self.done += 1

    def reduce(self, bucket: GradientBucket) -> Work:
        # Runs that end after three steps cannot see it: the case has five.
        lost = self.done >= 3 and bucket is self.buckets[-1]
        return Nothing() if lost else super().reduce(bucket)


@mutant(
    "ddp_takes_the_first_backward_for_the_last",
    says="received a second gradient in one micro-batch",
    killed_by=("crash",),
    crash_says="received a second gradient in one micro-batch",
    workload=PENALTY,
)
class TakesTheFirstBackwardForTheLast(DDP):
    """A parameter without a gradient once a backward has passed the first block counts as unused,
    and its bucket is sent: with a gradient in the loss this happens during forward.
    """

    def __init__(
        self, module: nn.Module, comm: Comm, options: Options, reducer: Reducer | None = None
    ) -> None:
        super().__init__(module, comm, options, reducer)
        first = next(module.get_submodule("blocks").children())
        self.hooks.append(first.register_full_backward_hook(self.passed))

    def passed(self, *_: Any) -> None:
        if self.syncing:
            for bucket in self.buckets:
                bucket.missing.clear()
            self.launch_full_buckets()


@mutant(
    "ddp_keeps_what_was_frozen_once",
    says="thawed does not hold",
    killed_by=("relations",),
    expect={"relation": "thawed"},
)
class KeepsWhatWasFrozenOnce(DDP):
    """A parameter that an evaluation finds frozen is never reduced again after the first step."""

    def __init__(self, module: nn.Module, *given: Any) -> None:
        super().__init__(module, *given)
        self.frozen: set[int] = set()
        self.hooks.append(module.register_forward_pre_hook(self.look))

    def look(self, *_: Any) -> None:
        if self.learned:
            self.frozen |= {n for n, p in enumerate(self.parameters) if not p.requires_grad}

    def contribution(self, index: int) -> Tensor | None:
        return None if index in self.frozen else super().contribution(index)


@mutant(
    "ddp_fourth_rank_left_out",
    says="data coordinate 3 is missing",
    killed_by=("equivalence",),
    mesh={"replicate": 4},
)
class FourthRankLeftOut(DDP):
    """Rank 3 contributes zeros: wrong from 4 ranks on."""

    def contribution(self, index: int) -> Tensor | None:
        return None if self.comm.rank == 3 else super().contribution(index)


@mutant(
    "ddp_last_rank_skips_update_without_tokens",
    says="rank 2, no update was made",
    killed_by=("equivalence", "replicas"),
    workload=gpt("one_rank_without_tokens"),
    mesh={"replicate": 3},
)
class SkipsUpdateWithoutTokens(ReferenceDDP):
    """A rank without tokens skips its optimizer step."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        # For this step only: the rank takes part again in the next one.
        kept = self.optimizer.step
        if not sum(float(m.weights.sum()) for m in batch.micro_batches):
            self.optimizer.step = lambda *_: None  # type: ignore[method-assign,assignment]
        try:
            return super().step(batch, observe)
        finally:
            self.optimizer.step = kept  # type: ignore[method-assign]


@mutant(
    "ddp_ignores_warmup", says="update is 4 times", killed_by=("equivalence",), optimizer=WARMUP
)
class IgnoresWarmup(ReferenceDDP):
    """The learning rate is not warmed up."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.spec = replace(self.spec, warmup_steps=0)
        return super().make_optimizer()


@mutant(
    "ddp_drops_weight_decay",
    says="weight decay was left out",
    killed_by=("equivalence",),
    optimizer=OptimizerSpec(weight_decay=0.01),
)
class DropsWeightDecay(ReferenceDDP):
    """Weight decay is ignored."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.spec = replace(self.spec, weight_decay=0.0)
        return super().make_optimizer()


@mutant(
    "ddp_keeps_gradients_when_clipped",
    says="step before",
    killed_by=("equivalence",),
    optimizer=CLIP,
)
class KeepsGradientsWhenClipped(DDP):
    """Gradients are not cleared after a step that was clipped."""

    clipped = False

    def scale_gradients(self, factor: Tensor) -> None:
        super().scale_gradients(factor)
        self.clipped = bool(factor < 1)

    def after_step(self) -> None:
        kept = [p.grad for p in self.parameters]
        super().after_step()
        if self.clipped:
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient


@mutant(
    "ddp_stale_bucket_content",
    says="step before",
    killed_by=("equivalence",),
    workload=gpt("conditional_by_rank"),
    steps=3,
)
class StaleBucketContent(DDP):
    """A parameter unused on this rank keeps the bucket's content of the last step."""

    def launch(self, bucket: GradientBucket) -> None:
        # In place of ``pack``, which sets to zero what has no gradient.
        for index, view in bucket.views.items():
            own = self.contribution(index)
            if own is not None:
                view.copy_(own)
        bucket.work = self.reduce(bucket)
        self.launched += 1


@mutant(
    "ddp_unused_get_zero_gradients",
    says="unused.*oracle does not have",
    killed_by=("equivalence",),
    workload=gpt("unused"),
)
class UnusedGetZeroGradients(DDP):
    """A parameter that no rank used gets a zero gradient, which decays and counts a step."""

    def count(self, votes: Sequence[int]) -> None:
        kept = [p.grad for p in self.parameters]
        super().count(votes)
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = gradient


@mutant(
    "ddp_integer_buffers_stay",
    says="num_batches_tracked.*never sent",
    killed_by=("equivalence",),
    workload=UNEQUAL_CNN,
    options=CNN_BUCKETS,
)
class IntegerBuffersStay(DDP):
    """Integer buffers are not broadcast."""

    def buffers(self) -> dict[str, Tensor]:
        return {n: b for n, b in super().buffers().items() if b.is_floating_point()}


@mutant("ddp_gradients_as_integers", says="other data than floats", killed_by=("traffic",))
class GradientsAsIntegers(DDP):
    """Gradients are sent a second time, disguised as integers."""

    def finish(self) -> None:
        super().finish()
        for bucket in self.buckets:
            # Integers are control traffic to a ledger that goes by dtype alone.
            self.comm.all_reduce(bucket.flat.view(torch.int64).clone())


@mutant(
    "ddp_momentum_lost_at_step_3", says="empty optimizer state", killed_by=("equivalence",), steps=5
)
class MomentumReset(ReferenceDDP):
    """Optimizer state is thrown away before step 3."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        if batch.step == 3:
            # With plain SGD there would be nothing to lose.
            self.optimizer.state.clear()
        return super().step(batch, observe)


@mutant(
    "ddp_evaluates_in_training_mode",
    says="training mode|dropout",
    zoo=("O23",),
    killed_by=("equivalence",),
    workload=gpt("dropout_stateful"),
)
class EvaluatesInTrainingMode(ReferenceDDP):
    """Dropout stays active during evaluation."""

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor | None:
        shares = [self.loss(micro) for micro in batch.micro_batches]
        return torch.stack(shares).sum() if shares else torch.zeros(())


@mutant(
    "ddp_evaluation_updates_buffers",
    says="evaluation .*moved",
    killed_by=("equivalence",),
    workload=CNN,
    options=CNN_BUCKETS,
)
class EvaluationUpdatesBuffers(EvaluatesInTrainingMode):
    """Evaluation moves the running statistics."""

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor | None:
        value = super(EvaluatesInTrainingMode, self).evaluate(batch)
        super().evaluate(batch)
        return value


@mutant(
    "ddp_stays_in_evaluation_mode",
    says="loss in evaluation mode",
    killed_by=("equivalence",),
    workload=CNN,
    options=CNN_BUCKETS,
)
class StaysInEvaluationMode(ReferenceDDP):
    """After an evaluation, training continues in evaluation mode."""

    def evaluate(self, batch: Batch) -> Tensor | None:
        value = super().evaluate(batch)
        self.module.eval()
        return value


@mutant(
    "ddp_evaluates_a_kept_copy",
    says="parameters before the last update",
    killed_by=("equivalence",),
    steps=4,
)
class EvaluatesAKeptCopy(ReferenceDDP):
    """The first evaluation keeps a copy of the model, and the second one uses it."""

    copied: nn.Module | None = None

    def evaluate(self, batch: Batch) -> Tensor | None:
        self.copied = self.copied or copy.deepcopy(self.module)
        trained, self.module = self.module, self.copied
        value = super().evaluate(batch)
        self.module = trained
        return value


@mutant(
    "ddp_evaluates_mean_over_micro_batches",
    says="too small .*micro-batches|mean",
    killed_by=("equivalence",),
)
class EvaluatesMean(ReferenceDDP):
    """An evaluation is the mean of its micro-batches, not their weighted sum."""

    def evaluate(self, batch: Batch) -> Tensor | None:
        loss = super().evaluate(batch)
        assert loss is not None
        # A sum of one micro-batch would be its mean: the case has several.
        return loss / max(1, len(batch.micro_batches))


@mutant(
    "ddp_full_state_on_rank_0_only", says="full_state on rank 1.*lost", killed_by=("equivalence",)
)
class FullStateOnRank0Only(ReferenceDDP):
    """The gathered state is complete on rank 0 only."""

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        return super().full_state(kind) if self.mesh.rank == 0 else {}


@mutant("ddp_full_state_of_the_start", says="held after setup", killed_by=("equivalence",))
class FullStateOfTheStart(ReferenceDDP):
    """The gathered state is the state right after setup."""

    def setup(self, *arguments: Any) -> None:
        super().setup(*arguments)
        # Copies, or they would follow the update.
        self.start = super().full_state("parameters")

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        return self.start if kind == "parameters" else super().full_state(kind)


@mutant(
    "ddp_copies_buckets_by_address",
    says="bytes real, .* simulated",
    killed_by=("simulation",),
    weighed=True,
)
class CopiesBucketsByAddress(DDP):
    """A bucket that does not start at a page of memory is copied before it is sent, so the memory
    of a rank depends on addresses.
    """

    copies: tuple[Tensor, ...] = ()

    def reduce(self, bucket: GradientBucket) -> Work:
        if bucket.flat.data_ptr() % 4096:
            self.copies = (*self.copies[-1:], bucket.flat.clone())
        return super().reduce(bucket)
