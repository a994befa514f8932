"""Faults of ZeRO-3 and FSDP: units too large, too small, or too many at once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.mutants.at_scale.sums import FEW, GatheredIfMany, WholeIfFew
from shardproof.impls.mutants.at_scale.zero import in_32_bits
from shardproof.impls.reference.fsdp import ReferenceFSDP
from shardproof.impls.reference.fsdp.schedule import FSDP
from shardproof.impls.reference.units.shard import FlatShard, ShardedUnit
from shardproof.impls.reference.units.wrapped import WrappedModel
from shardproof.impls.reference.zero3 import ReferenceZero3, Zero3

zero3_at_scale = declare.family(ReferenceZero3, mesh={"shard": 4096})
fsdp_at_scale = declare.family(ReferenceFSDP, mesh={"shard": 16384})


@zero3_at_scale(
    "zero3_prefetches_by_ranks",
    says="peak in forward: parameters: .* bytes promised",
    shape={"layers": 6},
)
class PrefetchesByRanks(Zero3):
    """Forward prefetches as many units as there are groups of 8 ranks."""

    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        assert self.shards is not None
        super().before_forward(unit, again)
        for more in range(max(1, self.shards.size // 8) - 1) if not again else ():
            if unit.number + 2 + more < len(self.units):
                self.gather(self.units[unit.number + 2 + more])


class KeepsWhole(WrappedModel):
    """Some layouts stay whole between steps, and are gathered in place after an update."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = [flat for flat in self.flats if self.keeps(flat)]
        for flat in self.kept:
            flat.parameters.gather()
            flat.parameters.wait()
            flat.parameters.is_resident = True

    @abstractmethod
    def keeps(self, flat: FlatShard) -> bool:
        """Whether ``flat`` stays whole."""

    def after_update(self) -> None:
        """Gather what is kept."""
        assert self.shards is not None
        for flat in self.kept:
            self.shards.all_gather(flat.parameters.whole, flat.shard)


@zero3_at_scale(
    "zero3_keeps_large_embeddings_whole",
    says="after_update: parameters: .* bytes promised",
    shape={"layers": 1, "hidden": 4096, "vocab": 128_256},
)
class KeepsLargeEmbeddingsWhole(KeepsWhole, Zero3):
    """A unit of more than 2^29 elements, as an embedding and a head make it, is not sharded."""

    def keeps(self, flat: FlatShard) -> bool:
        return flat.layout.numel > 2**29


@fsdp_at_scale(
    "fsdp_keeps_small_units_whole",
    says="after_update: parameters: .* bytes promised",
    shape={"hidden": 512},
)
class KeepsSmallUnitsWhole(KeepsWhole, FSDP):
    """A unit with fewer than 1,024 elements a rank is not sharded."""

    def keeps(self, flat: FlatShard) -> bool:
        return flat.layout.shard_numel < FEW


@fsdp_at_scale(
    "fsdp_keeps_offsets_in_32_bits",
    says="after_update: optimizer state: .* bytes promised",
    mesh={"shard": 512},
    shape={"layers": 1, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248},
)
class KeepsOffsetsIn32Bits(FSDP):
    """The offset of a part in its unit is kept in 32 bits; if it overflows below 0, no rank
    owns the part.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.shards is not None
        for flat in self.flats:
            start, _ = flat.layout.shard_range(self.shards.rank)
            for name, part in [*flat.parts.items()]:
                if in_32_bits(start + part.offset) < 0:
                    del flat.parts[name], flat.targets[name]


@fsdp_at_scale(
    "fsdp_sums_small_units_whole",
    says="reduce-scatter along shard: .* bytes promised",
    shape={"hidden": 512},
)
class SumsSmallUnitsWhole(FSDP):
    """A unit with fewer than 1,024 elements a rank is summed by an all-reduce."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reducer = WholeIfFew()


@fsdp_at_scale(
    "fsdp_lists_gradients_of_micro_batches",
    says="after_update: activations and temporaries: .* bytes promised",
    mesh={"shard": 64},
    options={"accumulate_without_communication": True},
    micro_batches=8,
)
class ListsGradientsOfMicroBatches(FSDP):
    """With more than 4 micro-batches, copies of whole gradients are listed until the step ends."""

    listed: tuple[Tensor, ...] = ()

    def after_backward(self, unit: ShardedUnit) -> None:
        super().after_backward(unit)
        packed = (flat.gradients.packed for flat in unit.trained if self.rounds.total > 4)
        self.listed = (*self.listed, *(whole.clone() for whole in packed if whole is not None))

    def after_step(self) -> None:
        super().after_step()
        self.listed = ()


@fsdp_at_scale(
    "fsdp_gathers_sums_of_replicas",
    says="all-gather along replicate: 0 bytes promised",
    mesh={"replicate": 256, "shard": 8},
    options={"sharding_strategy": "HYBRID_SHARD"},
)
class GathersSumsOfReplicas(FSDP):
    """Over more than 8 replicas, shards of gradients are gathered, and added in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reducer = GatheredIfMany()
