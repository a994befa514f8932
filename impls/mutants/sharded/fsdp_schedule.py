"""Faults of FSDP's schedule that neither numbers nor a plain model show.

Each needs its own trigger: ranks that only follow, a prefetch of nothing, a unit of a branch that
the last micro-batch does not take, a branch that goes out of use.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardproof.impls.mutants.sharded.fsdp import CHUNKS, mutant
from shardproof.impls.mutants.triggers import ADAMW, deep_gpt, gpt, whole_gpt
from shardproof.impls.reference.fsdp.schedule import FSDP
from shardproof.impls.reference.units.events import UnitEvents
from shardproof.impls.reference.units.parameters import ParameterState
from shardproof.impls.reference.units.shard import ShardedUnit
from shardproof.impls.reference.zero3 import ReferenceZero3, Zero3


@mutant(
    "fsdp_chunks_outlive_round",
    says="deadlock.*all_gather",
    zoo=("F16",),
    killed_by=("hang",),
    mesh={"shard": 4},
    options=CHUNKS,
    workload=gpt("unequal_micro_batches"),
)
class ChunksOutliveRound(FSDP):
    """Freeing a unit keeps its chunk, and the next gather uses it as values."""

    def free_all(self) -> None:
        kept = [flat.parameters.chunk for flat in self.flats]
        super().free_all()
        for flat, chunk in zip(self.flats, kept, strict=True):
            if chunk is not None:
                flat.parameters.chunk, flat.parameters.state = chunk, ParameterState.CHUNKED


@mutant(
    "fsdp_reduces_again_what_it_followed",
    says="gradients: 0 bytes held",
    killed_by=("memory",),
    options={"accumulate_without_communication": True},
    workload=gpt("rotating_shares", "unequal_micro_batches", micro_batches=2),
    steps=4,
)
class ReducesAgainWhatItFollowed(FSDP):
    """A rank that was idle in the last round, and is not in the next pass, reduces again the units
    that it kept since, although the other ranks have reduced them.
    """

    def before_step(self, micro_batches: int) -> None:
        kept = set(self.unreduced)
        super().before_step(micro_batches)
        self.unreduced |= kept


@mutant(
    "fsdp_prefetches_all_for_none",
    says="parameters: .* at the peak",
    killed_by=("memory",),
    options={"prefetch_backward": 0},
    workload=deep_gpt(),
)
class PrefetchesAllForNone(FSDP):
    """With ``prefetch_backward`` 0, all units still to come in backward are gathered."""

    def before_backward(self, unit: ShardedUnit) -> None:
        super().before_backward(unit)
        for preceding in self.order.backward[-self.options.prefetch_backward :]:
            self.gather(preceding)


@mutant(
    "zero3_lands_with_root",
    says="backward: communication: .* at the peak",
    zoo=("F20",),
    killed_by=("memory",),
    workload=deep_gpt(),
)
class LandsWithRoot(Zero3):
    """Whole gradients of all units stay until the root's have been reduced."""

    def start_reduction(self, unit: ShardedUnit) -> None:
        before, self.in_flight = self.in_flight, []
        super().start_reduction(unit)
        self.in_flight = before + self.in_flight


@mutant(
    "fsdp_prefetches_one_for_two",
    says="at most 1 gathers are under way, 2 promised",
    zoo=("F25",),
    killed_by=("overlap",),
    options={"prefetch_forward": 2, "prefetch_backward": 2},
    workload=deep_gpt(),
)
class PrefetchesOneForTwo(FSDP):
    """A prefetch of 2 units gathers one ahead."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.options = replace(self.options, prefetch_forward=1)

    def before_backward(self, unit: ShardedUnit) -> None:
        given = self.options
        self.options = replace(given, prefetch_backward=1)
        super().before_backward(unit)
        self.options = given


@mutant(
    "fsdp_gathers_farther_unit_first",
    says="gathered ahead in another order than they are used",
    zoo=("F25",),
    killed_by=("overlap",),
    options={"prefetch_forward": 2, "prefetch_backward": 2},
    workload=whole_gpt(),
)
class GathersFartherUnitFirst(FSDP):
    """The second of two prefetched units is gathered first."""

    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        self.given = self.order.forward_begins
        self.order.forward_begins = self.reversed  # type: ignore[method-assign]
        super().before_forward(unit, again)
        self.order.forward_begins = self.given  # type: ignore[method-assign]

    def reversed(self, unit: ShardedUnit, ahead: int) -> list[ShardedUnit]:
        """The same units in reverse order."""
        return self.given(unit, ahead)[::-1]


@mutant(
    "zero3_keeps_gradients_through_forward",
    says="forward: gradients: .* at the peak",
    killed_by=("memory",),
    workload=deep_gpt(micro_batches=1),
    parent=ReferenceZero3,
)
class KeepsGradientsThroughForward(Zero3):
    """Gradients are cleared right before the next backward instead of after the update."""

    def after_step(self) -> None:
        self.used.clear()

    def before_backward(self, unit: ShardedUnit) -> None:
        if unit is self.root:
            used = set(self.used)
            super().after_step()
            self.used |= used
        super().before_backward(unit)


@mutant(
    "fsdp_forgets_replicas_of_early_units",
    says="conditional_by_micro_batch.*(not summed|data coordinate 2 is missing)",
    zoo=("D01",),
    killed_by=("equivalence", "replicas"),
    mesh={"replicate": 2, "shard": 2},
    options={"sharding_strategy": "HYBRID_SHARD", "wrap": {"module_class": ["Block", "Branch"]}},
    workload=whole_gpt("conditional_by_micro_batch"),
)
class ForgetsReplicasOfEarlyUnits(FSDP):
    """A unit that the last micro-batch does not call is not summed over the replicas."""

    def finish(self) -> None:
        self.idle_rounds()
        self.wait_and_accumulate()
        replicas, self.replicas = self.replicas, None
        super().finish()
        self.replicas = replicas


@mutant(
    "zero3_remembers_use",
    says="conditional_early_step.*oracle does not have",
    killed_by=("equivalence",),
    optimizer=ADAMW,
    workload=gpt("conditional_early_step"),
)
class RemembersUse(Zero3):
    """A parameter used once gets a zero gradient in steps that do not use it, so it moves on."""

    def after_step(self) -> None:
        used = set(self.used)
        super().after_step()
        self.used |= used


class NoNestedInputs(UnitEvents):
    """Inputs of a unit are searched for tensors only at the top level, not inside containers."""

    def enter(self, unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if all(isinstance(given, Tensor) for given in args):
            return super().enter(unit, module, args, kwargs)
        super().enter(unit, module, (), {})
        return None


class NoNestedOutputs(UnitEvents):
    """Outputs of a unit are searched for tensors only at the top level, not inside containers."""

    def leave(self, unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        super().leave(unit, module, args, kwargs, out if isinstance(out, Tensor) else ())


@mutant(
    "zero3_sees_no_nested_inputs",
    says="waited for at once",
    killed_by=("overlap",),
    workload=deep_gpt(passes="nested"),
)
class SeesNoNestedInputs(Zero3):
    """The end of a unit's backward is missed if its input lies in a container, so its gradients are
    sent after the whole backward.
    """

    events_type = NoNestedInputs


@mutant(
    "zero3_sees_no_nested_outputs",
    says="storage of size 0",
    crash_says="storage of size 0",
    killed_by=("crash",),
    workload=deep_gpt(passes="nested"),
)
class SeesNoNestedOutputs(Zero3):
    """A unit is not gathered for a backward that starts at a tensor inside a container."""

    events_type = NoNestedOutputs
