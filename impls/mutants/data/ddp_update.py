"""Faults of data parallelism after the gradients: norm, clipping, update; and order over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Batch, GroupSpec, Observe, OptimizerSpec, StepResult
from shardproof.impls.mutants.data.ddp import BETWEEN, CLIP, gpt, mutant
from shardproof.impls.reference.ddp import DDP, ReferenceDDP
from shardproof.impls.reference.engine.norm import NormPart, power_sum
from shardproof.impls.reference.parts.buckets import GradientBucket

# -------------------------------------------------------------------------------- norm and update


def local_parts(handle: DDP, bucket: GradientBucket) -> list[NormPart]:
    """Sums of squares of what the members of ``bucket`` have for a gradient now."""
    gradients = (handle.parameters[index].grad for index in bucket.members)
    return [(power_sum(gradient), ()) for gradient in gradients if gradient is not None]


@mutant(
    "ddp_norm_of_local_gradients",
    zoo=("O02",),
    summary="the norm is that of this rank's own gradients",
    killed_by=("norm", "replicas"),
    optimizer=CLIP,
)
class NormOfLocalGradients(DDP):
    def start_step(self) -> None:
        super().start_step()
        self.own: list[NormPart] = []

    def launch(self, bucket: GradientBucket) -> None:
        # Before the launch: from then on the gradients are being summed.
        self.own += local_parts(self, bucket)
        super().launch(bucket)

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return self.own


@mutant(
    "ddp_norm_before_last_bucket",
    zoo=("O08",),
    summary="the norm is taken before the last bucket has landed",
    killed_by=("norm", "replicas"),
    optimizer=CLIP,
)
class NormBeforeLastBucket(DDP):
    def launch(self, bucket: GradientBucket) -> None:
        self.early = local_parts(self, bucket)  # the last one stays
        super().launch(bucket)

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        # All but the last are summed; of the last one there is what it was at launch.
        landed = self.buckets[:-1]
        return [part for bucket in landed for part in local_parts(self, bucket)] + self.early


@mutant(
    "ddp_clips_on_rank_0_only",
    zoo=("O01",),
    summary="clipping is skipped on ranks > 0",
    killed_by=("equivalence", "replicas"),
    optimizer=CLIP,
)
class ClipsOnRank0Only(ReferenceDDP):
    def clip(self, norm: Tensor, max_norm: float) -> None:
        if self.mesh.rank == 0:
            super().clip(norm, max_norm)


@mutant(
    "ddp_clips_up",
    summary="gradients below the clip are scaled up to it",
    killed_by=("equivalence",),
    optimizer=BETWEEN,
)
class ClipsUp(ReferenceDDP):
    def clip(self, norm: Tensor, max_norm: float) -> None:
        self.scale_gradients(max_norm / norm)


@mutant(
    "ddp_decay_to_wrong_group",
    zoo=("O19",),
    summary="two parameter groups exchange their weight decay",
    killed_by=("equivalence",),
    workload=gpt("two_groups"),
    optimizer=OptimizerSpec(
        "adamw",
        lr=0.003,
        weight_decay=0.01,
        groups=(GroupSpec(r"(bias|norm[^.]*\.weight)$", lr_scale=0.5, weight_decay=0.05),),
    ),
)
class DecayToWrongGroup(DDP):
    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        groups = super().param_groups(spec)
        decays = [group["weight_decay"] for group in groups]
        for group, decay in zip(groups, reversed(decays), strict=True):
            group["weight_decay"] = decay
        return groups


@mutant(
    "ddp_dummy_first_step",
    zoo=("O26",),
    summary="optimizer state is made by a step with zero gradients, which counts and decays",
    killed_by=("equivalence",),
    optimizer=OptimizerSpec("adamw", lr=0.003, weight_decay=0.1),
)
class DummyFirstStep(ReferenceDDP):
    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        # Too late: the step has counted and decayed.
        optimizer.zero_grad()
        return optimizer


# ---------------------------------------------------------------------------- who calls what when


@mutant(
    "ddp_bucket_order_by_rank",
    zoo=("X01",),
    summary="ranks launch their buckets in different orders, of different sizes",
    killed_by=("crash",),
    crash_says="does not match",
)
class BucketOrderByRank(DDP):
    def lay_out(self) -> None:
        super().lay_out()
        if self.comm.rank == 1:
            # Sizes differ, so the backend can tell: a crash and not wrong sums.
            self.buckets.reverse()


@mutant(
    "ddp_exchanges_equal_buckets",
    zoo=("X05",),
    summary="one rank launches two buckets of equal size in the other order: wrong sums, no error",
    killed_by=("equivalence",),
)
class ExchangesEqualBuckets(DDP):
    def lay_out(self) -> None:
        super().lay_out()
        sizes = [bucket.flat.numel() for bucket in self.buckets]
        # Equal sizes, so that no backend can tell the exchange.
        twins = [i for i, size in enumerate(sizes) if sizes.count(size) > 1]
        if self.comm.rank == 1 and twins:
            first, second = twins[0], sizes.index(sizes[twins[0]], twins[0] + 1)
            self.buckets[first], self.buckets[second] = self.buckets[second], self.buckets[first]


@mutant(
    "ddp_swallows_exception",
    zoo=("X10",),
    summary="rank 1 fails in step 1, swallows the error and goes on to the next step",
    killed_by=("crash",),
    crash_says="rank 1 early",
)
class SwallowsException(ReferenceDDP):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        try:
            if (self.mesh.rank, batch.step) == (1, 1):
                raise ArithmeticError("a planted failure")
            return super().step(batch, observe)
        except ArithmeticError:
            observe("gradients_final")
            observe("after_update")
            return StepResult(torch.zeros(()))
