"""transformers' ``DistributedConfig`` with ``tp_size``: the tensor-parallel plan of a mixture.

    attention    queries, keys, values by columns, the output by rows; norms of heads whole
    experts      every rank holds all of them, each split by its hidden width
    embedding    by rows of the vocabulary, with a whole gradient; the head whole

Meshes, plans and clipping are those of ``transformers_fsdp``.  Tried with transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardproof.contract import Kind, Piece
from shardproof.impls.ecosystem.transformers_fsdp import TransformersFSDP


class TransformersTensor(TransformersFSDP):
    """The adapter."""

    strategy = "tensor"
    axes: ClassVar[tuple[str, ...]] = ("tensor",)
    features: ClassVar[tuple[str, ...]] = ("tensor",)

    def held(self, kind: Kind) -> Iterable[tuple[str, Tensor]]:
        """Gradients cut as their parameters are, of which only the embedding's is kept whole."""
        for name, tensor in super().held(kind):
            own = self.named.get(name)
            if kind == "gradients" and isinstance(own, DTensor) and isinstance(tensor, DTensor):
                tensor = tensor.redistribute(own.device_mesh, own.placements)
            yield name, tensor

    def local_state(self, kind: Kind) -> list[Piece]:
        """The pieces that this rank holds."""
        return [part for n, t in self.held(kind) for part in self.parts(n, t.detach())]

    def parts(self, name: str, tensor: Tensor) -> list[Piece]:
        """One piece, or one of each factor where a tensor packs several (gates and inputs)."""
        piece = self.piece(name, tensor)
        placed: Any = getattr(tensor, "placements", (None,))[0]
        if piece.slices is None or not hasattr(placed, "split_factor"):
            return [piece]
        ranks, dim = self.mesh.size("tensor"), placed.dim % tensor.dim()
        size = tensor.shape[dim] // placed.split_factor // ranks
        found = []
        for factor in range(placed.split_factor):
            first = (factor * ranks + self.mesh.coordinate["tensor"]) * size
            slices = [*piece.slices[:dim], (first, first + size), *piece.slices[dim + 1 :]]
            local = piece.tensor.narrow(dim, factor * size, size)
            found.append(replace(piece, tensor=local, slices=tuple(slices)))
        return found


IMPLEMENTATION = TransformersTensor
