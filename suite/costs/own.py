"""The cost model that your own class brings, evaluated for one case and kept as data.

A class at depth ``own`` names a subclass of :class:`~shardproof.costs.model.CostModel` with three
methods, which see nothing but :class:`~shardproof.costs.model_facts.ModelFacts`:

    flows()                        what a step sends: axis, operation, bytes over all ranks, calls
    resident(rank, step, updated)  bytes of each class that a rank holds when a step is observed
    local(rank)                    elements by name that a rank holds after the last step

It may come from one of the suite's (``shardproof.costs``), and change what differs; whatever else
that one says (peaks, host memory, what it leaves unjudged) is not asked. What it answers is stored
with the case, so that a run is judged again where the class is not at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from shardproof.costs.model import Bytes, CostModel, Flow, Local
from shardproof.costs.model_facts import ModelFacts
from shardproof.files import Stored


@dataclass(frozen=True)
class OwnFlow(Stored):
    """A :class:`~shardproof.costs.model.Flow`; ``bytes`` are a fraction as text."""

    axis: str
    operation: Any
    bytes: str
    calls: tuple[int, int]


@dataclass(frozen=True)
class OwnCosts(Stored):
    """Answers of a class's own cost model: flows by step, bytes by ``rank/step/updated``, elements
    by rank, kind and name.
    """

    source: str
    flows: tuple[tuple[OwnFlow, ...], ...]
    resident: Mapping[str, Mapping[str, int]]
    local: Mapping[str, Mapping[str, Mapping[str, int]]]


def in_step(facts: ModelFacts, step: int, skipped: bool) -> ModelFacts:
    """The facts of one step; a skipped update clips nothing."""
    return replace(facts, step=step, skipped=skipped, clipped=facts.clipped and not skipped)


def answers(
    cost_model: Callable[[ModelFacts], CostModel], facts: ModelFacts, skipped: Sequence[bool]
) -> OwnCosts:
    """The promises of ``cost_model`` where the updates of some steps were ``skipped``."""
    whole, last = cost_model(facts), len(skipped) - 1
    flows = []
    for step, is_skipped in enumerate(skipped):
        told = cost_model(in_step(facts, step, is_skipped)).flows()
        own = (OwnFlow(f.axis, f.operation, str(Fraction(f.bytes)), f.range) for f in told)
        flows.append(tuple(own))
    # A step is observed before its update, with the state of the last one, and after it.
    moments, updated = {(last, last)}, -1
    for step, is_skipped in enumerate(skipped):
        moments.add((step, updated))
        updated = updated if is_skipped else step
        moments.add((step, updated))
    ranks = range(facts.world)
    return OwnCosts(
        source=whole.source,
        flows=tuple(flows),
        resident={
            f"{rank}/{step}/{updated}": dict(whole.resident(rank, step, updated))
            for rank in ranks
            for step, updated in sorted(moments)
        },
        local={
            str(rank): {kind: dict(held) for kind, held in vars(whole.local(rank)).items()}
            for rank in ranks
        },
    )


class Answered(CostModel):
    """A cost model that has answered already."""

    strategy = "own"
    source = ""

    def __init__(self, facts: ModelFacts, told: OwnCosts) -> None:
        super().__init__(facts)
        self.told = told
        self.source = told.source  # type: ignore[misc]  # each has its own

    def flows(self) -> list[Flow]:
        """Those of the step in question."""
        own = self.told.flows[self.facts.step]
        return [Flow(f.axis, f.operation, Fraction(f.bytes), (*f.calls,)) for f in own]

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by class that the class promised for ``rank`` after ``step``."""
        return dict(self.told.resident[f"{rank}/{step}/{updated}"])

    def local(self, rank: int) -> Local:
        """Elements that the class promised for ``rank`` (name -> count)."""
        return Local(**self.told.local[str(rank)])
