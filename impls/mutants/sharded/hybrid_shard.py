"""Faults of meshes with two axes: HYBRID_SHARD, sharded within a group, replicated between groups.

Planted in ``reference/fsdp`` on meshes of 2 x 2, of 2 x 1 (a shard group of one rank is where
shortcuts go wrong) and of 2 x 3 (axes of different size, where a rank is no size).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import Batch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.sharded.precision import SCALED
from shardproof.impls.mutants.triggers import NORM, gpt, overflows_here
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import NormPart
from shardproof.impls.reference.engine.scaler import LossScaler
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.fsdp import ReferenceFSDP
from shardproof.impls.reference.fsdp.schedule import FSDP
from shardproof.impls.reference.units.gradients import GradientState
from shardproof.impls.reference.units.shard import FlatShard, ShardedUnit

mutant = declare.family(
    ReferenceFSDP,
    mesh={"replicate": 2, "shard": 2},
    options={"sharding_strategy": "HYBRID_SHARD"},
)


@mutant(
    "hybrid_never_crosses",
    says="not (reduced|summed)|data coordinate 2 is missing",
    zoo=("D17",),
    killed_by=("equivalence", "replicas", "traffic"),
)
class NeverCrosses(FSDP):
    """Gradients are not summed over the replicas."""

    def reduce_over_replicas(self, flat: FlatShard) -> None:
        pass


@mutant(
    "hybrid_alone_in_its_shard_group",
    says="not (reduced|summed)|data coordinate 2 is missing",
    zoo=("H01",),
    killed_by=("equivalence", "replicas", "traffic"),
    mesh={"replicate": 2, "shard": 1},
)
class AloneInItsShardGroup(FSDP):
    """A shard group of one rank disables the sum over the replicas."""

    def reduce_over_replicas(self, flat: FlatShard) -> None:
        if flat.comm is not None:
            super().reduce_over_replicas(flat)


@mutant(
    "hybrid_crosses_over_shards",
    says="axis replicate, all_reduce: .* no such call is made",
    zoo=("H08",),
    killed_by=("equivalence", "replicas", "traffic"),
)
class CrossesOverShards(FSDP):
    """Shards are summed over the shard group, not over the replicas."""

    def reduce_over_replicas(self, flat: FlatShard) -> None:
        assert self.shards is not None
        flat.gradients.reduce_over_replicas(self.shards, self.reducer, self.step)


@mutant(
    "hybrid_crosses_last_micro_batch",
    says="micro-batch 0 of data coordinate",
    killed_by=("equivalence", "replicas"),
)
class CrossesLastMicroBatch(FSDP):
    """Only the last micro-batch's gradients are summed over the replicas."""

    def wait_and_accumulate(self) -> None:
        ending = [flat.gradients for unit, last in self.in_flight if last for flat in unit.trained]
        early = [gradients.total for gradients in ending]
        for gradients in ending:
            gradients.total = None
        super().wait_and_accumulate()
        for gradients, total in zip(ending, early, strict=True):
            gradients.finalize()
            gradients.state = GradientState.OVER_REPLICAS
            if gradients.total is not None and total is not None:
                gradients.total.add_(total)


@mutant(
    "hybrid_crosses_every_micro_batch",
    says="axis replicate, all_reduce: .* 2 times as many",
    killed_by=("traffic",),
)
class CrossesEveryMicroBatch(FSDP):
    """Running sums are averaged over the replicas after every micro-batch: same numbers, more
    traffic.
    """

    def wait_and_accumulate(self) -> None:
        early = [flat for unit, last in self.in_flight if not last for flat in unit.trained]
        super().wait_and_accumulate()
        for flat in early:
            self.reduce_over_replicas(flat)
            flat.gradients.finalize()
            flat.gradients.state = GradientState.ACCUMULATED
            flat.gradients.total.div_(2) if flat.gradients.total is not None else None


@mutant(
    "hybrid_crosses_before_accumulation",
    says="micro-batch 0 counts 2 times",
    zoo=("F23",),
    killed_by=("equivalence", "traffic"),
)
class CrossesBeforeAccumulation(FSDP):
    """Running sums, already summed over the replicas, are summed again in the last round."""

    def wait_and_accumulate(self) -> None:
        early = [flat for unit, last in self.in_flight if not last for flat in unit.trained]
        super().wait_and_accumulate()
        for flat in early:
            self.reduce_over_replicas(flat)
            flat.gradients.finalize()
            flat.gradients.state = GradientState.ACCUMULATED


@mutant(
    "hybrid_crosses_whole_gradients",
    says="axis replicate, all_reduce: .* 2 times",
    killed_by=("traffic",),
    options={"sharding_strategy": "HYBRID_SHARD", "accumulate_without_communication": True},
)
class CrossesWholeGradients(FSDP):
    """Whole gradients are summed over the replicas, then scattered: R times the bytes."""

    def start_reduction(self, unit: ShardedUnit) -> None:
        unit.pack()
        for flat in unit.trained:
            if flat.gradients.packed is not None and self.replicas is not None:
                self.replicas.all_reduce(flat.gradients.packed)
        super().start_reduction(unit)

    def reduce_over_replicas(self, flat: FlatShard) -> None:
        pass


@mutant(
    "hybrid_is_flat",
    says="axis replicate, all_reduce: .* no such call is made",
    zoo=("H02",),
    killed_by=("traffic", "memory", "active"),
)
class IsFlat(ReferenceFSDP):
    """The replicas are ignored: one shard group has all ranks, as in FULL_SHARD."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        flat = Mesh({"shard": mesh.world}, device=mesh.device, ranks=mesh.ranks)
        return super().transform(module, flat, {**options, "sharding_strategy": "FULL_SHARD"})


@mutant(
    "hybrid_mixes_up_axes",
    says="axis replicate, all_gather: .* no such call is promised",
    zoo=("H08",),
    killed_by=("traffic", "memory", "active"),
    mesh={"replicate": 2, "shard": 3},
)
class MixesUpAxes(FSDP):
    """Parameters are sharded over the replicate axis and replicated over the shard axis."""

    def __init__(self, module: nn.Module, comms: Mapping[str, Comm], *rest: Any) -> None:
        swapped = {"replicate": comms["shard"], "shard": comms["replicate"]}
        super().__init__(module, swapped, *rest)


@mutant(
    "hybrid_divides_by_rank",
    says="1.5 times too small",
    zoo=("H19",),
    killed_by=("equivalence",),
    mesh={"replicate": 2, "shard": 3},
)
class DividesByRank(FSDP):
    """The sum over replicas is scaled by the size of its axis divided by that of another axis."""

    def finish(self) -> None:
        super().finish()
        assert self.shards is not None and self.replicas is not None
        self.scale_gradients(torch.tensor(self.replicas.size / self.shards.size))


@mutant("hybrid_replicas_start_apart", says="rank 2 starts", killed_by=("equivalence", "replicas"))
class ReplicasStartApart(FSDP):
    """Initial values are broadcast within shard groups only."""

    def __init__(self, module: nn.Module, comms: Mapping[str, Comm], *rest: Any) -> None:
        broadcast_tensors(list(named_state(module).values()), comms["shard"])
        own = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
        super().__init__(module, comms, *rest)
        for flat in self.flats:
            for name, part in flat.parts.items():
                part.of_shard(flat.shard).copy_(part.of_tensor(own[name]))


@mutant("hybrid_norm_counts_replicas", says="'replicate'.*every|every copy", zoo=("H10",), **NORM)
class NormCountsReplicas(FSDP):
    """The norm is summed over shards and replicas."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        [(total, axes)] = super().norm_parts(order)
        assert self.replicas is not None
        self.replicas.all_reduce(total)
        return [(total, axes)]


@mutant("hybrid_norm_over_wrong_axis", says="summed over 'replicate'", zoo=("H11",), **NORM)
class NormOverWrongAxis(FSDP):
    """The norm is summed over the replicas, not over the shards."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return [(total, ("replicate",)) for total, _ in super().norm_parts(order)]


@mutant(
    "hybrid_crosses_in_bf16",
    says="axis replicate, all_reduce: .* narrower",
    zoo=("H13",),
    killed_by=("traffic",),
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "bfloat16", "reduce": "float32"},
)
class CrossesInBf16(FSDP):
    """Reductions are requested in fp32; those over the replicas are made in bf16."""

    def reduce_over_replicas(self, flat: FlatShard) -> None:
        flat.gradients.reduced_in = torch.bfloat16
        super().reduce_over_replicas(flat)
        flat.gradients.reduced_in = torch.float32


@mutant(
    "hybrid_narrow_partial_sums",
    says="bfloat16",
    zoo=("H14", "O13"),
    killed_by=("equivalence",),
    workload=gpt(micro_batches=6),
    lane="working_precision",
    dtype="float32",
    precision={"reduce": "float32"},
)
class NarrowPartialSums(FSDP):
    """Sums of micro-batches are kept in bf16 until they are reduced over the replicas."""

    def wait_and_accumulate(self) -> None:
        super().wait_and_accumulate()
        for flat in self.trained:
            if flat.gradients.total is not None:
                flat.gradients.total.copy_(flat.gradients.total.bfloat16())


@mutant(
    "hybrid_normalises_by_local_counts",
    says="data coordinate counts the same",
    zoo=("H17",),
    killed_by=("equivalence",),
    workload=gpt("unequal_tokens"),
)
class NormalisesByLocalCounts(ReferenceFSDP):
    """The loss is divided by the rank's own token count and then averaged over the ranks."""

    def backward(self, batch: Batch) -> Tensor | None:
        micro_batches = batch.micro_batches
        own = torch.stack([micro.weights.sum() for micro in micro_batches]).sum()
        whole, self.loss = self.loss, lambda micro: whole(micro) / (own * self.mesh.world)  # type: ignore[method-assign]
        loss = super().backward(batch)
        self.loss = whole  # type: ignore[method-assign]
        return loss


@mutant(
    "hybrid_overflow_along_one_axis",
    says="made the update, the oracle did not",
    zoo=("O11",),
    killed_by=("loss_scale", "equivalence"),
    mesh={"replicate": 2, "shard": 3},
    workload=SCALED["workload"],
    optimizer=SCALED["optimizer"],
    steps=SCALED["steps"],
)
class OverflowAlongOneAxis(LossScaler):
    """Ranks agree on an overflow with their replicas, but not with the other shards."""

    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        anywhere = torch.tensor(int(overflows_here(gradients)), dtype=torch.int32)
        self.mesh.comm("replicate").all_reduce(anywhere, "max")
        return bool(anywhere)
