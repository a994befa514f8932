"""Faults that need several axes at once: a wrong group, a lost window, parts put together wrongly.

Planted in ``pytorch/hybrid`` on meshes of two and three axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import MicroBatch, Piece
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.data.ddp import CLIP
from shardproof.impls.pytorch.hybrid import Hybrid, sharded
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state, named_state

SIZES = {"layers": 2, "width": 24, "heads": 12, "seq": 12, "vocab": 96}


def gpt(*traits: str, micro_batches: int = 2, windows: int = 1) -> WorkloadSpec:
    """A GPT of two blocks that two ranks of any axis can share."""
    return WorkloadSpec(
        "charnames_gpt",
        params=SIZES,
        global_batch=12,
        micro_batches=micro_batches,
        windows=windows,
        traits=traits,
    )


mutant = partial(
    declare.mutant,
    parent=Hybrid,
    parent_name="pytorch/hybrid",
    mesh={"pipe": 2, "shard": 2},
    workload=gpt(),
)


@mutant(
    "torch_hybrid_norm_of_own_stage",
    zoo=("H11",),
    summary="the norm is summed over shards, not over the stages",
    killed_by=("norm", "equivalence", "traffic"),
    optimizer=CLIP,
)
class NormOfOwnStage(Hybrid):
    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(list(gradients), foreach=False).full_tensor().double()  # type: ignore[attr-defined]


@mutant(
    "torch_hybrid_loses_earlier_windows",
    summary="a window of another size drops gradients of those before: torch's first call does",
    killed_by=("equivalence",),
    workload=gpt("incomplete_window", micro_batches=4, windows=2),
)
class LosesEarlierWindows(Hybrid):
    def run(self, window: tuple[MicroBatch, ...], call: Callable[..., Any]) -> list[Tensor]:
        self.is_fresh = False
        return super().run(window, call)


@mutant(
    "torch_hybrid_averages_over_shards",
    summary="fully_shard divides by the data ranks, as it does unless told otherwise",
    killed_by=("equivalence",),
)
class AveragesOverShards(Hybrid):
    def prepare(self, part: nn.Module) -> nn.Module:
        prepared = super().prepare(part)
        for unit in sharded(prepared):
            unit.set_gradient_divide_factor(float(self.mesh.size("shard")))
        return prepared


@mutant(
    "torch_hybrid_starts_along_one_axis",
    summary="rank 0's state goes along the tensor axis only",
    killed_by=("equivalence",),
    mesh={"pipe": 2, "tensor": 2},
)
class StartsAlongOneAxis(Hybrid):
    def begin(self, whole: nn.Module, state: Mapping[str, Tensor] | None, mesh: Mesh) -> None:
        own = {name: tensor.detach().clone() for name, tensor in named_state(whole).items()}
        super().begin(whole, state, mesh)
        load_state(whole, own if state is None else state)
        broadcast_tensors(list(named_state(whole).values()), mesh.comm("tensor"))


@mutant(
    "torch_hybrid_copies_over_tensor_peers",
    zoo=("H05",),
    summary="what is to be equal over data ranks is copied after the split, over tensor ranks, too",
    killed_by=("equivalence",),
    mesh={"pipe": 1, "shard": 1, "tensor": 2},
)
class CopiesOverTensorPeers(Hybrid):
    def split(self, part: nn.Module, units: Sequence[str]) -> dict[str, list[int]]:
        orders = super().split(part, units)
        held = [p.to_local().detach() for p in part.parameters() if isinstance(p, DTensor)]
        broadcast_tensors(held, self.mesh.comm("tensor"))
        return orders


@mutant(
    "torch_hybrid_blocks_not_strided",
    summary="rows that both axes cut are told as if the shard had cut them first",
    killed_by=("equivalence",),
    mesh={"pipe": 1, "shard": 2, "tensor": 2},
)
class BlocksNotStrided(Hybrid):
    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        found = super().pieces(name, tensor)
        if not isinstance(tensor, DTensor) or not name.endswith("mlp.up.weight"):
            return found
        place = 2 * self.mesh.coordinate["shard"] + self.mesh.coordinate["tensor"]
        rows = len(found[0].tensor)
        span = ((place * rows, (place + 1) * rows), *(found[0].slices or ())[1:])
        return [Piece(name, found[0].global_shape, found[0].tensor, slices=span)]


@mutant(
    "torch_hybrid_gathers_again",
    summary="units are freed after every forward: right numbers, more traffic",
    killed_by=("traffic",),
)
class GathersAgain(Hybrid):
    def prepare(self, part: nn.Module) -> nn.Module:
        prepared = super().prepare(part)
        for unit in sharded(prepared):
            unit.set_reshard_after_forward(True)
        return prepared
