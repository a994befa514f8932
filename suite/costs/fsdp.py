"""FSDP with flat units: ZeRO-3 with a choice of what is sharded, over whom, and for how long."""

from __future__ import annotations

from dataclasses import replace

from shardproof.costs import collectives, compression
from shardproof.costs.layout import Unit
from shardproof.costs.model import Bound, Flow, Prefetch
from shardproof.costs.model_facts import ITEMSIZE
from shardproof.costs.zero import Zero3


class FSDP(Zero3):
    """NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD; (P + G + O)/F bytes over F shards.

    Gathers before forward, and before backward of all but the root unless they are kept whole;
    reductions over the shards every round, or once a step; over the replicas once a step.
    """

    strategy = "fsdp"
    source = (
        "FSDP (arXiv 2304.11277) sections 3.2.1 (padding) and 3.2.2: 3 (F-1)/F Psi a rank and "
        "micro-batch, and 2 (R-1)/R of a shard between replicas (exact ring factors); the root "
        "stays whole between forward and backward; torch fully_shard, reshard_after_forward"
    )

    @property
    def is_silent(self) -> bool:
        """Whether gradients of all but the last round stay on their rank."""
        return bool(self.facts.option("accumulate_without_communication", False))

    @property
    def reshards(self) -> bool | int:
        """The state of parameters between forward and backward: freed, kept, cut over k."""
        chosen = self.facts.options.get("reshard_after_forward")
        if chosen is None:
            kind = self.facts.option("sharding_strategy", "FULL_SHARD")
            return kind not in ("NO_SHARD", "SHARD_GRAD_OP")
        if isinstance(chosen, bool):
            return chosen
        return int(chosen) if chosen != self.facts.shards else True  # the shards themselves

    @property
    def rests(self) -> int:
        """Over how many ranks parameters are sharded between forward and backward (1: whole)."""
        if isinstance(self.reshards, bool):
            return self.facts.shards if self.reshards else 1
        return self.reshards

    @property
    def forwards(self) -> int:
        """How often a step gathers a unit before forward: once where it is kept over the step."""
        rounds = self.facts.rounds
        return min(rounds, 1) if self.is_silent and self.reshards is False else rounds

    def gathers_per_step(self, unit: Unit) -> int:
        """Before forward; before backward as well where the unit was freed, not kept or cut."""
        if not self.facts.called(unit.name):
            return 0
        return self.forwards + (self.gathers_again(unit) if self.reshards is True else 0)

    def gathers_again(self, unit: Unit) -> int:
        """Gathers of a unit that was freed, or cut: before backward and each further forward."""
        return self.facts.called(unit.name) * self.facts.rounds if unit.name else 0

    @property
    def reductions(self) -> int:
        """How often a step reduces over the shards."""
        return min(self.facts.rounds, 1) if self.is_silent else self.facts.rounds

    def gathers(self, unit: Unit) -> list[Flow]:
        """Those before forward, and those over the ranks on which a unit lies between its uses."""
        along, gathered, again = self.facts.sharded, self.gathered(unit), self.gathers_again(unit)
        return [
            *collectives.flow(self.facts, along, "all_gather", gathered, self.forwards),
            *collectives.flow(self.facts, along, "all_gather", gathered, again, self.rests),
        ]

    def crossing(self) -> list[Flow]:
        """The sums of shards over the replicas; compressed where a shard is whole."""
        facts, shards, times = self.facts, self.facts.shards, min(self.facts.rounds, 1)
        if shards == 1:
            return compression.flows(facts, facts.replicated, "all_reduce", self.reduced, times)
        reduced = [flat.payload(facts.reduction(flat.dtype)) for flat in self.reduced]
        #   0 1 2 3      2 replicas of 4 shards: reduce-scatter along a row, then all-reduce down
        #   4 5 6 7      a column, of the quarter that is left
        payloads = [(elements // shards, item) for elements, item in reduced]
        return collectives.flow(facts, facts.replicated, "all_reduce", payloads, times)

    def scratch(self) -> int:
        """Of sums over the shards as ZeRO-3; those over replicas are all in flight at once."""
        facts, replicas = self.facts, self.facts.replicas
        crossing = sum(
            collectives.scratch(facts, "all_reduce", replicas, flat.shard_numel)
            * ITEMSIZE[facts.reduction(flat.dtype)]
            + compression.scratch(facts, flat, replicas)
            for flat in self.reduced
        )
        return super().scratch() + crossing

    def prefetch(self) -> Prefetch:
        """Prefetched units in both directions; a late unit is late on its way over the replicas,
        too, and so is the one before it, which goes there when the next is reduced.
        """
        inner = [unit for unit in self.units if unit.name in self.facts.units]
        scatters, crosses = self.facts.shards > 1, self.facts.replicas > 1
        of_zero3 = super().prefetch()
        late = of_zero3.late_when_computing
        kept = {"backward": (0, 0)} if of_zero3.depth and self.rests == 1 else {}
        before = max((len(unit.trained) for unit in inner), default=0) if scatters else 0
        return replace(
            of_zero3,
            late_when_computing=late if scatters else 0,
            late_when_idle=of_zero3.late_when_idle if scatters else 0,
            last_when_computing=late + before if crosses and self.held_up else 0,
            last_when_idle=of_zero3.late_when_idle if crosses else 0,
            once=self.is_silent,
            depth={**of_zero3.depth, **kept},
        )

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """As ZeRO-3; all units where they are kept, 1/k of them where they rest over k ranks."""
        bounds = super().peaks(rank, phase, step)
        if "parameters" not in bounds:
            return bounds
        sizes, bound = self.whole_bytes(), bounds["parameters"]
        whole = sum(sizes.values())
        if self.rests == 1:
            level = self.resident(rank, step, step)["parameters"] + whole
            not_always = sum(sizes[name] for name in self.uncalled)
            return bounds | {"parameters": Bound(level - not_always, level)}
        chunk = whole // self.rests if self.rests < self.facts.shards else 0
        return bounds | {"parameters": replace(bound, high=bound.high + chunk)}

    def in_flight(self, rank: int, step: int) -> int:
        """Bytes of gathered units that ``rank`` holds at most at once, with kept chunks."""
        rests = 1 < self.rests < self.facts.shards
        chunks = sum(self.whole_bytes().values()) // self.rests if rests else 0
        return super().in_flight(rank, step) + chunks
