"""Faults where axes meet, planted in ``reference/hybrid``.

Each axis alone is right: the wrong group, an axis left out or counted twice, sums that two axes
make in the wrong order.  Axes of one rank are where shortcuts go wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm, Mesh
from shardproof.contract import MicroBatch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, Nothing, gpts
from shardproof.impls.reference.ddp import DDP
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import power_sum, total_norm
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state
from shardproof.impls.reference.hybrid import ReferenceHybrid
from shardproof.impls.reference.parts.reducers import Bucket, Reducer
from shardproof.impls.reference.pipeline.stages import Stages, Tied
from shardproof.impls.reference.units.step_shards import StepShards

ALL = {"pipe": 2, "replicate": 2, "tensor": 2}
#: Two small blocks.
gpt = gpts(width=16, heads=4, layers=2, global_batch=8)
mutant = declare.family(ReferenceHybrid, mesh=ALL, workload=gpt())


class _NoReduction(Reducer):
    def all_reduce(self, bucket: Bucket, comm: Comm) -> Nothing:
        return Nothing()


@mutant(
    "hybrid_stages_skip_the_data_axes",
    says="not (reduced|summed)|no such call is made",
    zoo=("P10",),
    killed_by=("equivalence", "replicas", "traffic"),
    mesh={"pipe": 2, "replicate": 2},
)
class StagesSkipTheDataAxes(ReferenceHybrid):
    """A stage of a pipeline does not reduce over the data axes."""

    def wrap(self, module: nn.Module) -> Handle:
        handle = super().wrap(module)
        if self.is_cut and isinstance(handle, DDP):
            handle.reducer = _NoReduction()
        return handle


@mutant(
    "hybrid_one_shard_group_is_no_group",
    says="not (reduced|summed)",
    zoo=("H01",),
    killed_by=("equivalence", "replicas", "traffic"),
    mesh={"replicate": 2, "shard": 1, "tensor": 2},
)
class OneShardGroupIsNoGroup(ReferenceHybrid):
    """A shard axis of one rank disables the sum over the replicas."""

    def wrap(self, module: nn.Module) -> Handle:
        handle = super().wrap(module)
        if self.mesh.axes.get("shard") == 1 and isinstance(handle, DDP):
            handle.reducer = _NoReduction()
        return handle


@mutant(
    "hybrid_starts_all_from_rank_0",
    says="from rank 0's part",
    zoo=("H05",),
    killed_by=("equivalence",),
)
class StartsAllFromRank0(ReferenceHybrid):
    """The data axes start from rank 0 of the world, so all tensor ranks get its part of the
    layers.
    """

    def wrap(self, module: nn.Module) -> Handle:
        handle = super().wrap(module)
        if "tensor" in self.mesh.axes:
            held = [t for n, t in named_state(module).items() if "mlp" in n]
            broadcast_tensors(held, self.mesh.comm("tensor"))
        return handle


@mutant(
    "hybrid_norm_over_replicas",
    says="counted on every rank|every copy",
    zoo=("H10",),
    killed_by=("norm",),
    optimizer=CLIP,
    mesh={"pipe": 2, "replicate": 2},
)
class NormOverReplicas(ReferenceHybrid):
    """The norm is also summed over the replicas, which hold the same gradients."""

    def norm(self) -> Tensor:
        return counted(self, lambda piece: True)


@mutant(
    "hybrid_norm_misses_the_stages",
    says="not over 'pipe'",
    zoo=("H11", "O02"),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
    mesh={"pipe": 2, "tensor": 2},
)
class NormMissesTheStages(ReferenceHybrid):
    """Each stage clips by the norm of its own gradients."""

    def norm(self) -> Tensor:
        return counted(self, lambda piece: piece.replica == 0, without="pipe")


@mutant(
    "hybrid_norm_misses_the_layers",
    says="not over 'tensor'|missing",
    zoo=("H11", "O05"),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
    mesh={"shard": 2, "tensor": 2},
    options={"data": "zero1"},
)
class NormMissesTheLayers(ReferenceHybrid):
    """The norm leaves out the parts of layers on other tensor ranks."""

    def norm(self) -> Tensor:
        return counted(self, lambda piece: piece.replica == 0, without="tensor")


@mutant(
    "hybrid_norm_counts_whole_tensors_on_each",
    says="every copy",
    zoo=("O04",),
    killed_by=("norm",),
    optimizer=CLIP,
    mesh={"shard": 2, "tensor": 2},
    options={"data": "zero2"},
)
class NormCountsWholeTensorsOnEach(ReferenceHybrid):
    """Tensors that are whole on every tensor rank enter the norm once per rank."""

    def norm(self) -> Tensor:
        copies = self.mesh.size("tensor")
        return counted(self, lambda piece: piece.replica < copies)


def counted(system: ReferenceHybrid, counts: Any, without: str = "") -> Tensor:
    """The norm of the pieces that satisfy ``counts``, over all axes but one."""
    own = torch.zeros((), dtype=torch.float64)
    for piece in system.local_state("gradients"):
        own += power_sum(piece.tensor) if counts(piece) else 0.0
    axes = tuple(a for a, n in system.mesh.axes.items() if n > 1 and a != without)
    return total_norm([(own, axes)], system.mesh.comm)


@mutant(
    "hybrid_clips_on_the_first_tensor_rank",
    says="rank 1 does not clip",
    zoo=("O01",),
    killed_by=("replicas", "equivalence"),
    optimizer=CLIP,
    mesh={"pipe": 2, "tensor": 2},
)
class ClipsOnTheFirstTensorRank(ReferenceHybrid):
    """Only the first rank of the tensor axis clips."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        if not self.mesh.coordinate["tensor"]:
            super().clip(norm, max_norm)


@mutant(
    "hybrid_loses_the_head_of_a_tie",
    says="several modules share.*embed.token.weight",
    zoo=("P11",),
    killed_by=("equivalence",),
    workload=gpt("tied_over_units"),
    mesh={"pipe": 2, "shard": 2},
    options={"data": "zero1"},
)
class LosesTheHeadOfATie(Stages):
    """The last stage's gradient of a tied tensor is lost on its way to the first."""

    def sum_tied(self, tied: Tied) -> None:
        if tied.copies.number and tied.stand_in.grad is not None:
            tied.stand_in.grad.zero_()
        super().sum_tied(tied)


@mutant(
    "hybrid_drops_later_windows",
    says="only the first window",
    killed_by=("equivalence",),
    workload=replace(gpt(), windows=2),
    mesh={"pipe": 2, "shard": 2},
    options={"data": "zero3"},
)
class DropsLaterWindows(ReferenceHybrid):
    """A step ends after its first window."""

    def backward(self, batch: Any) -> Tensor | None:
        return super().backward(replace(batch, windows=batch.windows[:1]))


@mutant(
    "hybrid_sums_norms_again",
    says="norm.*2 times too large .*'tensor'",
    zoo=("T08",),
    killed_by=("equivalence",),
    mesh={"shard": 2, "tensor": 2},
    options={"data": "zero1", "sequence_parallel": True},
)
class SumsAgain(ReferenceHybrid):
    """Gradients that the layers have already summed are summed over the tensor axis again."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        handle = super().transform(module, mesh, options)
        finish = handle.finish

        def again() -> None:
            finish()
            for piece in handle.pieces("gradients"):
                if "norm" in piece.name:
                    mesh.comm("tensor").all_reduce(piece.tensor)

        handle.finish = again  # type: ignore[method-assign]
        return handle


@mutant(
    "hybrid_loss_of_own_part",
    says="out of bounds",
    killed_by=("crash",),
    crash_says="is out of bounds",
    mesh={"pipe": 2, "tensor": 2},
)
class LossOfOwnPart(ReferenceHybrid):
    """In a pipeline, the last stage computes the loss of its own part of the vocabulary only."""

    def loss_of(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        return self.build.loss(self.precision.cast_outputs(outputs), micro)


@mutant(
    "hybrid_stage_stays_whole",
    says="parameters: .* held",
    zoo=("F19",),
    killed_by=("memory",),
    mesh={"pipe": 2, "shard": 2},
    options={"data": "fsdp"},
)
class StageStaysWhole(ReferenceHybrid):
    """The shards of a stage are gathered for the first step and never freed."""

    def wrap(self, module: nn.Module) -> Handle:
        handle = super().wrap(module)
        assert isinstance(handle, StepShards)
        for unit in handle.units:
            unit.free = lambda within=None: None  # type: ignore[method-assign]
        return handle


@mutant(
    "hybrid_norms_stay_partial",
    says="not summed",
    zoo=("T02",),
    killed_by=("equivalence",),
    mesh={"shard": 2, "tensor": 2},
    options={"data": "zero1", "sequence_parallel": True},
)
class NormsStayPartial(ReferenceHybrid):
    """Gradients of norms are reduced over the data axes but not summed over the tensor axis."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        handle = super().transform(module, mesh, options)
        assert self.layers is not None
        for hook in self.layers.hooks:
            hook.remove()
        return handle


@mutant(
    "hybrid_keeps_other_stages",
    says="parameters: .* held",
    killed_by=("memory",),
    mesh={"pipe": 2, "tensor": 2},
)
class KeepsOtherStages(ReferenceHybrid):
    """The layers of other stages are never freed."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        self.everything = module
        return super().transform(module, mesh, options)
