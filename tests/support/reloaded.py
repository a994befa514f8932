"""Systems whose second run, with a reload halfway, differs for reasons of their own (driven by
test_relations).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import SystemRandom
from typing import Any

from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import Build, Kind, OptimizerSpec, Piece
from shardproof.impls.reference.zero1 import ReferenceZero1


class LosesBuffers(ReferenceZero1):
    """Parameters and optimizer state are loaded, buffers are not."""

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        if kind != "buffers":
            super().load_pieces(kind, pieces)


class StartsAnywhere(ReferenceZero1):
    """No two runs begin with the same values; nothing is lost by a reload."""

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        if state is not None:
            factor = 1 + SystemRandom().random()
            state = {name: tensor * factor for name, tensor in state.items()}
        super().setup(build, state, optimizer, mesh, options)
