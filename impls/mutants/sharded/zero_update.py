"""Faults of ZeRO-1 and ZeRO-2 after the gradients: clipping, parameter groups, state,
evaluation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Batch, Kind, Observe, OptimizerSpec, StepResult
from shardproof.impls.mutants.sharded.zero import mutant
from shardproof.impls.mutants.triggers import (
    ADAMW,
    BETWEEN,
    CLIP,
    GROUPS,
    deep_gpt,
    exchange_decays,
    gpt,
    spend_a_step,
)
from shardproof.impls.reference.engine.norm import EPSILON, NormPart
from shardproof.impls.reference.zero1 import ReferenceZero1, Zero1
from shardproof.impls.reference.zero2 import ReferenceZero2, Zero2


@mutant("zero2_averages_norms", says="averaged", zoo=("O07",), killed_by=("norm",), optimizer=CLIP)
class AveragesNorms(ReferenceZero2):
    """The norms of the shards are averaged."""

    def norm(self) -> Tensor:
        # Roots are not additive: the mean of roots is not the root of the sum.
        own = torch.stack([value for value, _ in self.handle.norm_parts()]).sum().sqrt()
        self.mesh.comm("shard").all_reduce(own)
        return own / self.mesh.world


@mutant(
    "zero1_reports_local_norm",
    says="holds itself",
    zoo=("O25",),
    killed_by=("norm",),
    optimizer=CLIP,
)
class ReportsLocalNorm(ReferenceZero1):
    """Clipping is right, but each rank reports the norm of its own shards."""

    def norm(self) -> Tensor:
        self.own = torch.stack([value for value, _ in self.handle.norm_parts()]).sum().sqrt()
        return super().norm()

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        return replace(super().step(batch, observe), norm=self.own)


@mutant(
    "zero2_norm_of_nothing",
    says="norm is 0|nothing was clipped",
    zoo=("O17",),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormOfNothing(Zero2):
    """Clipping reads the parameters' gradients, which have moved into shards."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        # Hooks have taken these gradients into buckets: the list is empty.
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        total = sum((g.double().norm() ** order for g in gradients), torch.zeros(()).double())
        return [(total, (self.comm.axis,))]


@mutant(
    "zero2_clips_on_rank_0_only",
    says="rank 1 does not clip",
    zoo=("O01",),
    killed_by=("equivalence",),
    optimizer=CLIP,
)
class ClipsOnRank0Only(ReferenceZero2):
    """The shards of ranks > 0 are not clipped."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        if self.mesh.rank == 0:
            super().clip(norm, max_norm)


@mutant(
    "zero2_clips_up",
    says="scaled up",
    killed_by=("equivalence",),
    optimizer=BETWEEN,
    workload=deep_gpt(),
    steps=3,
)
class ClipsUp(ReferenceZero2):
    """Gradients below the clip are scaled up to it."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        # Without the upper bound of 1.
        self.handle.scale_gradients(max_norm / (norm + EPSILON))


@mutant(
    "zero2_decay_to_wrong_group",
    says="decay of another parameter group",
    zoo=("O19",),
    killed_by=("equivalence",),
    workload=gpt("two_groups"),
    optimizer=GROUPS,
)
class DecayToWrongGroup(Zero2):
    """Two parameter groups exchange their weight decay."""

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        groups = super().param_groups(spec)
        exchange_decays(groups)
        return groups


@mutant(
    "zero2_group_order_by_rank",
    says="decay of another parameter group",
    zoo=("O20",),
    killed_by=("equivalence",),
    workload=gpt("two_groups"),
    optimizer=GROUPS,
)
class GroupOrderByRank(Zero2):
    """One rank reorders its groups, and hyperparameters are assigned by position."""

    def param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        groups = super().param_groups(spec)
        # On one rank: the others' shards are right, so two thirds of the elements agree.
        if self.comm.rank == 2:
            exchange_decays(groups)
        return groups


@mutant(
    "zero1_dummy_first_step",
    says="update with gradients of zero .*before the first step",
    zoo=("O26",),
    killed_by=("equivalence",),
    optimizer=ADAMW,
)
class DummyFirstStep(ReferenceZero1):
    """A step with zero gradients creates the optimizer state; it counts and applies decay."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        spend_a_step(optimizer, self.updated)
        return optimizer


@mutant("zero1_updates_gathered_values", says="no update was made", killed_by=("equivalence",))
class UpdatesGatheredValues(ReferenceZero1):
    """One rank's update is made on a copy and never reaches the shard that it gathers."""

    def update(self) -> None:
        before = [tensor.detach().clone() for tensor in self.updated]
        super().update()
        if self.mesh.rank == 2:
            for tensor, value in zip(self.updated, before, strict=True):
                # Optimizer state has moved on, parameters have not.
                tensor.detach().copy_(value)


@mutant(
    "zero1_full_state_of_own_shard",
    says="full_state on rank 1 .*held after setup",
    killed_by=("equivalence",),
)
class FullStateOfOwnShard(ReferenceZero1):
    """The gathered parameters are right in this rank's shards only."""

    def setup(self, *arguments: Any) -> None:
        super().setup(*arguments)
        self.start = super().full_state("parameters")

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        whole = super().full_state(kind)
        if kind == "parameters" and self.mesh.rank > 0:
            name = next(iter(self.start))
            # One tensor, and not on rank 0, where most people look.
            whole[name] = self.start[name]
        return whole


@mutant(
    "zero1_evaluates_before_gather",
    says="no update was made",
    killed_by=("equivalence", "replicas"),
)
class EvaluatesBeforeGather(Zero1):
    """Parameters are gathered in the next step, so an evaluation in between uses old ones."""

    def after_update(self) -> None:
        pass

    def before_step(self, micro_batches: int) -> None:
        # The update of the last step reaches the others only now.
        super().after_update()
        super().before_step(micro_batches)


@mutant(
    "zero1_idle_rank_does_not_update",
    says="no update was made",
    zoo=("F04",),
    killed_by=("equivalence",),
    workload=replace(gpt(micro_batches=1), global_batch=2),
)
class IdleRankDoesNotUpdate(ReferenceZero1):
    """A rank that has no micro-batch in a step leaves its shards as they are."""

    def update(self) -> None:
        # ``used`` is what this rank's own backwards touched, though its shards hold everybody's
        # sums.
        if self.handle.used:  # type: ignore[attr-defined]
            super().update()


@mutant(
    "zero2_drops_in_evaluation",
    says="training mode",
    zoo=("O23",),
    killed_by=("equivalence",),
    workload=gpt("dropout_counter"),
)
class DropsInEvaluation(ReferenceZero2):
    """Dropout stays active during evaluation."""

    def evaluate(self, batch: Batch) -> Tensor | None:
        for part in self.module.modules():
            if "Dropout" in type(part).__name__:
                # Set on the instance, where ``eval()`` finds it before the class's own.
                vars(part)["train"] = lambda mode=True: None
        return super().evaluate(batch)


@mutant(
    "zero2_decays_unused_in_windows",
    says="conditional_late_step",
    killed_by=("equivalence",),
    workload=gpt("conditional_late_step", windows=2),
    optimizer=OptimizerSpec(weight_decay=0.1),
)
class DecaysUnusedInWindows(ReferenceZero2):
    """With several windows in a step, weight decay also applies to unused parameters."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        self.windows = len(batch.windows)
        return super().step(batch, observe)

    @torch.no_grad()
    def update(self) -> None:
        super().update()
        for group in self.optimizer.param_groups if self.windows > 1 else ():
            for unused in (p for p in group["params"] if p.grad is None):
                unused.mul_(1 - group["lr"] * group["weight_decay"])


# --------------------------------------------------------------- shares that come into use late

#: In step 0 the head alone has a gradient: with one bucket, shares of one rank only.
LATE_SHARES = gpt(first_step="head")


@mutant(
    "zero1_returns_early_without_gradients",
    says="rank 0 calls all_gather.*ranks 1-2 call reduce_scatter",
    killed_by=("crash",),
    crash_says="does not match",
    workload=LATE_SHARES,
    options={},
)
class ReturnsEarlyWithoutGradients(Zero1):
    """A rank whose shares all lack gradients returns before parameters are gathered."""

    def after_update(self) -> None:
        if self.gradients():
            super().after_update()


@mutant(
    "zero1_late_shares_count_all_steps",
    says="step 1, replayed update of parameters",
    killed_by=("equivalence",),
    workload=LATE_SHARES,
    optimizer=ADAMW,
    options={},
)
class LateSharesCountAllSteps(ReferenceZero1):
    """Adam's step counter of a share that is first used late includes the steps before."""

    made = 0

    def update(self) -> None:
        for tensor in self.updated:
            state = self.optimizer.state[tensor]
            if tensor.grad is not None and not state:
                state["step"] = torch.tensor(float(self.made))
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(tensor) for _ in "mv")
        self.made += 1
        super().update()
