"""Faults that need several axes at once: a wrong group, a lost window, parts joined wrongly.

Planted in ``pytorch/hybrid`` on meshes of two and three axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardproof.comm import Mesh
from shardproof.contract import MicroBatch, Piece
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import NORM, gpts
from shardproof.impls.pytorch.hybrid import Hybrid, sharded
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state, named_state

#: Two blocks that two ranks of any axis can share.
gpt = gpts(layers=2, width=24, heads=12, seq=12, vocab=96, global_batch=12)
mutant = declare.family(Hybrid, mesh={"pipe": 2, "shard": 2}, workload=gpt())


@mutant("torch_hybrid_norm_of_own_stage", says="summed over 'shard'", zoo=("H11",), **NORM)
class NormOfOwnStage(Hybrid):
    """The norm is summed over shards, not over the stages."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(list(gradients), foreach=False).full_tensor().double()  # type: ignore[attr-defined]


@mutant(
    "torch_hybrid_loses_earlier_windows",
    says="micro-batch 0 is missing",
    killed_by=("equivalence",),
    workload=gpt("incomplete_window", micro_batches=4, windows=2),
)
class LosesEarlierWindows(Hybrid):
    """A window of a different size drops the gradients of earlier windows, as torch's first call
    does.
    """

    def run(self, window: tuple[MicroBatch, ...], call: Callable[..., Any]) -> list[Tensor]:
        self.is_fresh = False
        return super().run(window, call)


@mutant(
    "torch_hybrid_averages_over_shards",
    says="2 times too small .*'shard'",
    killed_by=("equivalence",),
)
class AveragesOverShards(Hybrid):
    """fully_shard divides by the data ranks, its default."""

    def prepare(self, part: nn.Module) -> nn.Module:
        prepared = super().prepare(part)
        for unit in sharded(prepared):
            unit.set_gradient_divide_factor(float(self.mesh.size("shard")))
        return prepared


@mutant(
    "torch_hybrid_starts_along_one_axis",
    says="rank 2 starts",
    killed_by=("equivalence",),
    mesh={"pipe": 2, "tensor": 2},
)
class StartsAlongOneAxis(Hybrid):
    """Rank 0's state is broadcast along the tensor axis only."""

    def begin(self, whole: nn.Module, state: Mapping[str, Tensor] | None, mesh: Mesh) -> None:
        own = {name: tensor.detach().clone() for name, tensor in named_state(whole).items()}
        super().begin(whole, state, mesh)
        load_state(whole, own if state is None else state)
        broadcast_tensors(list(named_state(whole).values()), mesh.comm("tensor"))


@mutant(
    "torch_hybrid_copies_over_tensor_peers",
    says="from rank 0's part",
    zoo=("H05",),
    killed_by=("equivalence",),
    mesh={"pipe": 1, "shard": 1, "tensor": 2},
)
class CopiesOverTensorPeers(Hybrid):
    """Values that must be equal over data ranks are copied after the split, and over tensor ranks
    too.
    """

    def split(self, part: nn.Module, units: Sequence[str]) -> dict[str, list[int]]:
        orders = super().split(part, units)
        held = [p.to_local().detach() for p in part.parameters() if isinstance(p, DTensor)]
        broadcast_tensors(held, self.mesh.comm("tensor"))
        return orders


@mutant(
    "torch_hybrid_blocks_not_strided",
    says="rank 1 starts .* from rank 2's part",
    killed_by=("equivalence",),
    mesh={"pipe": 1, "shard": 2, "tensor": 2},
)
class BlocksNotStrided(Hybrid):
    """Rows that both axes cut are reported as if the shard axis had cut them first."""

    def pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        pieces = super().pieces(name, tensor)
        if not isinstance(tensor, DTensor) or not name.endswith("mlp.up.weight"):
            return pieces
        place = 2 * self.mesh.coordinate["shard"] + self.mesh.coordinate["tensor"]
        rows = len(pieces[0].tensor)
        span = ((place * rows, (place + 1) * rows), *(pieces[0].slices or ())[1:])
        return [Piece(name, pieces[0].global_shape, pieces[0].tensor, slices=span)]


@mutant("torch_hybrid_gathers_again", says="all_gather: .* 3 times as many", killed_by=("traffic",))
class GathersAgain(Hybrid):
    """Units are freed after every forward: numbers are right, traffic is higher."""

    def prepare(self, part: nn.Module) -> nn.Module:
        prepared = super().prepare(part)
        for unit in sharded(prepared):
            unit.set_reshard_after_forward(True)
        return prepared
