"""Faults of mixed precision, of masters and of loss scaling, in ZeRO and in data parallelism.

Policies are judged in the lane working_precision, loss scaling in fp64: an overflow is
planted there as well.
A sum that is rounded to bf16 needs fp32 parameters to show: bf16 gradients are coarser than it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Point,
    ScalerSpec,
    StepResult,
)
from shardproof.impls.mutants.sharded.zero import mutant
from shardproof.impls.mutants.triggers import overflows_here
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.masters import Masters
from shardproof.impls.reference.engine.scaler import LossScaler
from shardproof.impls.reference.parts.owned_bucket import OwnedBucket
from shardproof.impls.reference.zero1 import ReferenceZero1, Zero1
from shardproof.impls.reference.zero2 import ReferenceZero2, Zero2
from shardproof.impls.reference.zero3 import ReferenceZero3, Zero3

SMALL: Mapping[str, Any] = {"layers": 2, "width": 16}
BUCKETS: Mapping[str, Any] = {"bucket_bytes": 8 * 1024}
ADAMW = OptimizerSpec("adamw", lr=0.003)

#: bf16 to compute with and to gather, fp32 to sum and to update.
WIDE: Mapping[str, Any] = {
    "workload": WorkloadSpec("charnames_gpt", params=SMALL, micro_batches=4),
    "optimizer": ADAMW,
    "options": BUCKETS,
    "lane": "working_precision",
    "dtype": "float32",
    "precision": {"parameters": "bfloat16", "reduce": "float32"},
}
#: An overflow in step 1 and NaN in step 4, on one rank.
SCALED: Mapping[str, Any] = {
    "workload": WorkloadSpec("charnames_gpt", traits=("overflow_on_one_rank",), params=SMALL),
    "optimizer": replace(ADAMW, scaler=ScalerSpec(initial=1024, interval=2)),
    "options": BUCKETS,
    "steps": 5,
}
#: All in one bucket: what overflows, registered first, lies in the last rank's shard alone.
ALONE: Mapping[str, Any] = {**SCALED, "options": {}}
#: No overflow, but clipping.
CLIPPED: Mapping[str, Any] = {
    "workload": WorkloadSpec("charnames_gpt", params=SMALL),
    "optimizer": OptimizerSpec(clip_norm=0.05, scaler=ScalerSpec(initial=1024, interval=2)),
}

# --------------------------------------------------------------------------- masters and policies


@mutant("zero1_truncates_masters", says="master|rounded", killed_by=("equivalence",), **WIDE)
class TruncatesMasters(Masters):
    """The lower half of an fp32 master is truncated instead of rounded."""

    @torch.no_grad()
    def copy_up(self) -> None:
        for working, master in self.pairs.values():
            # bf16 is the upper half of fp32: cutting the lower one rounds towards zero.
            working.copy_(master.view(torch.int32).bitwise_and(-65536).view(torch.float32))
            master.grad = None


@mutant(
    "zero1_rounds_clip_factor",
    says="clipped by the factor .* more than rounding in float32 explains",
    killed_by=("equivalence",),
    **{**WIDE, "optimizer": replace(ADAMW, clip_norm=0.05)},
)
class RoundsClipFactor(Masters):
    """The clip factor is rounded to bf16, the dtype of the parameters, before it meets fp32."""

    def scale_gradients(self, factor: Tensor) -> None:
        super().scale_gradients(factor.bfloat16().to(factor.dtype))


@mutant(
    "zero2_clips_below_limit_in_bf16",
    says="clipped by the factor .* more than rounding in bfloat16 explains",
    killed_by=("equivalence",),
    workload=WIDE["workload"],
    optimizer=replace(ADAMW, clip_norm=0.05),
    options=BUCKETS,
    lane="working_precision",
    dtype="bfloat16",
)
class ClipsBelowLimitInBf16(ReferenceZero2):
    """In bf16 the norm is enlarged by 1 % of itself, so all gradients are 1 % too small."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        narrow = self.built[next(iter(self.built))] == torch.bfloat16
        super().clip(norm * 1.01 if narrow else norm, max_norm)


@mutant(
    "zero1_masters_from_working_copies",
    says="rounded|master",
    zoo=("O14",),
    killed_by=("equivalence",),
    **WIDE,
)
class MastersFromWorkingCopies(ReferenceZero1):
    """Every update starts from the rounded parameter: small steps are lost."""

    @torch.no_grad()
    def update(self) -> None:
        for working, master in self.masters.pairs.values():  # type: ignore[union-attr]
            # The master forgets what the rounded parameter cannot hold.
            master.copy_(working)
        with torch.enable_grad():
            super().update()


@mutant(
    "zero1_updates_narrow_parameters",
    says="no rank holds .*master",
    zoo=("O14",),
    killed_by=("memory", "equivalence"),
    **{**WIDE, "precision": {"parameters": "bfloat16"}},
)
class UpdatesNarrowParameters(ReferenceZero1):
    """There are no masters: the optimizer works on bf16 shards."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.built = dict.fromkeys(self.built, torch.bfloat16)
        return super().make_optimizer()


@mutant(
    "zero1_keeps_wide_gradients",
    says="after_update: activations and temporaries: .* held",
    killed_by=("memory",),
    **{**WIDE, "precision": {"parameters": "bfloat16"}},
)
class KeepsWideGradients(ReferenceZero1):
    """The masters' gradients are not freed after the update."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        optimizer.register_step_post_hook(self.keep)
        return optimizer

    def keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.kept = [p.grad for group in optimizer.param_groups for p in group["params"]]


@mutant(
    "zero2_accumulates_in_bf16",
    says="bfloat16",
    zoo=("O13",),
    killed_by=("equivalence",),
    **{**WIDE, "precision": {"reduce": "float32"}},
)
class AccumulatesInBf16(Zero2):
    """Sums of micro-batches are rounded to bf16, although fp32 is requested."""

    def wait_and_accumulate(self) -> None:
        super().wait_and_accumulate()
        for kept in self.kept.values():
            # After every wait, hence once for each micro-batch and bucket.
            kept.copy_(kept.bfloat16())


@mutant(
    "zero1_reduces_narrow",
    says="reduce_scatter: .* narrower",
    zoo=("H13",),
    killed_by=("traffic",),
    **WIDE,
)
class ReducesNarrow(Zero1):
    """Gradients are summed over ranks in bf16, although fp32 is requested."""

    def send(self, bucket: OwnedBucket) -> None:
        # By hand, past the reducer: half of the bytes that the policy promises.
        narrow = bucket.complete().bfloat16()
        shard = bucket.layout.shard(narrow, self.comm.rank)
        self.comm.reduce_scatter(shard, narrow)
        bucket.own_gradients().copy_(shard)


@mutant(
    "zero1_reduces_other_copy",
    says="not (reduced|summed)|data coordinate 2 is missing",
    zoo=("F11",),
    killed_by=("equivalence",),
    **WIDE,
)
class ReducesOtherCopy(Zero1):
    """A wide copy is made before the gradients are reduced, so the copy stays local."""

    def send(self, bucket: OwnedBucket) -> None:
        # Taken before the reduction and put back after it.
        wide = bucket.complete().clone()
        super().send(bucket)
        bucket.work.wait()  # type: ignore[union-attr]
        bucket.flat().copy_(wide)


@mutant("zero1_gathers_wide", says="all_gather: .* wider", killed_by=("traffic",), **WIDE)
class GathersWide(Zero1):
    """Parameters are gathered in fp32, although compute is in bf16: twice the bytes."""

    def after_update(self) -> None:
        for bucket in self.buckets:
            own = bucket.parameters.shard.float()
            # What is gathered is rounded afterwards, so the numbers are right.
            wide = torch.empty_like(bucket.parameters.flat, dtype=own.dtype)
            self.comm.all_gather(wide, own)
            bucket.parameters.flat.copy_(wide)


#: Every part of a policy, with a buffer of floating point.
POLICY: Mapping[str, Any] = {
    **WIDE,
    "workload": WorkloadSpec("charnames_gpt", traits=("rebound_buffer",), params=SMALL),
    "precision": {**WIDE["precision"], "output": "float32", "buffers": "bfloat16"},
}


@mutant(
    "zero1_buffers_as_built",
    says="buffer .* float32, precision.buffers asks for bfloat16",
    killed_by=("active",),
    **POLICY,
)
class BuffersAsBuilt(ReferenceZero1):
    """The policy's dtype of buffers is ignored."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        # The parent has cast them already: back to what was built.
        replace(self.precision, buffers=torch.float32).cast_buffers(module)
        return super().transform(module, mesh, options)


@mutant("zero1_outputs_as_computed", says="outputs in bfloat16", killed_by=("active",), **POLICY)
class OutputsAsComputed(ReferenceZero1):
    """The policy's dtype of outputs is ignored: the loss is computed in bf16."""

    def loss(self, micro: MicroBatch) -> Tensor:
        # Forward still computes in bf16; only the cast of its result is gone.
        self.precision = replace(self.precision, output=None)
        return super().loss(micro)


# ------------------------------------------------------------------------------------ loss scaling


@mutant(
    "zero1_overflow_of_own_shard",
    says="rank 0: it made the update, the oracle did not",
    zoo=("O10",),
    killed_by=("loss_scale", "equivalence"),
    **ALONE,
)
class OverflowOfOwnShard(LossScaler):
    """A rank skips the update only on an overflow in its own shard."""

    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        # No agreement: other ranks go on where this one skips.
        return overflows_here(gradients)


@mutant(
    "zero2_scale_of_own_shard",
    says="its scale was 1024, the oracle's 512",
    parent=ReferenceZero2,
    zoo=("O11",),
    killed_by=("loss_scale",),
    **ALONE,
)
class ScaleOfOwnShard(LossScaler):
    """All ranks skip together, but only those that saw the overflow lower their scale."""

    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        held = list(gradients)
        self.own = overflows_here(held)
        return super().overflowed(held)

    def adapt(self, skipped: bool) -> None:
        if self.own or not skipped:
            super().adapt(skipped)


@mutant(
    "zero2_backs_off_by_growth",
    says="its scale was 512, the oracle's 256",
    parent=ReferenceZero2,
    killed_by=("loss_scale",),
    **{**SCALED, "optimizer": replace(ADAMW, scaler=ScalerSpec(1024, backoff=0.25, interval=2))},
)
class BacksOffByGrowth(LossScaler):
    """The scale is divided by the growth factor instead of the backoff factor."""

    def adapt(self, skipped: bool) -> None:
        before = self.scale
        super().adapt(skipped)
        if skipped:
            self.scale = before / self.spec.growth


@mutant(
    "zero1_ignores_overflow",
    says="made the update, the oracle did not",
    killed_by=("loss_scale", "equivalence"),
    **SCALED,
)
class IgnoresOverflow(LossScaler):
    """Overflows are not detected."""

    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        return False


@mutant(
    "zero2_overflow_is_infinite",
    says="made the update, the oracle did not",
    parent=ReferenceZero2,
    killed_by=("loss_scale", "equivalence"),
    **SCALED,
)
class OverflowIsInfinite(LossScaler):
    """Only infinities count as overflow; NaN passes for a gradient."""

    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        finite = (None if g is None else g.masked_fill(g.isnan(), 0) for g in gradients)
        return super().overflowed(finite)


@mutant(
    "zero2_scale_never_grows",
    says="its scale was 512, the oracle's 1024",
    parent=ReferenceZero2,
    killed_by=("loss_scale",),
    **SCALED,
)
class ScaleNeverGrows(LossScaler):
    """The scale is lowered after an overflow and never raised again."""

    def adapt(self, skipped: bool) -> None:
        if skipped:
            super().adapt(skipped)


@mutant(
    "zero2_scale_grows_early",
    says="its scale was 1024, the oracle's 512",
    parent=ReferenceZero2,
    killed_by=("loss_scale",),
    **SCALED,
)
class ScaleGrowsEarly(LossScaler):
    """An overflow does not restart the count of good steps."""

    def adapt(self, skipped: bool) -> None:
        good = self.good
        super().adapt(skipped)
        self.good = good if skipped else self.good


@mutant(
    "zero1_skipped_step_counts",
    says="step' changed in step 1, which overflowed",
    killed_by=("loss_scale", "equivalence"),
    **SCALED,
)
class SkippedStepCounts(ReferenceZero1):
    """A skipped step moves Adam's counters."""

    def unscale(self) -> dict[str, float]:
        metrics = super().unscale()
        for state in self.optimizer.state.values():
            # 1 for a skipped step, 0 otherwise.
            state["step"] += metrics["skipped"]
        return metrics


@mutant(
    "zero1_skipped_step_decays_moments",
    says="gradients of zero|changed in step 1, which overflowed",
    killed_by=("loss_scale", "equivalence"),
    **SCALED,
)
class SkippedStepDecaysMoments(ReferenceZero1):
    """A skipped step is an update with gradients of zero."""

    def unscale(self) -> dict[str, float]:
        metrics = super().unscale()
        if metrics["skipped"]:
            for tensor in self.updated:
                # A gradient of zero is not the same as none: moments decay.
                tensor.grad = torch.zeros_like(tensor)
            self.update()
        return metrics


@mutant(
    "zero2_gradients_keep_scale",
    says="1024 times too large .*loss scale",
    killed_by=("equivalence",),
    **SCALED,
)
class GradientsKeepScale(ReferenceZero2):
    """Gradients are not divided by the scale, which Adam hides."""

    def scale_gradients(self, factor: Tensor) -> None:
        pass


@mutant(
    "zero2_unscales_twice",
    says="1024 times too small .*loss scale",
    killed_by=("equivalence",),
    **SCALED,
)
class UnscalesTwice(ReferenceZero2):
    """Gradients are divided by the scale twice."""

    def scale_gradients(self, factor: Tensor) -> None:
        super().scale_gradients(factor**2)


@mutant(
    "zero2_clips_scaled_norm", says="loss scale", killed_by=("norm",), options=BUCKETS, **CLIPPED
)
class ClipsScaledNorm(ReferenceZero2):
    """Clipping uses the norm of the scaled gradients."""

    def norm(self) -> Tensor:
        return super().norm() * self.scaler.scale  # type: ignore[union-attr]


@mutant(
    "zero2_reports_scaled_loss",
    says="loss is 1024 times too large .*loss scale",
    killed_by=("equivalence",),
    options=BUCKETS,
    **CLIPPED,
)
class ReportsScaledLoss(ReferenceZero2):
    """The reported loss keeps the scale."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        result = super().step(batch, observe)
        assert result.loss is not None
        return replace(result, loss=torch.as_tensor(result.loss * result.metrics["scale"]))


@mutant(
    "zero2_norm_of_scaled_gradients",
    says="norm",
    killed_by=("norm", "equivalence"),
    workload=CLIPPED["workload"],
    optimizer=replace(CLIPPED["optimizer"], scaler=ScalerSpec(2.0**1000)),
)
class NormOfScaledGradients(ReferenceZero2):
    """The norm is computed from scaled gradients and then divided; near the largest scale the
    squares overflow.
    """

    def unscale(self) -> dict[str, float]:
        assert self.scaler is not None
        self.before = super().norm() / self.scaler.scale
        return super().unscale()

    def norm(self) -> Tensor:
        return self.before


@mutant(
    "zero3_use_outlives_skip",
    says="gradients of zero|which the oracle does not have",
    killed_by=("equivalence",),
    parent=ReferenceZero3,
    options={},
    workload=WorkloadSpec("charnames_gpt", traits=("conditional_early_step",), params=SMALL),
    optimizer=replace(ADAMW, scaler=ScalerSpec(initial=2.0**34, backoff=2.0**-24, interval=2)),
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "float16"},
    steps=3,
)
class UseOutlivesSkip(ReferenceZero3):
    """A parameter used in a skipped step counts as used in the next one and gets a zero
    gradient.
    """

    handle: Zero3

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        used: set[str] = set()

        def look(point: Point) -> None:
            used.update(self.handle.used)
            observe(point)

        result = super().step(batch, look)
        if result.metrics["skipped"]:
            self.handle.used |= used
        return result
