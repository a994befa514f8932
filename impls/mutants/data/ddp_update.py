"""Faults of data parallelism after the gradients: norm, clipping, update, and order over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Batch, Observe, OptimizerSpec, StepResult
from shardproof.impls.mutants.data.ddp import mutant
from shardproof.impls.mutants.triggers import (
    ADAMW,
    BETWEEN,
    CLIP,
    GROUPS,
    deep_gpt,
    exchange_decays,
    exchange_equal,
    gpt,
    spend_a_step,
    whole_gpt,
)
from shardproof.impls.reference.ddp import DDP, ReferenceDDP
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import EPSILON, NormPart, power_sum
from shardproof.impls.reference.parts.buckets import GradientBucket

# -------------------------------------------------------------------------------- norm and update


def local_parts(handle: DDP, bucket: GradientBucket) -> list[NormPart]:
    """Sums of squares of the current gradients of the members of ``bucket``."""
    gradients = (handle.parameters[index].grad for index in bucket.members)
    return [(power_sum(gradient), ()) for gradient in gradients if gradient is not None]


@mutant(
    "ddp_norm_of_local_gradients",
    says="own gradients: not yet reduced",
    zoo=("O02",),
    killed_by=("norm", "replicas"),
    optimizer=CLIP,
)
class NormOfLocalGradients(DDP):
    """The norm is computed from this rank's own gradients."""

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
    says="before the gradients of .* were reduced",
    zoo=("O08",),
    killed_by=("norm", "replicas"),
    optimizer=CLIP,
)
class NormBeforeLastBucket(DDP):
    """The norm is computed before the last bucket has arrived."""

    def launch(self, bucket: GradientBucket) -> None:
        self.early = local_parts(self, bucket)  # the last one stays
        super().launch(bucket)

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        # All but the last are summed; of the last one there is what it was at launch.
        landed = self.buckets[:-1]
        return [part for bucket in landed for part in local_parts(self, bucket)] + self.early


@mutant(
    "ddp_clips_on_rank_0_only",
    says="rank 1 does not clip",
    zoo=("O01",),
    killed_by=("equivalence", "replicas"),
    optimizer=CLIP,
)
class ClipsOnRank0Only(ReferenceDDP):
    """Clipping is skipped on ranks > 0."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        if self.mesh.rank == 0:
            super().clip(norm, max_norm)


@mutant(
    "ddp_clips_up",
    says="scaled up",
    killed_by=("equivalence",),
    optimizer=BETWEEN,
    workload=deep_gpt(),
    steps=3,
)
class ClipsUp(ReferenceDDP):
    """Gradients below the clip are scaled up to it."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        self.scale_gradients(max_norm / (norm + EPSILON))


@mutant(
    "ddp_decay_to_wrong_group",
    says="decay of another parameter group",
    zoo=("O19",),
    killed_by=("equivalence",),
    workload=gpt("two_groups"),
    optimizer=GROUPS,
)
class DecayToWrongGroup(DDP):
    """Two parameter groups exchange their weight decay."""

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        groups = super().param_groups(spec)
        exchange_decays(groups)
        return groups


@mutant(
    "ddp_dummy_first_step",
    says="update with gradients of zero .*before the first step",
    zoo=("O26",),
    killed_by=("equivalence",),
    optimizer=ADAMW,
)
class DummyFirstStep(ReferenceDDP):
    """A step with zero gradients creates the optimizer state; it counts and applies decay."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        spend_a_step(optimizer, self.module.parameters())
        return optimizer


# ---------------------------------------------------------------------------- who calls what when


@mutant(
    "ddp_bucket_order_by_rank",
    says="rank 0 calls all_reduce.*rank 1 calls all_reduce",
    zoo=("X01",),
    killed_by=("crash",),
    crash_says="does not match",
)
class BucketOrderByRank(DDP):
    """Ranks launch their buckets in different orders, of different sizes."""

    def lay_out(self) -> None:
        super().lay_out()
        if self.comm.rank == 1:
            # Sizes differ, so the backend can tell: a crash and not wrong sums.
            self.buckets.reverse()


@mutant(
    "ddp_exchanges_equal_buckets",
    says="'blocks.1.mlp.up.bias' contains a rank's gradient of 'blocks.2.mlp.up.bias'",
    zoo=("X05",),
    killed_by=("equivalence",),
    workload=whole_gpt(),
)
class ExchangesEqualBuckets(DDP):
    """One rank launches two buckets of equal size in swapped order: wrong sums and no error."""

    def lay_out(self) -> None:
        super().lay_out()
        sizes = [bucket.flat.numel() for bucket in self.buckets]
        if self.comm.rank == 1:
            exchange_equal(self.buckets, sizes)


@mutant(
    "ddp_swallows_exception",
    says="rank 1 early|without joining",
    zoo=("X10",),
    killed_by=("crash",),
    crash_says="rank 1 early",
)
class SwallowsException(ReferenceDDP):
    """Rank 1 fails in step 1, swallows the error and continues with the next step."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        try:
            if (self.mesh.rank, batch.step) == (1, 1):
                raise ArithmeticError("a planted failure")
            return super().step(batch, observe)
        except ArithmeticError:
            observe("gradients_final")
            observe("after_update")
            return StepResult(torch.zeros(()))


@mutant(
    "ddp_members_alone_make_group",
    says=r"rank 2 did not call Mesh.subgroup\(\[0, 1\]\): it waits in",
    zoo=("X08",),
    killed_by=("crash",),
    crash_says="rank 2 did not call Mesh.subgroup",
    mesh={"replicate": 3},
)
class MembersAloneMakeGroup(ReferenceDDP):
    """Only its members create a sub-group; the last rank proceeds to its first broadcast."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        if mesh.rank < 2:
            mesh.subgroup([0, 1])
        return super().transform(module, mesh, options)
