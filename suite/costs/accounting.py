"""Accounting ids: how many bytes a parameter, its gradient and its optimizer state take.

A32 and A16 are both 16 bytes a parameter, but shard differently: the trap behind "4x" and "8x",
which hold for A16 in the limit of many ranks only.  Sources: A16: ZeRO (arXiv 1910.02054) section
3.1, K = 12; A32: 1x + 1x + 2x of accelerate's estimator; M18: Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from shardproof.costs.model import CostModel
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, slots


@dataclass(frozen=True)
class Accounting:
    """Bytes per trained element; ``optimizer`` holds masters and state.

    ``built`` is the itemsize that parameters were built in.  Shards that rest as built are masters
    themselves, and whole copies in a narrower dtype exist for the time of a unit only.
    """

    id: str
    parameters: int
    gradients: int
    optimizer: int
    built: int

    @property
    def total(self) -> int:
        """Bytes of all three classes together, per parameter."""
        return self.parameters + self.gradients + self.optimizer

    def ratio(self, cost_model: CostModel | type[CostModel], ranks: int | None) -> Fraction | None:
        """How many times less a rank holds than under full replication, without padding.

        ``ranks=None``: in the limit of many (``None`` where it grows without bound).
        """
        each = (self.parameters, self.gradients, self.optimizer)
        if cost_model.rests_as_built:
            masters = self.built if self.parameters != self.built else 0
            each = (self.built, self.built, self.optimizer - masters)
        share = Fraction(0) if ranks is None else Fraction(1, ranks)
        held = sum(
            (b * (share if cut else 1) for b, cut in zip(each, cost_model.divided, strict=True)),
            Fraction(0),
        )
        return Fraction(self.total) / held if held else None


KNOWN = {
    accounting.id: accounting
    for accounting in (
        # Adam with everything in fp32: two slots of 4 bytes.
        Accounting("A32", 4, 4, 8, built=4),
        # ZeRO's K = 12: fp32 master and two fp32 slots beside 16-bit parameters and gradients.
        Accounting("A16", 2, 2, 12, built=4),
        # As A16, but gradients are summed and kept in fp32 (Megatron's main gradients).
        Accounting("M18", 2, 4, 12, built=4),
        # Adam in bf16 throughout: no master, slots of 2 bytes.
        Accounting("B8", 2, 2, 4, built=2),
        # bf16 and SGD without momentum: no state at all.
        Accounting("S4", 2, 2, 0, built=2),
    )
}


def accounting_of(facts: ModelFacts) -> Accounting:
    """The accounting of a facts: one of the known ones, or ``p+g+o`` spelt out.

    Step counters (4 bytes a parameter tensor) are no bytes an element and left out.
    """
    dtypes = {t.dtype for t in facts.trainable} or {"float64"}
    built = max(dtypes, key=lambda name: ITEMSIZE[name])
    compute, reduce = facts.compute(built), facts.reduction(built)
    master = ITEMSIZE[built] if compute != built else 0
    parts = (ITEMSIZE[compute], ITEMSIZE[reduce], master + slots(facts) * ITEMSIZE[built])
    spelt = Accounting("{}+{}+{}".format(*parts), *parts, built=ITEMSIZE[built])
    return next((one for one in KNOWN.values() if replace(spelt, id=one.id) == one), spelt)
