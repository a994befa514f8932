"""Faults of context and expert ranks: what travels to more ranks than need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.axes import summing
from shardproof.comm import Mesh
from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.reference.context import ReferenceContext
from shardproof.impls.reference.context.ring import Ring
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.expert import ExpertParallel, ReferenceExpert
from shardproof.impls.reference.expert.exchange import Exchange, Plan

context_at_scale = declare.family(ReferenceContext)
expert_at_scale = declare.family(
    ReferenceExpert,
    mesh={"expert": 32},
    shape={"layers": 1, "seq": 64, "mixture": {"experts": 64, "top_k": 2, "ffn": 256}},
    small_shape={"mixture": {"experts": 4, "top_k": 2, "ffn": 32}},
)


@context_at_scale(
    "context_gathers_keys_of_replicas",
    says=r"all-gather along replicate\+context: 0 bytes promised",
    mesh={"replicate": 64, "context": 4},
    shape={"layers": 1},
)
class GathersKeysOfReplicas(ReferenceContext):
    """With more than 8 replicas, keys are gathered over replicas as well."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        handle, parallel = super().transform(module, mesh, options), self.parallel
        everyone, attend = mesh.comm(*summing(mesh.axes)), parallel.method.attend

        def gathering(core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            every = key.new_empty(everyone.size, *key.shape)
            everyone.all_gather(every.view(-1), key.detach().contiguous().view(-1))
            return attend(core, query, key, value)

        if mesh.size("replicate") > 8:
            parallel.method.attend = gathering  # type: ignore[method-assign]
        return handle


@context_at_scale(
    "context_ring_keeps_all_blocks",
    says="peak in forward: activations: .* bytes promised",
    mesh={"context": 16},
    shape={"layers": 1},
)
class KeepsAllBlocks(Ring):
    """Over more than 8 ranks, the ring keeps a copy of the block of each rank."""

    kept: tuple[Tensor, ...] = ()

    def pass_on(self, tensor: Tensor, length: int) -> Callable[[], Tensor]:
        if self.comm.size > 8:
            self.kept = (*self.kept[1 - self.comm.size :], tensor.clone())
        return super().pass_on(tensor, length)


@expert_at_scale(
    "expert_sizes_buffers_for_the_worst_case", says="all-to-all along expert: .* bytes promised"
)
class SizesBuffersForTheWorstCase(Exchange):
    """Over more than 8 ranks, each rank has room for all rows of every other, and all of it is
    sent.
    """

    def dispatch(self, rows: Tensor, plan: Plan) -> Tensor:
        size, most = self.comm.size, len(rows)
        if size <= 8:
            return super().dispatch(rows, plan)
        room = [F.pad(part, (0, 0, 0, most - len(part))) for part in rows.split([*plan.sent])]
        came = self.move(torch.cat(room), self.comm, [most] * size, [most] * size)
        slots = zip(came.split(most), plan.received, strict=True)
        return torch.cat([slot[:count] for slot, count in slots])


@expert_at_scale(
    "expert_cuts_nothing_over_many_ranks", says="after_update: parameters: .* bytes promised"
)
class KeepsAllExperts(ExpertParallel):
    """Over more than 8 ranks, every rank keeps all experts."""

    def cut(self, *args: Any) -> list[Exchange]:
        far = self.across is not None and self.across.size > 8
        return [] if far else super().cut(*args)
