"""Faults of sharded parameters with right numbers: bytes held, bytes sent, lost overlap.

Planted in ``reference/zero3`` and ``reference/fsdp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.comm import Comm
from shardproof.impls.mutants.sharded.fsdp import CHUNKS, SILENT, mutant
from shardproof.impls.mutants.triggers import ADAMW, gpt, whole_gpt
from shardproof.impls.reference.fsdp import ReferenceFSDP
from shardproof.impls.reference.fsdp.schedule import FSDP
from shardproof.impls.reference.units.gradients import GradientState
from shardproof.impls.reference.units.plan import UnitPlan
from shardproof.impls.reference.units.shard import ShardedUnit
from shardproof.impls.reference.zero3 import Zero3

# ------------------------------------------------------------------------------- what is freed


@mutant(
    "zero3_frees_late",
    says="parameters: .* at the peak",
    zoo=("F19",),
    killed_by=("memory",),
    workload=whole_gpt(),
)
class FreesLate(Zero3):
    """Units stay whole from forward to backward, and are gathered again nevertheless."""

    left: frozenset[ShardedUnit] = frozenset()

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        self.left |= {unit}
        self.order.forward_ends(unit)

    def gather(self, unit: ShardedUnit) -> None:
        if unit in self.left:
            self.left -= {unit}
            unit.free()
        super().gather(unit)


@mutant(
    "fsdp_never_reshards",
    says="all_gather: .* fewer|parameters: .* at the peak",
    zoo=("F19",),
    killed_by=("traffic", "memory"),
    workload=whole_gpt(),
)
class NeverReshards(FSDP):
    """FULL_SHARD keeps units whole between forward and backward."""

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        self.order.forward_ends(unit)


@mutant("zero3_keeps_root", says="all_gather: 350,400 bytes", killed_by=("traffic",))
class KeepsRoot(Zero3):
    """The root is not gathered again before backward."""

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        if unit is not self.root:
            super().after_forward(unit, again)


@mutant(
    "zero3_keeps_units_of_backward",
    says="backward: parameters: .* at the peak",
    killed_by=("memory",),
    workload=whole_gpt(),
)
class KeepsUnitsOfBackward(Zero3):
    """Units stay whole from their backward to the end of the round."""

    def after_backward(self, unit: ShardedUnit) -> None:
        self.reduce(unit)


@mutant(
    "fsdp_ignores_chunks",
    says="axis shard, all_gather",
    killed_by=("traffic",),
    mesh={"shard": 4},
    options=CHUNKS,
)
class IgnoresChunks(FSDP):
    """Between forward and backward, parameters stay sharded over all ranks instead of two."""

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        super().after_forward(unit, again)
        for flat in unit.flats:
            flat.parameters.free()


@mutant(
    "zero3_frozen_stay_whole",
    says="parameters: 31,448 bytes held",
    killed_by=("traffic", "memory"),
    workload=gpt("frozen"),
)
class FrozenStayWhole(Zero3):
    """Frozen parameters stay whole on every rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for flat in self.flats:
            if not flat.trained:
                flat.parameters.gather()
                flat.parameters.is_resident = True


@mutant(
    "zero3_reduces_frozen",
    says="reduce_scatter: 254,112",
    killed_by=("traffic",),
    workload=gpt("frozen"),
)
class ReducesFrozen(Zero3):
    """Zeros are reduced for frozen parameters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for unit in self.units:
            unit.trained = unit.flats


@mutant(
    "fsdp_ignores_no_sync",
    says="before the last micro-batch",
    killed_by=("traffic", "active"),
    options=SILENT,
)
class IgnoresNoSync(FSDP):
    """Every micro-batch is reduced, although accumulation without communication is requested."""

    @property
    def is_silent(self) -> bool:
        return False


@mutant(
    "fsdp_defers_unasked",
    says="reduce_scatter: .* 2 times fewer",
    zoo=("F20",),
    killed_by=("traffic",),
)
class DefersUnasked(FSDP):
    """Gradients stay whole until the last micro-batch, although this was not requested."""

    @property
    def is_silent(self) -> bool:
        return not self.rounds.is_last


@mutant(
    "fsdp_latches_no_sync",
    says="no such call is made",
    zoo=("D05",),
    killed_by=("equivalence", "traffic"),
    options=SILENT,
)
class LatchesNoSync(FSDP):
    """The decision to reduce is made once per step, so kept gradients are never reduced."""

    def leave_round(self) -> None:
        for unit in self.unreduced if self.rounds.is_last else ():
            for flat in unit.trained:
                flat.gradients.packed = None
                flat.gradients.filled.clear()
                flat.gradients.state = GradientState.ABSENT
        self.unreduced.clear()

    @property
    def is_silent(self) -> bool:
        return self.rounds.total > 1


@mutant(
    "zero3_one_unit",
    says="gathers are issued|in 12 calls",
    killed_by=("traffic", "memory", "overlap", "active"),
)
class OneUnit(Zero3):
    """The wrap policy is dropped: the whole model is one unit."""

    def __init__(
        self, module: nn.Module, comms: Mapping[str, Comm], plan: Sequence[UnitPlan], *rest: Any
    ) -> None:
        names = tuple(name for name, _ in module.named_parameters())
        super().__init__(module, comms, [UnitPlan("", names)], *rest)


@mutant(
    "fsdp_replicates_optimizer_state",
    says="optimizer_state: 122,712 bytes held",
    killed_by=("memory",),
    optimizer=ADAMW,
)
class ReplicatesOptimizerState(ReferenceFSDP):
    """Every rank keeps the optimizer state of all shards."""

    def update(self) -> None:
        super().update()
        state, size = self.optimizer.state, self.mesh.size("shard")
        for slots in state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                room = slots[name].new_zeros(size, slots[name].numel())
                slots[name] = room[0].copy_(slots[name])


# ------------------------------------------------------------------------------------- schedule


@mutant(
    "zero3_no_prefetch_in_forward",
    says="2 gathers are issued while .*4 promised",
    zoo=("F25",),
    killed_by=("overlap",),
)
class NoPrefetchInForward(Zero3):
    """A unit is gathered only when its forward is reached."""

    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        self.order.last_forward = []
        super().before_forward(unit, again)


@mutant(
    "fsdp_no_prefetch_in_backward",
    says="2 gathers are issued while .*4 promised",
    zoo=("F25",),
    killed_by=("overlap",),
)
class NoPrefetchInBackward(FSDP):
    """A unit is gathered only when its backward is reached."""

    def before_backward(self, unit: ShardedUnit) -> None:
        self.order.backward = []
        super().before_backward(unit)


@mutant(
    "zero3_waits_after_each_gather",
    says="0 gathers are issued while",
    zoo=("F25",),
    killed_by=("overlap",),
)
class WaitsAfterEachGather(Zero3):
    """Each gather is waited for as soon as it is launched."""

    def gather(self, unit: ShardedUnit) -> None:
        super().gather(unit)
        unit.wait()


@mutant(
    "fsdp_waits_after_each_reduction",
    says="waited for at once",
    zoo=("F25",),
    killed_by=("overlap",),
)
class WaitsAfterEachReduction(FSDP):
    """Each reduction is waited for as soon as it is launched."""

    def start_reduction(self, unit: ShardedUnit) -> None:
        super().start_reduction(unit)
        self.wait_and_accumulate()


@mutant(
    "zero3_prefetches_wrong_end",
    says="gathers are issued while .*promised",
    zoo=("F25",),
    killed_by=("overlap",),
    workload=whole_gpt(layers=5),
)
class PrefetchesWrongEnd(Zero3):
    """Backward prefetches from the wrong end of its order."""

    def before_backward(self, unit: ShardedUnit) -> None:
        first, self.order.backward = self.order.backward[:1], []
        super().before_backward(unit)
        self.order.backward = first
        for late in first:
            self.gather(late)


@mutant(
    "zero3_reduces_after_backward", says="start after backward has ended", killed_by=("overlap",)
)
class ReducesAfterBackward(Zero3):
    """Gradients stay whole until backward has returned and are reduced only then."""

    waiting: tuple[ShardedUnit, ...] = ()

    def after_backward(self, unit: ShardedUnit) -> None:
        unit.free()
        self.waiting += (unit,)

    def leave_round(self) -> None:
        for unit in self.waiting:
            self.reduce(unit)
        self.waiting = ()


# ----------------------------------------------------------------------------------- evaluation


@mutant(
    "zero3_evaluation_leaves_units",
    says="step 1, axis shard, all_gather",
    killed_by=("traffic", "memory"),
    workload=whole_gpt(),
)
class EvaluationLeavesUnits(Zero3):
    """Units gathered by an evaluation stay whole, so the next step does not gather them."""

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        if torch.is_grad_enabled():
            super().after_forward(unit, again)

    def free_all(self) -> None:
        if torch.is_grad_enabled():
            super().free_all()
