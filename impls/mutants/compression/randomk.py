"""Faults of random-k: its masks, and the factor that corrects them."""

from __future__ import annotations

from torch import Tensor

from shardproof.impls.mutants import declare
from shardproof.impls.mutants.compression.triggers import (
    RANDOMK,
    sent_by,
)
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.parts.compressors.draws import mask
from shardproof.impls.reference.parts.compressors.randomk import RandomK
from shardproof.impls.reference.parts.flat import Part

mutant = declare.family(ReferenceDDP, options=sent_by(RANDOMK), killed_by=("equivalence",))


@mutant(
    "randomk_mask_by_rank", says="replicas 0 and 1 differ", killed_by=("equivalence", "replicas")
)
class MaskByRank(RandomK):
    """Each rank draws its own mask, so values of different elements are summed."""

    def draw(self, part: Part, step: int) -> Tensor:
        density = self.chosen.density
        assert density is not None
        return mask(self.place, step, part.name, part.numel, density)


@mutant("randomk_mask_for_good", says="other elements are sent.*at step 1")
class MaskForGood(RandomK):
    """The seed does not depend on the step, so most elements are never sent."""

    def draw(self, part: Part, step: int) -> Tensor:
        return super().draw(part, 0)


@mutant("randomk_not_made_up", says="4 times too small")
class NotMadeUp(RandomK):
    """The factor n/k is missing, so the sum of masked gradients is too small on average."""

    def factor(self, numel: int, number: int) -> float:
        return 1.0


@mutant(
    "randomk_made_up_twice",
    says="4 times too large",
    killed_by=("equivalence", "compression"),
    options=sent_by({**RANDOMK, "feedback": True}),
)
class MadeUpTwice(RandomK):
    """Unsent elements are corrected twice: by the factor n/k and by error feedback."""

    def factor(self, numel: int, number: int) -> float:
        return numel / number
