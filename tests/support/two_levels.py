"""A system that reduces in two levels, over sub-groups of its mesh (driven by test_subgroups)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from adopted import OwnDDP
from torch import cat

from shardproof.costs.ddp import Single
from shardproof.costs.model import Flow


class TwoLevelCosts(Single):
    """Whole everything; of four ranks each sends its gradients twice, to one of a pair."""

    def flows(self) -> list[Flow]:
        size = sum(t.nbytes for t in self.facts.trainable)
        return [Flow("replicate", "all_reduce", Fraction(4 * 2 * size), 4 * 2)]


class TwoLevelDDP(OwnDDP):
    """All-reduce within pairs of neighbours, then across the pairs; for four ranks."""

    depth = "own"
    cost_model = TwoLevelCosts
    pairs = ([0, 1], [2, 3], [0, 2], [1, 3])

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, options)
        groups = [mesh.subgroup(pair) for pair in self.pairs]
        self.levels = [group for group in groups if group.contains(mesh.rank)]

    def reduce(self) -> None:
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        flat = cat([g.reshape(-1) for g in gradients])
        for level in self.levels:
            level.all_reduce(flat)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))


class OneLevelDDP(TwoLevelDDP):
    """Forgets the second level."""

    pairs = ([0, 1], [2, 3])


class ComesLateDDP(TwoLevelDDP):
    """The last rank does not make the groups that it is no member of."""

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        if mesh.rank == 3:
            self.pairs = ([2, 3], [1, 3])
        super().setup(build, state, optimizer, mesh, options)
