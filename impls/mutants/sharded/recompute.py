"""Faults of recomputation and of host memory, planted around ``reference/zero3``.

A group of units that is computed again must draw, read and gather what it did the first time, and
leave no trace; what rests on the host must come back, once, to every shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardproof.case import WorkloadSpec
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import gpt, whole_gpt
from shardproof.impls.reference.engine.recompute import Call
from shardproof.impls.reference.units.shard import FlatShard, ShardedUnit
from shardproof.impls.reference.zero3 import ReferenceZero3, Zero3

AGAIN: Mapping[str, Any] = {"recompute_every": 1}
HOST_STATE: Mapping[str, Any] = {"offload": "optimizer"}
HOST: Mapping[str, Any] = {"offload": "parameters"}
mutant = declare.family(ReferenceZero3, mesh={"shard": 2}, options=AGAIN)


# ------------------------------------------------------------------------------- computed again


@mutant(
    "recompute_draws_fresh_masks",
    says="mask|dropout",
    zoo=("O22",),
    killed_by=("equivalence",),
    workload=gpt("dropout_stateful"),
)
class DrawsFreshMasks(Call):
    """Dropout draws different masks in the recomputed forward."""

    def repeat(self) -> None:
        # The same foreign state for every call: other masks, but no two runs differ.
        self.draws = [Generator().manual_seed(7).get_state() for _ in self.group.generators]
        super().repeat()


@mutant(
    "recompute_keeps_saved_tensors",
    says="activations, .* without recomputation",
    killed_by=("relations",),
    expect={"relation": "recompute"},
)
class KeepsSavedTensors(Call):
    """Saved tensors are recomputed although they were also kept."""

    def forgetting(self) -> saved_tensors_hooks:
        hooks = super().forgetting()
        forget, self.hoard = hooks.pack_hook, list[Tensor]()

        def pack(tensor: Tensor) -> int:
            # Numbers stay right; only the bytes of activations can tell.
            self.hoard.append(tensor.detach())
            return int(forget(tensor))

        return saved_tensors_hooks(pack, hooks.unpack_hook)


@mutant(
    "recompute_rewinds_generators",
    says="mask|dropout|generator",
    zoo=("O22",),
    killed_by=("equivalence",),
    workload=gpt("dropout_stateful"),
)
class RewindsGenerators(Call):
    """After a recomputation, generators are not restored, so masks repeat."""

    def repeat(self) -> None:
        super().repeat()
        for generator, state in zip(self.group.generators, self.draws, strict=True):
            # To where the forward began, so that the next one draws its masks again.
            generator.set_state(state)


@mutant(
    "recompute_updates_buffers_twice",
    says="counted every micro-batch twice",
    killed_by=("equivalence",),
    workload=WorkloadSpec("digits_cnn"),
)
class UpdatesBuffersTwice(Call):
    """Batch norms count a micro-batch again when it is recomputed."""

    @contextmanager
    def as_before(self) -> Iterator[None]:
        yield


@mutant(
    "recompute_takes_buffers_back",
    says="still has its value from before",
    killed_by=("equivalence",),
    workload=WorkloadSpec("digits_cnn"),
)
class TakesBuffersBack(Call):
    """Buffers are reset to their values from before the recomputed forward."""

    def repeat(self) -> None:
        super().repeat()
        # Undoes the running statistics of every forward since.
        self.buffers.bind(self.buffers.copies)


@mutant("recompute_from_changed_input", says="float32", killed_by=("equivalence",))
class FromChangedInput(Call):
    """A unit is recomputed from an input that was rounded to fp32."""

    def repeat(self) -> None:
        for tensor, _ in self.inputs:
            # fp64 has digits to lose; where fp32 is computed with this would change nothing.
            if tensor.is_floating_point():
                tensor.data = tensor.data.float().double()
        super().repeat()


@mutant("recompute_gathers_twice", says="all_gather: 297,728", zoo=("F26",), killed_by=("traffic",))
class GathersTwice(Zero3):
    """A unit is gathered for its recomputation and once more for its backward."""

    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        if again:
            unit.free()
        super().before_forward(unit, again)


@mutant(
    "recompute_keeps_gathered_weights",
    says="backward: parameters: .* at the peak",
    zoo=("F26",),
    killed_by=("memory",),
    workload=whole_gpt(layers=5),
)
class KeepsGatheredWeights(Zero3):
    """Recomputed units stay whole until backward has ended."""

    again: frozenset[ShardedUnit] = frozenset()

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        self.again = self.again | {unit} if again else frozenset()
        super().after_forward(unit, again)

    def after_backward(self, unit: ShardedUnit) -> None:
        super().after_backward(unit) if unit not in self.again else self.reduce(unit)


@mutant(
    "recompute_gathers_late",
    says="2 gathers are issued while .*4 promised",
    zoo=("F25",),
    killed_by=("overlap",),
)
class GathersLate(Zero3):
    """No recomputed unit is gathered ahead of its backward."""

    def before_backward(self, unit: ShardedUnit) -> None:
        self.order.backward = []
        super().before_backward(unit)


@mutant("recompute_is_off", says="recomputed 0 times", killed_by=("active",))
class IsOff(ReferenceZero3):
    """Nothing is recomputed, although it was requested."""

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, {**options, "recompute_every": 0})


# ---------------------------------------------------------------------------------- on the host


@mutant(
    "offload_forgets_one_shard",
    says="no update was made .*embed.token.weight",
    killed_by=("equivalence",),
    options=HOST_STATE,
)
class ForgetsOneShard(ReferenceZero3):
    """The updated master of one parameter is not copied back to the device."""

    def update(self) -> None:
        working = self.updated[0]
        before = working.detach().clone()
        super().update()
        # One parameter of all: the norms of the update hardly differ.
        with torch.no_grad():
            working.copy_(before)


@mutant(
    "offload_gathers_stale_copy",
    says="parameters before the last update",
    zoo=("F16",),
    killed_by=("equivalence", "memory"),
    options=HOST,
)
class GathersStaleCopy(Zero3):
    """Gathers read device copies of the shards that were made before the first step."""

    copies: Mapping[FlatShard, Tensor] = {}

    def gather(self, unit: ShardedUnit) -> None:
        own = {flat: flat.shard for flat in unit.flats}
        # The first copy wins: it is what the shard held before any update.
        self.copies = {flat: shard.clone() for flat, shard in own.items()} | {**self.copies}
        for flat in own:
            flat.parameters.shard = self.copies[flat]
        super().gather(unit)
        for flat, shard in own.items():
            flat.parameters.shard = shard
