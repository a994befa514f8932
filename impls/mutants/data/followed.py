"""Faults of state that follows training: averages of parameters, and a schedule of weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.case import CheckpointPlan
from shardproof.contract import (
    Batch,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    ScalerSpec,
    StepResult,
)
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import gpt
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.engine.averages import Averages
from shardproof.impls.reference.engine.optimizer import set_weight_decay
from shardproof.impls.reference.fsdp import ReferenceFSDP

AVERAGE: Mapping[str, Any] = {"average": 0.9}
SHARDED: Mapping[str, int] = {"shard": 2}
DECAY = OptimizerSpec(weight_decay=0.1)

mutant = declare.family(
    ReferenceDDP,
    ReferenceFSDP,
    killed_by=("equivalence",),
    workload=gpt(),
    options=AVERAGE,
    steps=3,
)


@mutant("average_never_moves", says="was not updated", parent=ReferenceFSDP, mesh=SHARDED)
class NeverMoves(Averages):
    """The average is written into a temporary copy and never changes."""

    def update(self) -> None:
        kept = {name: own.clone() for name, own in self.averages.items()}
        super().update()
        self.averages.update(kept)


@mutant("average_before_the_update", says="from the parameters before the update")
class BeforeTheUpdate(ReferenceDDP):
    """The average takes the parameters before the optimizer's step."""

    def update(self) -> None:
        assert self.averages is not None
        averages, self.averages = self.averages, None
        averages.update()
        super().update()
        self.averages = averages


@mutant(
    "average_moves_when_skipped",
    says="average",
    workload=gpt("overflow_on_one_rank"),
    optimizer=OptimizerSpec(scaler=ScalerSpec(initial=1024, interval=2)),
)
class MovesWhenSkipped(ReferenceDDP):
    """A skipped update moves the average all the same."""

    def unscale(self) -> dict[str, float]:
        metrics = super().unscale()
        if metrics["skipped"]:
            assert self.averages is not None
            self.averages.update()
        return metrics


@mutant(
    "average_restarts_elsewhere",
    says="average",
    parent=ReferenceFSDP,
    killed_by=("checkpoint",),
    mesh={"shard": 3},
    checkpoint=CheckpointPlan(save_at=2, into={"mesh": {"shard": 2}}),
)
class RestartsElsewhere(ReferenceFSDP):
    """On a different mesh, the average starts again from the loaded parameters."""

    @torch.no_grad()
    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        assert self.averages is not None and self.loaded is not None
        if self.loaded.about.mesh != dict(self.mesh.axes):
            for name, tensor in self.averages.tensors.items():
                self.averages.averages[name].copy_(tensor)
        return extra


@mutant("average_once_a_micro_batch", says=r"was updated 2 times \(once a micro-batch")
class OnceAMicroBatch(ReferenceDDP):
    """The average is updated once per micro-batch, not once per step."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        self.rounds = len(batch.micro_batches)
        return super().step(batch, observe)

    def update(self) -> None:
        super().update()
        assert self.averages is not None
        for _ in range(self.rounds - 1):
            self.averages.update()


@mutant(
    "average_differs_by_rank",
    says="differs between ranks",
    killed_by=("equivalence", "replicas"),
)
class DiffersByRank(ReferenceDDP):
    """Each rank averages its parameters from before the reduction, so the averages diverge."""

    def update(self) -> None:
        super().update()
        assert self.averages is not None
        for own in self.averages.averages.values():
            own.mul_(1 + 1e-6 * self.mesh.rank)


@mutant(
    "average_begins_at_zero", says="does not follow its rule", parent=ReferenceFSDP, mesh=SHARDED
)
class BeginsAtZero(Averages):
    """The average begins at zero, without a correction of that bias."""

    def begin(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)


@mutant(
    "average_not_saved",
    says="further state (were|was) not loaded",
    killed_by=("checkpoint",),
    checkpoint=CheckpointPlan(save_at=2),
)
class NotSaved(ReferenceDDP):
    """A checkpoint holds no averages, so a load keeps those of the fresh system."""

    def saved_pieces(self, kind: Kind) -> list[Piece]:
        return self.held_pieces(kind)


@mutant(
    "average_restarts_after_a_load",
    says="further state (were|was) not loaded",
    killed_by=("checkpoint",),
    checkpoint=CheckpointPlan(save_at=2),
    parent=ReferenceFSDP,
    mesh=SHARDED,
)
class Restarts(ReferenceFSDP):
    """After a load, the average starts again from the loaded parameters."""

    def load(self, path: Path) -> Mapping[str, Any]:
        extra = super().load(path)
        assert self.averages is not None
        for name, tensor in self.averages.tensors.items():
            self.averages.averages[name].copy_(tensor.detach())
        return extra


@mutant(
    "decay_schedule_a_step_late",
    says="the update used optimizer.weight_decay of step 0, not of step 1",
    options={"decay_rate": 0.5},
    optimizer=DECAY,
)
class ScheduleIsLate(ReferenceDDP):
    """Weight decay is set after the update, so it takes effect one step late."""

    def update(self) -> None:
        set_weight_decay(self.optimizer, self.decay_at(max(0, self.steps_done - 1)))
        super().update()


@mutant(
    "decay_schedule_by_micro_batches",
    says="the update used optimizer.weight_decay of step 2, not of step 1",
    options={"decay_rate": 0.5},
    optimizer=DECAY,
)
class ScheduleByMicroBatches(ReferenceDDP):
    """The schedule of weight decay counts micro-batches instead of steps."""

    def decay_at(self, step: int) -> float:
        return super().decay_at(2 * step)
