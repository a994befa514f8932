"""Faults of context and expert ranks: what travels to more ranks than need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.axes import summing
from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.reference.context import ContextParallel, ReferenceContext
from shardproof.impls.reference.context.ring import Ring
from shardproof.impls.reference.engine.handle import Handle

context_at_scale = declare.family(ReferenceContext)


@context_at_scale(
    "context_gathers_keys_of_replicas",
    says=r"all-gather along replicate\+context: .* bytes sent, 0",
    mesh={"replicate": 32, "context": 8},
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
            parallel.method.attend = gathering
        return handle


@context_at_scale(
    "context_ring_keeps_all_blocks",
    says="communication",
    mesh={"context": 32},
)
class KeepsAllBlocks(Ring):
    """Over more than 8 ranks, the ring keeps the blocks that have passed."""

    kept: tuple[Tensor, ...] = ()

    def pass_on(self, tensor: Tensor, length: int) -> Callable[[], Tensor]:
        arrive = super().pass_on(tensor, length)
        self.kept = (*self.kept, tensor) if self.comm.size > 8 else ()
        return arrive
