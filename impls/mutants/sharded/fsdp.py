"""Faults of sharded parameters that make wrong numbers.

Planted in ``reference/zero3`` and ``reference/fsdp``: what is gathered and reduced, in which state,
and who takes part.  Three ranks, so that shards are uneven.  Recipes that would be equivalent in
the parent are planted at their effect; the summary says what goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, NORM, deep_gpt, gpt, own_parts, whole_gpt
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import NormPart
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.engine.state import named_state
from shardproof.impls.reference.fsdp import ReferenceFSDP
from shardproof.impls.reference.fsdp.schedule import FSDP
from shardproof.impls.reference.units.gradients import GradientState
from shardproof.impls.reference.units.parameters import ParameterState
from shardproof.impls.reference.units.shard import ShardedUnit
from shardproof.impls.reference.zero3 import ReferenceZero3, Zero3

SILENT: Mapping[str, Any] = {"accumulate_without_communication": True}
CHUNKS: Mapping[str, Any] = {"reshard_after_forward": 2}
mutant = declare.family(ReferenceZero3, ReferenceFSDP, mesh={"shard": 3})


# ----------------------------------------------------------------------------- what is gathered


@mutant("zero3_keeps_own_initial_shard", says="built itself", killed_by=("equivalence",))
class KeepsOwnInitialShard(Zero3):
    """A rank cuts its shards from its own initial values instead of rank 0's."""

    def __init__(self, module: nn.Module, *args: Any) -> None:
        own = {name: tensor.detach().clone() for name, tensor in named_state(module).items()}
        super().__init__(module, *args)
        for flat in self.flats:
            for name, part in flat.parts.items():
                part.of_shard(flat.shard).copy_(part.of_tensor(own[name]))


@mutant(
    "zero3_computes_with_last_weights",
    says="parameters: .* held|parameters before",
    zoo=("F16",),
    killed_by=("equivalence", "traffic", "memory"),
)
class ComputesWithLastWeights(Zero3):
    """The last unit is not freed at the end of a step, so the next step uses its old weights."""

    def after_backward(self, unit: ShardedUnit) -> None:
        unit.free() if unit is not self.units[-1] else None
        self.reduce(unit)

    def free_all(self) -> None:
        for unit in self.units[:-1]:
            unit.free()


@mutant(
    "zero3_does_not_wait_for_prefetch",
    says="nan|not finite",
    zoo=("F16",),
    killed_by=("equivalence",),
    workload=gpt("poisoned_buffers"),
)
class DoesNotWaitForPrefetch(Zero3):
    """A prefetched unit is used without waiting for its gather."""

    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        for flat in unit.flats if unit.is_whole else ():
            flat.parameters.work, flat.parameters.state = None, ParameterState.WHOLE
        super().before_forward(unit, again)


@mutant(
    "zero3_unties_weight",
    says="share|tied",
    zoo=("F05",),
    killed_by=("equivalence",),
    workload=deep_gpt("tied"),
)
class UntiesWeight(ReferenceZero3):
    """A tied weight becomes two tensors, and the second is never updated."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        second = module.get_submodule("blocks.1.odd.tied.second")
        weight = second.get_parameter("weight").detach()
        del second.weight
        second.weight = weight.clone()
        return super().transform(module, mesh, options)


@mutant(
    "zero3_idle_ranks_count_otherwise",
    says=r"data coordinates \[1\]|another unit",
    zoo=("X05",),
    killed_by=("equivalence",),
    workload=deep_gpt("unequal_micro_batches"),
)
class IdleRanksCountOtherwise(Zero3):
    """A rank without work sends the shard of a different unit of equal size."""

    def idle_rounds(self) -> None:
        self.units[1], self.units[2] = self.units[2], self.units[1]
        super().idle_rounds()
        self.units[1], self.units[2] = self.units[2], self.units[1]


@mutant(
    "fsdp_chunks_of_wrong_neighbours",
    says="another order|every later one is right",
    zoo=("F22",),
    killed_by=("equivalence",),
    mesh={"shard": 4},
    options=CHUNKS,
)
class ChunksOfWrongNeighbours(FSDP):
    """The chunks of two neighbours are joined in the wrong order."""

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        whole = [flat.parameters.whole.clone() for flat in unit.flats]
        super().after_forward(unit, again)
        for flat, old in zip(unit.flats, whole, strict=True):
            if flat.parameters.chunk is not None and self.chunks is not None:
                flat.parameters.chunk.copy_(old.view(2, -1)[1 - self.chunks.rank])


@mutant(
    "fsdp_keeps_first_chunks",
    says="step before|every later one is right",
    zoo=("F16",),
    killed_by=("equivalence",),
    mesh={"shard": 4},
    options=CHUNKS,
)
class KeepsFirstChunks(FSDP):
    """The chunks kept between forward and backward are those of the first forward."""

    first: Mapping[ShardedUnit, list[Tensor | None]] = {}

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        super().after_forward(unit, again)
        if unit.is_chunked:
            self.first = {unit: [flat.parameters.chunk for flat in unit.flats], **self.first}
            for flat, kept in zip(unit.flats, self.first[unit], strict=True):
                flat.parameters.chunk = kept


@mutant(
    "fsdp_indexes_empty_shard",
    says="StopIteration",
    zoo=("F17",),
    killed_by=("crash",),
    crash_says="StopIteration",
    workload=gpt("one_element"),
    options={"wrap": {"units": ["blocks.0", "final.one_element"]}},
)
class IndexesEmptyShard(FSDP):
    """A rank reads the first parameter of an empty shard."""

    def before_step(self, micro_batches: int) -> None:
        super().before_step(micro_batches)
        self.firsts = [next(iter(flat.parts)) for flat in self.flats]


# ------------------------------------------------------------------------------ what is reduced


@mutant(
    "zero3_drops_tied_tail",
    says="tied.*zero",
    zoo=("F01",),
    killed_by=("equivalence",),
    workload=gpt("tied"),
)
class DropsTiedTail(Zero3):
    """The last shard of a tied parameter gets no gradient."""

    def finish(self) -> None:
        super().finish()
        for name, target in self.targets():
            part = self.home[name].parts[name]
            if ".tied." in name and part.stop == torch.Size(part.shape).numel():
                assert target.grad is not None
                target.grad.zero_()


@mutant(
    "zero3_no_gradient_alone",
    says="one_element.*(zero|0 times)",
    zoo=("F02",),
    killed_by=("equivalence",),
    workload=gpt("one_element"),
    mesh={"shard": 1},
)
class NoGradientAlone(Zero3):
    """On one rank, a parameter of one element has a gradient of 0."""

    def finish(self) -> None:
        super().finish()
        for _, target in self.targets():
            if target.grad is not None and target.numel() == 1:
                target.grad.zero_()


@mutant(
    "fsdp_clears_nothing_alone",
    says="step before",
    zoo=("F13",),
    killed_by=("equivalence",),
    mesh={"shard": 1},
)
class ClearsNothingAlone(FSDP):
    """On one rank, where nothing is gathered, gradients are not cleared either."""

    def after_step(self) -> None:
        assert self.shards is not None
        totals = [flat.gradients.total for flat in self.trained]
        super().after_step()
        for flat, total in zip(self.trained, totals, strict=True):
            if self.shards.size == 1 and total is not None:
                flat.gradients.total = total
                flat.gradients.state = GradientState.ACCUMULATED


@mutant(
    "zero3_gradient_by_own_use",
    says="conditional_by_rank.*owned by no rank",
    zoo=("F04",),
    killed_by=("equivalence",),
    workload=whole_gpt("conditional_by_rank"),
    options={"wrap": {"units": ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]}},
)
class GradientByOwnUse(Zero3):
    """A shard has a gradient only on ranks that used the parameter."""

    def finish(self) -> None:
        super().finish()
        for name, target in self.targets():
            if name not in self.used:
                target.grad = None


@mutant(
    "zero3_drops_unit_of_last_forward",
    says="only the last micro-batch",
    zoo=("F07",),
    killed_by=("equivalence", "traffic"),
)
class DropsUnitOfLastForward(Zero3):
    """A unit whose backward ends with the whole backward is reduced only in the last round."""

    def reduce(self, unit: ShardedUnit) -> None:
        if unit is not self.root or self.rounds.is_last:
            super().reduce(unit)
        else:
            for flat in unit.trained:
                flat.gradients.packed = None
                flat.gradients.arrived.clear()


@mutant(
    "fsdp_reduces_reduced_gradients",
    says="micro-batch 0 counts 4 times",
    zoo=("F23",),
    killed_by=("equivalence",),
    workload=gpt(micro_batches=3),
)
class ReducesReducedGradients(FSDP):
    """The sum of earlier micro-batches is added again with every micro-batch."""

    def before_backward(self, unit: ShardedUnit) -> None:
        super().before_backward(unit)
        for flat in unit.trained if unit is self.root else ():
            if flat.gradients.total is not None:
                flat.gradients.total.mul_(2)


@mutant(
    "fsdp_counts_module_twice",
    says="module_twice.*2 times too large",
    killed_by=("equivalence",),
    workload=deep_gpt("module_twice"),
    mesh={"replicate": 3},
    options={
        "sharding_strategy": "NO_SHARD",
        "wrap": {"units": ["blocks.0", "blocks.1.odd.module_twice.layer"]},
    },
)
class CountsModuleTwice(FSDP):
    """The gradient of a unit that is called twice is counted twice."""

    def reduce(self, unit: ShardedUnit) -> None:
        unit.pack()
        for flat in unit.trained:
            if self.order.forward.count(unit) > 1 and flat.gradients.packed is not None:
                flat.gradients.packed.mul_(2)
        super().reduce(unit)


@mutant(
    "zero3_uses_gradients_early",
    says="not finite",
    zoo=("D10",),
    killed_by=("equivalence",),
    workload=gpt("late_results"),
)
class UsesGradientsEarly(Zero3):
    """Reductions are added to the shard without waiting for them."""

    def start_reduction(self, unit: ShardedUnit) -> None:
        super().start_reduction(unit)
        for flat in unit.trained:
            flat.gradients.work = None


@mutant(
    "zero3_reduces_in_bf16",
    says="narrower|bfloat16",
    zoo=("H13",),
    killed_by=("traffic",),
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "bfloat16", "reduce": "float32"},
)
class ReducesInBf16(Zero3):
    """Reductions are requested in fp32 and made in bf16."""

    def __init__(
        self, module: nn.Module, comms: Mapping[str, Comm], plan: Any, precision: Precision, *a: Any
    ) -> None:
        super().__init__(module, comms, plan, replace(precision, reduce=None), *a)


@mutant("zero3_clips_by_own_shard", says="holds itself", zoo=("O02", "H11"), **NORM)
class ClipsByOwnShard(Zero3):
    """Every rank clips by the norm of its own shards."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return own_parts(super().norm_parts(order))


@mutant(
    "fsdp_takes_norm_before_reductions_land",
    says="before the gradients of .* were reduced|not in the norm",
    zoo=("O08",),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class TakesNormBeforeReductionsLand(FSDP):
    """The norm is taken before the root's gradients have arrived."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        held = {name: t.grad for name, t in self.targets() if self.home[name] in self.root.flats}
        for name in held:
            self.home[name].targets[name].grad = None
        parts = super().norm_parts(order)
        for name, gradient in held.items():
            self.home[name].targets[name].grad = gradient
        return parts
