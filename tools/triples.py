"""Triples of communication conditions: a system, a way to send, and a circumstance of it.

A pair of each two of them may be met by three cases while none has all: a fault of one reduction,
in one strategy, over ranks of unequal work.  All triples would be hundreds of thousands; these are
the ones in which what is sent, when and by whom hangs on all three.  A triple is *possible* where
some system with its way can meet its circumstance and no rule of ``reasons.yaml`` speaks against
a pair of it, or where a case has it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.coverage import features, pairs, triggers

#: A circumstance, a way and a strategy.
Triple = tuple[str, str, str]
#: Globs on features: how gradients and parameters travel.
WAYS = (
    *("all_reduce *", "reduce_scatter *", "all_gather *", "compress *", "sum_each_backward"),
    *("bucket_*", "gradient_as_bucket_view", "no-broadcast_buffers"),
    *("accumulate_without_communication", "sharding_strategy *", "reshard_after_forward"),
    *("no-reshard_after_forward", "prefetch_*", "schedule *", "data *", "every", "servers"),
    *("precision parameters *", "precision reduce *", "clipping", "loss-scaler"),
)
#: Triggers that change what is sent from rank to rank, call to call or step to step.
TRIGGERS = (
    *("batch several-micro-batches", "batch several-windows", "batch unequal-samples"),
    *("batch fewer-samples", triggers.OF_STAGES, "mesh odd", "mesh four-or-more"),
    *("mesh axis-of-one", triggers.TWO_DATA_AXES, "model batch-norm"),
    *("trait conditional_by_rank", "trait conditional_by_micro_batch", "trait unused"),
    *("trait conditional_late_step", "trait one_rank_without_tokens", "trait empty"),
    *("trait smaller_than_world", "trait non_contiguous", "trait tied_over_units"),
    *("trait overflow_on_one_rank", "trait late_results", "trait skewed_ranks"),
)
#: Kinds of backends: what ranks are.
_KINDS: Mapping[str, Callable[[str], bool]] = {
    "ranks threads": lambda backend: BACKENDS[backend].threads,
    "ranks processes": lambda backend: not BACKENDS[backend].threads,
}
CIRCUMSTANCES = (*TRIGGERS, *_KINDS)


@functools.cache
def is_way(feature: str) -> bool:
    """Whether it is a way to send."""
    return any(fnmatchcase(feature, glob) for glob in WAYS)


def of(case: Case) -> frozenset[Triple]:
    """The triples that ``case`` meets."""
    kinds = {name for name, holds in _KINDS.items() if holds(case.backend)}
    met = kinds | (triggers.of(case) & {*TRIGGERS})
    ways = [feature for feature in features.of(case) if is_way(feature)]
    return frozenset((one, way, f"strategy {case.implementation}") for one in met for way in ways)


@dataclass(frozen=True)
class Triples:
    """The triples that cases meet, by tier, and those that no case meets although one could."""

    quick: Mapping[Triple, int]
    full: Mapping[Triple, int]
    open: tuple[Triple, ...]

    @property
    def met(self) -> set[Triple]:
        """Triples that some case meets."""
        return {*self.quick, *self.full}

    def sentence(self) -> str:
        """The number of triples, as a sentence."""
        possible = len(self.met) + len(self.open)
        return (
            f"{possible:,} possible triples of a circumstance, a way to send and a strategy: "
            f"{len(self.met):,} met by a case ({len(self.met) / max(possible, 1):.0%}), "
            f"{len(self.quick):,} by one of the quick tier"
        )


def table(cases: Iterable[Case], others: Iterable[Case] = ()) -> Triples:
    """The triples of ``cases``; those that only ``others`` meet count as not met."""
    tiers: dict[str, Counter[Triple]] = {"quick": Counter(), "full": Counter()}
    setups: dict[tuple[str, str], set[pairs.Setup]] = {}
    for case, counted in ((one, many is cases) for many in (cases, others) for one in many):
        if pairs.counts(case):
            for way in filter(is_way, features.of(case)):
                both = way, f"strategy {case.implementation}"
                setups.setdefault(both, set()).add(pairs.setup_of(case))
            if counted:
                tiers[case.tier].update(of(case))
    met = {*tiers["quick"], *tiers["full"]}
    possible = (
        (circumstance, way, strategy)
        for way, strategy in sorted(setups)
        for circumstance in CIRCUMSTANCES
        if any(_can_meet(setup, circumstance) for setup in setups[way, strategy])
        and not _is_ruled_out(circumstance, way, strategy)
    )
    return Triples(tiers["quick"], tiers["full"], tuple(one for one in possible if one not in met))


def _is_ruled_out(circumstance: str, way: str, strategy: str) -> bool:
    both = (circumstance, way), (circumstance, strategy)
    return any(rule.matches(pair) for rule in pairs.rules() for pair in both)


def _can_meet(setup: pairs.Setup, circumstance: str) -> bool:
    if (holds := _KINDS.get(circumstance)) is None:
        return not pairs.why_not(setup, circumstance)
    declared = pairs.declared(setup)
    return declared is not None and any(map(holds, declared.usable()))
