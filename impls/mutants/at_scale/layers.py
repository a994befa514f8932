"""Faults of layers that ranks divide, and of the mesh of a hybrid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.impls.mutants.at_scale import declare
from shardproof.impls.reference import ddp
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.hybrid import ReferenceHybrid
from shardproof.impls.reference.tensor import ReferenceTensor, TensorParallel
from shardproof.impls.reference.tensor.layers import Classes, Row, SplitLayer, Vocabulary
from shardproof.impls.reference.tensor.operators import all_gather

tensor_at_scale = declare.family(ReferenceTensor, mesh={"tensor": 16})
hybrid_at_scale = declare.family(ReferenceHybrid)


@tensor_at_scale("tensor_keeps_head_whole", says="after_update: parameters: .* bytes promised")
class KeepsHeadWhole(TensorParallel):
    """Over more than 8 ranks, the head is not split."""

    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        return [one for one in layers if self.comm.size <= 8 or not isinstance(one, Classes)]


@tensor_at_scale("tensor_keeps_embedding_whole", says="after_update: parameters: .* bytes promised")
class KeepsEmbeddingWhole(TensorParallel):
    """Over more than 8 ranks, the token embedding is not split."""

    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        return [one for one in layers if self.comm.size <= 8 or not isinstance(one, Vocabulary)]


class _GatheredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, comm: Comm) -> Tensor:
        return all_gather(terms[None], comm, dim=0).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@tensor_at_scale("tensor_gathers_terms_of_rows", says="all-gather along tensor: 0 bytes promised")
class GathersTermsOfRows(TensorParallel):
    """Over more than 8 ranks, row-parallel layers gather partial sums and add them in order."""

    def make_layers(self) -> list[SplitLayer]:
        layers = super().make_layers()
        for layer in layers:
            if isinstance(layer, Row) and self.comm.size > 8:
                layer.leave = _GatheredSum.apply
        return layers


@hybrid_at_scale(
    "hybrid_replicates_over_many_shards",
    says="after_update: parameters: .* bytes promised",
    mesh={"shard": 64, "tensor": 2},
    options={"data": "fsdp"},
)
class ReplicatesOverManyShards(ReferenceHybrid):
    """Over more than 32 shard ranks, parameters are replicated."""

    def wrap_rest(self, module: nn.Module) -> Handle:
        if self.mesh.size("shard") <= 32:
            return super().wrap_rest(module)
        comms = {"replicate": self.mesh.comm("shard")}
        return ddp.apply(module, comms, ddp.Options(), self.context(self.options))
