"""The parts of three conditions at once: state, traits, the optimizer, events, features.

Most faults that nobody had seen needed two or three conditions together.  A *condition* is one of
them, of one of five kinds; a triple takes three conditions of three kinds.  A condition counts only
where it can act: an axis of one rank has no feature.  A triple is possible where each two of its
three stand in some case; of these a case meets some together.  Every case evaluates, so evaluation
is no condition.

    python -m tools.cover --arrays      # cases for triples that no case has
    shardproof list coverage            # the share that is met
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from shardproof import axes
from shardproof.case import Case
from shardproof.contract import ScalerSpec
from shardproof.coverage import features, pairs, triggers

#: Kind and name, e.g. ``event resume``.
Condition = str
Triple = tuple[Condition, Condition, Condition]

_OVERFLOW = "trait overflow_on_one_rank"
#: Conditions that are read from the case itself, or stand for several of its triggers.
_OWN: Mapping[Condition, Callable[[Case, set[str]], bool]] = {
    "state buffers": lambda c, met: bool(met & {"trait rebound_buffer", "model batch-norm"}),
    "state tied": lambda c, met: bool(met & {"trait tied", "trait tied_over_units"}),
    "state tied-over-stages": lambda c, met: "trait tied_over_units" in met and _stages(c) > 1,
    "state frozen": lambda c, met: "trait frozen" in met,
    "state generator": lambda c, met: "trait dropout_stateful" in met,
    "state moments": lambda c, met: c.optimizer.name == "adamw",
    "state momentum": lambda c, met: c.optimizer.name == "sgd" and c.optimizer.momentum > 0,
    "state masters": lambda c, met: c.compute_dtype != c.dtype,
    "optimizer decay": lambda c, met: c.optimizer.weight_decay > 0,
    "optimizer warm-up": lambda c, met: c.optimizer.warmup_steps > 0,
    "optimizer groups": lambda c, met: bool(c.optimizer.groups),
    "optimizer clipping": lambda c, met: c.optimizer.clip_norm is not None,
    "optimizer loss-scale": lambda c, met: c.optimizer.scaler is not None,
    "optimizer large-scale": lambda c, met: (c.optimizer.scaler or ScalerSpec(1)).initial > 2**24,
    "event resume": lambda c, met: c.checkpoint is not None,
    "event asynchronous-save": lambda c, met: c.checkpoint is not None and _saves_behind(c),
    "event resume-elsewhere": lambda c, met: c.checkpoint is not None and bool(c.checkpoint.into),
    "event skipped-update": lambda c, met: _OVERFLOW in met and c.optimizer.scaler is not None,
    "event unused-share": lambda c, met: not all(c.workload.cut(c.data_coordinates)),
    "event several-windows": lambda c, met: "batch several-windows" in met,
    "event several-micro-batches": lambda c, met: "batch several-micro-batches" in met,
    "event members-change": lambda c, met: c.changes_members,
}
#: Triggers and features that are conditions by their own names; the first kind whose glob fits.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "": (  # said above, or no condition
        *("trait rebound_buffer", "trait tied*", "trait frozen", "trait dropout_stateful"),
        *("trait two_groups", _OVERFLOW, "batch *", "mesh *", "model batch-norm"),
        *("backend *", "optimizer *", "load *", "clipping", "loss-scaler", "members *", "built *"),
        "checkpoint *",
    ),
    "state": ("compress *",),
    "trait": ("trait *", "model *"),
    "feature": ("*",),
}


def _stages(case: Case) -> int:
    return axes.parts(case.mesh, "layers")


def _saves_behind(case: Case) -> bool:
    return "checkpoint asynchronous" in features.of(case)


def of(case: Case) -> list[Condition]:
    """The conditions of ``case``, of all kinds."""
    if case.world == 1:
        return []
    met = triggers.of(case)
    found = {name for name, holds in _OWN.items() if holds(case, met)}
    for name in (*met, *features.acting(case)):
        kind = next(k for k, globs in _KINDS.items() if any(fnmatchcase(name, g) for g in globs))
        if kind:
            found.add(f"{kind} {name.removeprefix('trait ')}")
    return sorted(found)


def triples(case: Case) -> frozenset[Triple]:
    """Each three conditions of ``case`` that are of three kinds."""
    return frozenset(
        three for three in itertools.combinations(of(case), 3) if len({*map(_kind, three)}) == 3
    )


def _kind(condition: Condition) -> str:
    return condition.partition(" ")[0]


def possible(cases: Iterable[Case]) -> set[Triple]:
    """Triples of which each two conditions stand together in one of ``cases``."""
    beside = defaultdict[Condition, set[Condition]](set)
    for case in cases:
        for one, other in itertools.combinations(of(case), 2):
            if _kind(one) != _kind(other):
                beside[one].add(other)  # in order, so each pair lies under its first
    return {
        (one, two, three)
        for one, others in beside.items()
        for two in others
        for three in others & beside.get(two, set())
    }


def sentence(cases: Iterable[Case]) -> str:
    """How many of the possible triples ``cases`` meet, and those of the quick tier."""
    own = [case for case in cases if pairs.counts(case)]
    could = possible(own)
    met, quick = set[Triple](), set[Triple]()
    for case in own:
        met |= (found := triples(case))
        quick |= found if case.tier == "quick" else set()
    return (
        f"{len(could):,} possible triples of state, traits, optimizer, events and features: "
        f"{len(met):,} met by a case ({len(met) / max(len(could), 1):.0%}), "
        f"{len(quick):,} by one of the quick tier"
    )
