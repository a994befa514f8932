"""Faults of sharded parameters, planted in ``reference/zero3`` and ``reference/fsdp``.

What is gathered, when and in which state; what is reduced and freed; who takes part.  Three ranks,
so that shards are uneven.  Recipes that would be equivalent in the parent are planted at their
effect; the summary says what goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from impls.mutants import declare
from impls.mutants.ddp import CLIP, gpt
from impls.reference.fsdp import ReferenceFSDP
from impls.reference.fsdp.schedule import FSDP
from impls.reference.parts.handle import Handle
from impls.reference.parts.norm import NormPart
from impls.reference.parts.precision import Precision
from impls.reference.parts.shards import Unit
from impls.reference.parts.state import named_state
from impls.reference.parts.units import UnitPlan
from impls.reference.zero3 import ReferenceZero3, Zero3
from suite.comm import Comm, Mesh
from suite.contract import OptimizerSpec

ADAMW = OptimizerSpec("adamw", lr=0.003, weight_decay=0.1)
SILENT: Mapping[str, Any] = {"accumulate_without_communication": True}
CHUNKS: Mapping[str, Any] = {"reshard_after_forward": 2}


def mutant(name: str, **fields: Any) -> Callable[[declare.C], declare.C]:
    """Declare a fault of the strategy that the decorated class comes from."""

    def declared(cls: declare.C) -> declare.C:
        flat = issubclass(cls, (FSDP, ReferenceFSDP))
        parent: Any = ReferenceFSDP if flat else ReferenceZero3
        parent_name = f"reference/{parent.strategy}"
        usual: dict[str, Any] = {"mesh": {"shard": 3}}
        return declare.mutant(name, parent=parent, parent_name=parent_name, **(usual | fields))(cls)

    return declared


# ----------------------------------------------------------------------------- what is gathered


@mutant(
    "zero3_keeps_own_initial_shard",
    zoo=("D09",),
    summary="a rank cuts its shards from the values that it was built with, not from rank 0's",
    killed_by=("equivalence",),
)
class KeepsOwnInitialShard(Zero3):
    def __init__(self, module: nn.Module, *args: Any) -> None:
        own = {name: tensor.detach().clone() for name, tensor in named_state(module).items()}
        super().__init__(module, *args)
        for flat in self.flats:
            for name, part in flat.parts.items():
                part.of_shard(flat.shard).copy_(part.of_tensor(own[name]))


@mutant(
    "zero3_computes_with_last_weights",
    zoo=("F16",),
    summary="the last unit is not freed at the end of a step: the next one computes with its old "
    "weights",
    killed_by=("equivalence", "traffic", "memory"),
)
class ComputesWithLastWeights(Zero3):
    def after_backward(self, unit: Unit) -> None:
        unit.free() if unit is not self.units[-1] else None
        self.reduce(unit)

    def rest(self) -> None:
        for unit in self.units[:-1]:
            unit.free()


@mutant(
    "zero3_does_not_wait_for_prefetch",
    zoo=("F16", "D10"),
    summary="a unit that was gathered ahead is used without waiting for it",
    killed_by=("equivalence",),
    workload=gpt("poisoned_buffers"),
)
class DoesNotWaitForPrefetch(Zero3):
    def before_forward(self, unit: Unit, again: bool) -> None:
        for flat in unit.flats if unit.is_whole else ():
            flat.gathering = None
        super().before_forward(unit, again)


@mutant(
    "zero3_unties_weight",
    zoo=("F05",),
    summary="a tied weight becomes two tensors; nobody updates the second",
    killed_by=("equivalence",),
    workload=gpt("tied"),
)
class UntiesWeight(ReferenceZero3):
    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        second = module.get_submodule("blocks.1.odd.tied.second")
        weight = second.get_parameter("weight").detach()
        del second.weight
        second.weight = weight.clone()
        return super().transform(module, mesh, options)


@mutant(
    "zero3_idle_ranks_count_otherwise",
    zoo=("X02",),
    summary="a rank without work follows with the shard of another unit of equal size",
    killed_by=("equivalence",),
    workload=gpt("unequal_micro_batches"),
)
class IdleRanksCountOtherwise(Zero3):
    def idle_rounds(self) -> None:
        self.units[1], self.units[2] = self.units[2], self.units[1]
        super().idle_rounds()
        self.units[1], self.units[2] = self.units[2], self.units[1]


@mutant(
    "fsdp_chunks_of_wrong_neighbours",
    zoo=("F22",),
    summary="chunks of two neighbours are put together in the wrong order",
    killed_by=("equivalence",),
    mesh={"shard": 4},
    options=CHUNKS,
)
class ChunksOfWrongNeighbours(FSDP):
    def after_forward(self, unit: Unit, again: bool) -> None:
        whole = [flat.whole.clone() for flat in unit.flats]
        super().after_forward(unit, again)
        for flat, old in zip(unit.flats, whole, strict=True):
            if flat.kept is not None and self.chunks is not None:
                flat.kept.copy_(old.view(2, -1)[1 - self.chunks.rank])


@mutant(
    "fsdp_keeps_first_chunks",
    zoo=("F16",),
    summary="the chunks kept between forward and backward are those of the first forward",
    killed_by=("equivalence",),
    mesh={"shard": 4},
    options=CHUNKS,
)
class KeepsFirstChunks(FSDP):
    first: Mapping[Unit, list[Tensor | None]] = {}

    def after_forward(self, unit: Unit, again: bool) -> None:
        super().after_forward(unit, again)
        if unit.is_chunked:
            self.first = {unit: [flat.kept for flat in unit.flats], **self.first}
            for flat, kept in zip(unit.flats, self.first[unit], strict=True):
                flat.kept = kept


@mutant(
    "fsdp_indexes_empty_shard",
    zoo=("F17",),
    summary="a rank looks at the first parameter of a shard that holds none",
    killed_by=("crash",),
    workload=gpt("one_element"),
    options={"wrap": {"units": ["blocks.0", "final.one_element"]}},
)
class IndexesEmptyShard(FSDP):
    def before_step(self, micro_batches: int) -> None:
        super().before_step(micro_batches)
        self.firsts = [next(iter(flat.parts)) for flat in self.flats]


# ------------------------------------------------------------------------------ what is reduced


@mutant(
    "zero3_drops_tied_tail",
    zoo=("F01",),
    summary="the last shard of a tied parameter gets no gradient",
    killed_by=("equivalence",),
    workload=gpt("tied"),
)
class DropsTiedTail(Zero3):
    def finish(self) -> None:
        super().finish()
        for name, target in self.targets():
            part = self.home[name].parts[name]
            if ".tied." in name and part.stop == torch.Size(part.shape).numel():
                assert target.grad is not None
                target.grad.zero_()


@mutant(
    "zero3_no_gradient_alone",
    zoo=("F02",),
    summary="on one rank a parameter of one element has a gradient of 0",
    killed_by=("equivalence",),
    workload=gpt("one_element"),
    mesh={"shard": 1},
)
class NoGradientAlone(Zero3):
    def finish(self) -> None:
        super().finish()
        for _, target in self.targets():
            if target.grad is not None and target.numel() == 1:
                target.grad.zero_()


@mutant(
    "fsdp_clears_nothing_alone",
    zoo=("F13",),
    summary="over one rank, where nothing is gathered, gradients are not cleared either",
    killed_by=("equivalence",),
    mesh={"shard": 1},
)
class ClearsNothingAlone(FSDP):
    def after_step(self) -> None:
        if self.shards is not None and self.shards.size > 1:
            super().after_step()


@mutant(
    "zero3_gradient_by_own_use",
    zoo=("F04",),
    summary="a shard has a gradient only on ranks that used the parameter themselves",
    killed_by=("equivalence",),
    workload=gpt("conditional_by_rank"),
    options={"wrap": {"units": ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]}},
)
class GradientByOwnUse(Zero3):
    def finish(self) -> None:
        super().finish()
        for name, target in self.targets():
            if name not in self.used:
                target.grad = None


@mutant(
    "zero3_drops_unit_of_last_forward",
    zoo=("F07",),
    summary="a unit that ends with the whole backward is reduced only in the last round",
    killed_by=("equivalence", "traffic"),
)
class DropsUnitOfLastForward(Zero3):
    def reduce(self, unit: Unit) -> None:
        if unit is not self.root or self.rounds.is_last:
            super().reduce(unit)
        else:
            for flat in unit.trained:
                flat.full = None
                flat.fresh.clear()


@mutant(
    "fsdp_reduces_reduced_gradients",
    zoo=("F23",),
    summary="the sum of earlier micro-batches is added again with every micro-batch",
    killed_by=("equivalence",),
    workload=gpt(micro_batches=3),
)
class ReducesReducedGradients(FSDP):
    def before_backward(self, unit: Unit) -> None:
        super().before_backward(unit)
        for flat in unit.trained if unit is self.root else ():
            if flat.total is not None:
                flat.total.mul_(2)


@mutant(
    "fsdp_counts_module_twice",
    summary="the gradient of a unit that is called twice is counted twice",
    killed_by=("equivalence",),
    workload=gpt("module_twice"),
    mesh={"replicate": 3},
    options={
        "sharding_strategy": "NO_SHARD",
        "wrap": {"units": ["blocks.0", "blocks.1.odd.module_twice.layer"]},
    },
)
class CountsModuleTwice(FSDP):
    def reduce(self, unit: Unit) -> None:
        unit.pack()
        for flat in unit.trained:
            if self.order.count(unit) > 1 and flat.full is not None:
                flat.full.mul_(2)
        super().reduce(unit)


@mutant(
    "zero3_uses_gradients_early",
    zoo=("F08", "D10"),
    summary="reductions are added to the shard without waiting for them",
    killed_by=("equivalence",),
    workload=gpt("late_results"),
)
class UsesGradientsEarly(Zero3):
    def start_reduction(self, unit: Unit) -> None:
        super().start_reduction(unit)
        self.flying = [(unit, [], last) for unit, _, last in self.flying]


@mutant(
    "zero3_reduces_in_bf16",
    zoo=("H13",),
    summary="fp32 reductions are asked for, bf16 ones are made",
    killed_by=("traffic",),
    lane="native",
    dtype="float32",
    precision={"parameters": "bfloat16", "reduce": "float32"},
)
class ReducesInBf16(Zero3):
    def __init__(
        self, module: nn.Module, comms: Mapping[str, Comm], plan: Any, precision: Precision, *a: Any
    ) -> None:
        super().__init__(module, comms, plan, replace(precision, reduce=None), *a)


@mutant(
    "zero3_clips_by_own_shard",
    zoo=("O02", "H11"),
    summary="every rank clips by the norm of its own shards",
    killed_by=("norm", "equivalence", "traffic"),
    optimizer=CLIP,
)
class ClipsByOwnShard(Zero3):
    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return [(total, ()) for total, _ in super().norm_parts(order)]


@mutant(
    "fsdp_takes_norm_before_reductions_land",
    zoo=("O08",),
    summary="the norm is taken before the root's gradients are there",
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class TakesNormBeforeReductionsLand(FSDP):
    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        held = {name: t.grad for name, t in self.targets() if self.home[name] in self.root.flats}
        for name in held:
            self.home[name].targets[name].grad = None
        parts = super().norm_parts(order)
        for name, gradient in held.items():
            self.home[name].targets[name].grad = gradient
        return parts


# ------------------------------------------------------------------------------- what is freed


@mutant(
    "zero3_frees_late",
    zoo=("F19",),
    summary="units stay whole from forward to backward, and are gathered again all the same",
    killed_by=("memory",),
)
class FreesLate(Zero3):
    left: frozenset[Unit] = frozenset()

    def after_forward(self, unit: Unit, again: bool) -> None:
        self.left |= {unit}
        self.way_back.append(unit)

    def gather(self, unit: Unit) -> None:
        if unit in self.left:
            self.left -= {unit}
            unit.free()
        super().gather(unit)


@mutant(
    "fsdp_never_reshards",
    zoo=("F19",),
    summary="FULL_SHARD keeps units whole between forward and backward",
    killed_by=("traffic", "memory"),
)
class NeverReshards(FSDP):
    def after_forward(self, unit: Unit, again: bool) -> None:
        if unit not in self.way_back:
            self.way_back.append(unit)


@mutant(
    "zero3_keeps_root",
    summary="the root is not gathered again before backward",
    killed_by=("traffic",),
)
class KeepsRoot(Zero3):
    def after_forward(self, unit: Unit, again: bool) -> None:
        if unit is not self.root:
            super().after_forward(unit, again)


@mutant(
    "zero3_keeps_units_of_backward",
    summary="units stay whole from their backward to the end of the round",
    killed_by=("memory",),
)
class KeepsUnitsOfBackward(Zero3):
    def after_backward(self, unit: Unit) -> None:
        self.reduce(unit)


@mutant(
    "fsdp_ignores_chunks",
    summary="between forward and backward parameters stay sharded over all ranks, not over two",
    killed_by=("traffic",),
    mesh={"shard": 4},
    options=CHUNKS,
)
class IgnoresChunks(FSDP):
    def after_forward(self, unit: Unit, again: bool) -> None:
        super().after_forward(unit, again)
        for flat in unit.flats:
            flat.kept = None


@mutant(
    "zero3_frozen_stay_whole",
    summary="frozen parameters are whole on every rank, all the time",
    killed_by=("traffic", "memory"),
    workload=gpt("frozen"),
)
class FrozenStayWhole(Zero3):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for flat in self.flats:
            if not flat.trained:
                flat.gather()
                flat.is_resident = True


@mutant(
    "zero3_reduces_frozen",
    summary="zeros are reduced for frozen parameters",
    killed_by=("traffic",),
    workload=gpt("frozen"),
)
class ReducesFrozen(Zero3):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for unit in self.units:
            unit.trained = unit.flats


@mutant(
    "fsdp_ignores_no_sync",
    zoo=("F20", "D06"),
    summary="accumulation without communication is asked for; every micro-batch is reduced",
    killed_by=("traffic", "engagement"),
    options=SILENT,
)
class IgnoresNoSync(FSDP):
    @property
    def is_silent(self) -> bool:
        return False


@mutant(
    "fsdp_defers_unasked",
    zoo=("F20",),
    summary="gradients stay whole until the last micro-batch, though nobody asked for it",
    killed_by=("traffic",),
)
class DefersUnasked(FSDP):
    @property
    def is_silent(self) -> bool:
        return not self.rounds.is_last


@mutant(
    "fsdp_latches_no_sync",
    zoo=("D05",),
    summary="whether to reduce is decided once a step: gradients that were kept never leave",
    killed_by=("equivalence", "traffic"),
    options=SILENT,
)
class LatchesNoSync(FSDP):
    def leave_round(self) -> None:
        self.owed.clear()

    @property
    def is_silent(self) -> bool:
        return self.rounds.total > 1


@mutant(
    "zero3_one_unit",
    summary="the wrap policy is dropped: the whole model is one unit",
    killed_by=("traffic", "memory", "overlap", "engagement"),
)
class OneUnit(Zero3):
    def __init__(
        self, module: nn.Module, comms: Mapping[str, Comm], plan: Sequence[UnitPlan], *rest: Any
    ) -> None:
        names = tuple(name for name, _ in module.named_parameters())
        super().__init__(module, comms, [UnitPlan("", names)], *rest)


@mutant(
    "fsdp_replicates_optimizer_state",
    zoo=("F11",),
    summary="every rank keeps the optimizer state of all shards",
    killed_by=("memory",),
    optimizer=ADAMW,
)
class ReplicatesOptimizerState(ReferenceFSDP):
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
    zoo=("F25",),
    summary="a unit is gathered only when its forward is reached",
    killed_by=("overlap",),
)
class NoPrefetchInForward(Zero3):
    def before_forward(self, unit: Unit, again: bool) -> None:
        self.last_order = []
        super().before_forward(unit, again)


@mutant(
    "fsdp_no_prefetch_in_backward",
    zoo=("F25",),
    summary="a unit is gathered only when its backward is reached",
    killed_by=("overlap",),
)
class NoPrefetchInBackward(FSDP):
    def before_backward(self, unit: Unit) -> None:
        self.way_back = []
        super().before_backward(unit)


@mutant(
    "zero3_waits_after_each_gather",
    zoo=("F25",),
    summary="each gather is waited for as soon as it is launched",
    killed_by=("overlap",),
)
class WaitsAfterEachGather(Zero3):
    def gather(self, unit: Unit) -> None:
        super().gather(unit)
        unit.wait()


@mutant(
    "fsdp_waits_after_each_reduction",
    zoo=("F25",),
    summary="each reduction is waited for as soon as it is launched",
    killed_by=("overlap",),
)
class WaitsAfterEachReduction(FSDP):
    def start_reduction(self, unit: Unit) -> None:
        super().start_reduction(unit)
        self.land()


@mutant(
    "zero3_prefetches_wrong_end",
    zoo=("F25",),
    summary="backward gathers ahead from the wrong end of its way",
    killed_by=("overlap",),
    workload=replace(gpt(), params={"layers": 5}),
)
class PrefetchesWrongEnd(Zero3):
    def before_backward(self, unit: Unit) -> None:
        first, self.way_back = self.way_back[:1], []
        super().before_backward(unit)
        self.way_back = first
        for late in first:
            self.gather(late)


@mutant(
    "zero3_reduces_after_backward",
    summary="gradients stay whole until backward has returned, and are reduced then",
    killed_by=("overlap",),
)
class ReducesAfterBackward(Zero3):
    waiting: tuple[Unit, ...] = ()

    def after_backward(self, unit: Unit) -> None:
        unit.free()
        self.waiting += (unit,)

    def leave_round(self) -> None:
        for unit in self.waiting:
            self.reduce(unit)
        self.waiting = ()


# ----------------------------------------------------------------------------------- evaluation


@mutant(
    "zero3_evaluation_leaves_units",
    summary="units that an evaluation gathered stay whole: the next step does not gather them",
    killed_by=("traffic", "memory"),
)
class EvaluationLeavesUnits(Zero3):
    def after_forward(self, unit: Unit, again: bool) -> None:
        if torch.is_grad_enabled():
            super().after_forward(unit, again)

    def rest(self) -> None:
        if torch.is_grad_enabled():
            super().rest()
