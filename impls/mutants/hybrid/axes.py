"""Faults of one axis that show only in combination with another, planted in ``reference/hybrid``.

Scales that count the ranks of one axis, sums along its neighbour, layouts that two stages do not
share, and memory that one axis gives up and another keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Batch, MicroBatch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.hybrid.hybrid import gpt
from shardproof.impls.mutants.triggers import CLIP
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import power_sum, total_norm
from shardproof.impls.reference.hybrid import ReferenceHybrid
from shardproof.impls.reference.pipeline.stages import Stages, Tied
from shardproof.impls.reference.tensor.operators import all_reduce

mutant = declare.family(ReferenceHybrid, workload=gpt())


@mutant(
    "hybrid_keeps_whole_layers",
    says="held, 0 to 80 promised",
    zoo=("F19",),
    killed_by=("memory",),
    mesh={"pipe": 2, "tensor": 2},
)
class KeepsWholeLayers(ReferenceHybrid):
    """The uncut layers stay in memory in addition to their tensor-parallel parts."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        self.uncut = [parameter.detach().clone() for parameter in module.parameters()]
        return super().transform(module, mesh, options)


@mutant(
    "hybrid_keeps_what_shards_were_cut_from",
    says="held, 0 to 320 promised",
    zoo=("F19",),
    killed_by=("memory",),
    mesh={"pipe": 2, "shard": 2},
    options={"data": "zero3"},
)
class KeepsWholeStages(ReferenceHybrid):
    """Each rank keeps the whole stage in addition to its shards."""

    def wrap(self, module: nn.Module) -> Handle:
        whole = [parameter.detach().clone() for parameter in module.parameters()]
        handle = super().wrap(module)
        vars(handle)["whole"] = whole
        return handle


@mutant(
    "hybrid_ties_in_own_offsets",
    says="several modules share.*embed.token.weight",
    zoo=("H04",),
    killed_by=("equivalence",),
    workload=gpt("tied_over_units"),
    mesh={"pipe": 2, "shard": 3},
    options={"data": "zero3"},
)
class TiesInOwnOffsets(Stages):
    """A stage reads the gradient of a tied tensor at its offset in its own flat layout."""

    def sum_tied(self, tied: Tied) -> None:
        gradient = tied.stand_in.grad
        if tied.copies.number and gradient is not None:
            tied.stand_in.grad = gradient.reshape(-1).roll(gradient.shape[-1]).view_as(gradient)
        super().sum_tied(tied)


@mutant(
    "hybrid_compensates_for_one_axis",
    says="2 times too small .*'shard'",
    zoo=("H07",),
    killed_by=("equivalence",),
    mesh={"replicate": 2, "shard": 2, "tensor": 2},
)
class CompensatesForOneAxis(ReferenceHybrid):
    """A mean over all data ranks is multiplied by the replicas only, not by the shards."""

    def backward(self, batch: Batch) -> Tensor | None:
        weigh = self.mesh.size("replicate") / self.mesh.size("replicate", "shard")
        windows = tuple(
            tuple(replace(micro, weights=micro.weights * weigh) for micro in window)
            for window in batch.windows
        )
        loss = super().backward(replace(batch, windows=windows))
        return loss if loss is None else loss / weigh


@mutant(
    "hybrid_same_masks_on_replicas",
    says="mask|dropout",
    zoo=("T14",),
    killed_by=("equivalence",),
    workload=gpt("dropout_counter"),
    mesh={"replicate": 2, "tensor": 2},
)
class SameMasksOnReplicas(ReferenceHybrid):
    """Dropout draws by the position in the rank's own share, so every data rank has the same
    masks.
    """

    def loss(self, micro: MicroBatch) -> Tensor:
        inputs = micro.inputs.clone()
        inputs[:, -1] = torch.arange(len(inputs))
        return super().loss(replace(micro, inputs=inputs))


@mutant(
    "hybrid_sums_terms_over_the_shards",
    says="axis shard, all_reduce.*no such call is promised",
    zoo=("H08",),
    killed_by=("equivalence", "traffic"),
    mesh={"shard": 2, "tensor": 2},
    options={"data": "zero1", "sequence_parallel": True},
)
class SumsTermsOverTheShards(ReferenceHybrid):
    """Under sequence parallelism, gradients of norms are summed over the shards instead of the
    tensor axis.
    """

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        handle = super().transform(module, mesh, options)
        assert self.layers is not None
        for hook in self.layers.hooks:
            hook.remove()
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.register_hook(lambda g: all_reduce(g, mesh.comm("shard")))
        return handle


@mutant(
    "hybrid_adds_norms_of_stages",
    says="added over 'pipe'",
    zoo=("O07",),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
    mesh={"pipe": 2, "tensor": 2},
)
class AddsNormsOfStages(ReferenceHybrid):
    """The norms of the stages are added instead of their squares."""

    def norm(self) -> Tensor:
        held = [p.tensor for p in self.local_state("gradients") if p.replica == 0]
        total = torch.stack([power_sum(tensor) for tensor in held]).sum()
        self.mesh.comm("tensor").all_reduce(total)
        total = total.sqrt()
        self.mesh.comm("pipe").all_reduce(total)
        return total


@mutant(
    "hybrid_reduces_after_every_window",
    says="after its bucket was sent",
    zoo=("F23",),
    killed_by=("crash",),
    crash_says="received a second gradient in one micro-batch",
    workload=replace(gpt(), windows=2),
    mesh={"pipe": 2, "replicate": 2},
)
class ReducesAfterEveryWindow(ReferenceHybrid):
    """After every window, the data axes reduce again the gradients that they have already
    reduced.
    """

    def backward(self, batch: Batch) -> Tensor | None:
        losses: list[Tensor] = []
        for window in batch.windows:
            schedule = ReferenceHybrid.schedule(self.given, self.comm.size, len(window))
            assert schedule is not None
            losses += self.executor.run(schedule, window, True, 1.0)
        return self.total(losses)


@mutant(
    "hybrid_idle_stages_reduce_first_to_last",
    says="rank . calls all_reduce.*rank . calls all_reduce",
    killed_by=("crash",),
    crash_says="does not match",
    workload=gpt("rotating_shares", layers=4, global_batch=1, micro_batches=1),
    mesh={"pipe": 2, "replicate": 2},
    options={"schedule": "zb_v"},
)
class IdleStagesReduceFirstToLast(Stages):
    """A rank without data reduces its two stages in ascending order; the others in the order in
    which backward ends.
    """

    def finish(self) -> None:
        for stage in () if self.computed else self.stages.values():
            stage.handle.sit_out()
        super().finish()


@mutant(
    "hybrid_stages_send_the_rest_at_the_end",
    says="rank . calls all_reduce.*rank . calls all_reduce",
    killed_by=("crash",),
    crash_says="does not match",
    workload=gpt(
        "rotating_shares", "conditional_by_rank", layers=4, global_batch=2, micro_batches=2
    ),
    mesh={"pipe": 2, "replicate": 2},
    options={"schedule": "zb_v"},
)
class StagesSendTheRestAtTheEnd(ReferenceHybrid):
    """Gradients missing from a stage's backward are sent after those of the rank's other stage."""

    def wrap(self, module: nn.Module) -> Handle:
        handle = super().wrap(module)
        vars(handle)["backward_ended"] = lambda: None
        return handle


@mutant(
    "hybrid_axes_in_an_order_of_its_own",
    says="desync: rank 0 waits in all_reduce.* for rank 2.* rank 1 waits .* for rank 0",
    zoo=("X07",),
    killed_by=("hang",),
    mesh={"pipe": 2, "tensor": 2},
    optimizer=CLIP,
)
class AxesInAnOrderOfItsOwn(ReferenceHybrid):
    """Half of the ranks add the norm along one axis first, the others along the other axis."""

    def norm(self) -> Tensor:
        held = self.local_state("gradients")
        own = [power_sum(piece.tensor, 2.0) for piece in held if piece.replica == 0]
        axes = tuple(self.mesh.axes)
        if sum(self.mesh.coordinate.values()) % 2:
            axes = axes[::-1]
        nothing = torch.zeros((), dtype=torch.float64)
        return total_norm([(sum(own, start=nothing), axes)], self.mesh.comm)
