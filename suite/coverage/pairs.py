"""The table: how many cases each pair of a trigger and a feature has, and why some have none.

A pair may be empty where every system that has the feature declines the trigger or lacks the axes
for it, or where ``reasons.yaml`` gives the reason.  Otherwise it is *open*: a fault that needs both
survives.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shardproof import registry
from shardproof.axes import cutting, sharing
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.contract import Refused
from shardproof.coverage import features, triggers
from shardproof.table import Table, grouped, some

if TYPE_CHECKING:
    from shardproof.registry.declaration import Declaration

RULES = Path(__file__).with_name("reasons.yaml")
#: So many open pairs of a feature are named in a table.
_NAMED = 4
#: A trigger and a feature.
Pair = tuple[str, str]


def counts(case: Case) -> bool:
    """Whether ``case`` can meet pairs: it trains, and must pass.

    Backends of GPUs are no features: ``--backend`` takes every cell over to them.
    """
    known = case.skip is not None or case.xfail is not None
    trains = "refuses" not in case.expect and case.steps > 0
    return trains and not known and BACKENDS.of_record(case.backend).device == "cpu"


def taken(cases: Iterable[Case]) -> list[Case]:
    """Those that their systems do not decline: a run skips the others.

    Of what has run this is known by the verdicts, without an import of any system.
    """
    asked = ((case, declared(setup_of(case)) if counts(case) else None) for case in cases)
    return [case for case, says in asked if says is None or not says.excludes_case(case, "")]


def of(case: Case) -> frozenset[Pair]:
    """The pairs that ``case`` meets: a feature that cannot act meets an axis of one rank alone."""
    asked, acting = features.of(case), features.acting(case)
    return frozenset(
        (trigger, feature)
        for trigger in triggers.of(case)
        for feature in (asked if trigger in triggers.OF_ONE_RANK else acting)
    )


@dataclass(frozen=True)
class ExcludedPair:
    """Globs on triggers and features, and why no case has both."""

    triggers: tuple[str, ...]
    features: tuple[str, ...]
    reason: str

    def matches(self, pair: Pair) -> bool:
        """Whether the rule explains ``pair``."""
        return all(
            any(fnmatchcase(name, glob) for glob in globs)
            for name, globs in zip(pair, (self.triggers, self.features), strict=True)
        )


@functools.cache
def rules() -> tuple[ExcludedPair, ...]:
    """Those of ``reasons.yaml``.

    :raises TypeError: one has other keys than ``trigger``, ``feature`` and ``reason``.
    """
    return tuple(_rule(**given) for given in yaml.safe_load(RULES.read_text(encoding="utf-8")))


def _rule(trigger: str | list[str], feature: str | list[str], reason: str) -> ExcludedPair:
    both = (tuple([globs] if isinstance(globs, str) else globs) for globs in (trigger, feature))
    of_triggers, of_features = both
    return ExcludedPair(of_triggers, of_features, reason)


@functools.cache
def ruled_out(pair: Pair) -> str:
    """Why a rule says that no case has both; empty: none does."""
    return next((rule.reason for rule in rules() if rule.matches(pair)), "")


#: A system and its options, as JSON.
Setup = tuple[str, str]


def setup_of(case: Case) -> Setup:
    """The request of ``case`` to its system, to look up its declaration."""
    return case.implementation, json.dumps(dict(case.options), sort_keys=True)


@functools.cache
def declared(setup: Setup) -> Declaration | None:
    """The declaration from ``setup``; ``None``: a user's own, not installed here, or refused."""
    from shardproof.registry.declaration import Declaration  # imports torch: reports need none

    system, options = setup
    if registry.is_foreign(system):
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries of others talk when imported
            return Declaration.of(registry.load(system), json.loads(options))
    except (Refused, registry.BrokenImplementation):
        return None


def why_not(setup: Setup, trigger: str) -> str:
    """Why ``setup`` cannot meet ``trigger``, from what it declares; empty: nothing says so."""
    if (found := declared(setup)) is None:
        return ""
    system, trait = setup[0], trigger.removeprefix("trait ")
    if trait in found.declines:
        return f"{system} declines it: {found.declines[trait]}"
    axes, data = ", ".join(found.axes), {cutting(what) for what in triggers.COPIES_OF_SHARDS}
    if trigger in triggers.OF_SEVERAL_AXES and len(found.axes) == 1:
        return f"{system} has one axis: {axes}"
    if trigger == triggers.TWO_DATA_AXES and not data <= {*found.axes}:
        return f"{system} has the axes {axes}"
    if trait in triggers.OF_COORDINATES and not sharing(found.axes):
        return f"{system} has no axis that splits the batch over its ranks"
    if trigger == triggers.OF_STAGES and cutting("layers") not in found.axes:
        return f"{system} has no stages"
    return ""


@dataclass(frozen=True)
class Coverage:
    """The pairs of all triggers with ``features``, and how many cases of each tier meet them."""

    features: tuple[str, ...]
    quick: Mapping[Pair, int]
    full: Mapping[Pair, int]
    #: Who has each feature.
    setups: Mapping[str, Collection[Setup]]

    @property
    def pairs(self) -> list[Pair]:
        """Every pair of a trigger and a feature."""
        return [(trigger, name) for name in self.features for trigger in triggers.names()]

    @property
    def met(self) -> set[Pair]:
        """Pairs that a case has."""
        return {*self.quick, *self.full}

    def cases(self, pair: Pair) -> int:
        """How many cases meet it, of both tiers."""
        return self.quick.get(pair, 0) + self.full.get(pair, 0)

    def why_empty(self, pair: Pair) -> str:
        """Why no case need have both; empty: one should.

        Nobody who has the feature can meet the trigger, or a rule says so.
        """
        trigger, feature = pair
        reasons = [why_not(setup, trigger) for setup in sorted(self.setups.get(feature, ()))]
        if reasons and all(reasons):
            return reasons[0]
        return ruled_out(pair)

    @functools.cached_property
    def open(self) -> list[Pair]:
        """Pairs without a case and without a reason."""
        return [p for p in self.pairs if not self.cases(p) and not self.why_empty(p)]

    def by_feature(self, lacks: str = "open") -> Table:
        """A row a feature: its pairs, those met, and those without a case, which it ``lacks``."""
        left = grouped((feature, trigger) for trigger, feature in self.open)
        met = Counter(feature for _, feature in self.met)
        quick = Counter(feature for _, feature in self.quick)
        rows = []
        for feature in self.features:
            lacking = left.get(feature, [])
            numbers = met[feature] + len(lacking), met[feature], quick[feature]
            rows.append((feature, *map(str, numbers), some(lacking, _NAMED)))
        heads = ("feature", "triggers", "met", "in quick", lacks)
        return Table("Coverage", heads, rows, align="lrrrl")

    def sentence(self, lacks: str = "open") -> str:
        """How many there are."""
        possible = len(self.met) + len(self.open)
        return (
            f"{len(self.pairs):,} pairs of {len(triggers.names())} triggers and "
            f"{len(self.features)} features: {possible:,} possible, {len(self.met):,} met by a "
            f"case, {len(self.quick):,} by one of the quick tier; {len(self.open):,} {lacks}"
        )


def table(cases: Iterable[Case], others: Iterable[Case] = ()) -> Coverage:
    """The coverage of ``cases``; what only ``others`` have is a feature, too, met by none."""
    tiers: dict[str, Counter[Pair]] = {"quick": Counter(), "full": Counter()}
    setups: dict[str, set[Setup]] = {}
    own = [case for case in cases if counts(case)]
    for case in own:
        tiers[case.tier].update(of(case))
    for case in (*own, *filter(counts, others)):
        for feature in features.of(case):
            setups.setdefault(feature, set()).add(setup_of(case))
    return Coverage(tuple(sorted(setups)), tiers["quick"], tiers["full"], setups)


def document(cases: Iterable[Case]) -> dict[str, Any]:
    """``coverage.json``: feature -> trigger -> how many of ``cases`` meet both."""
    found = table(cases)
    rows: dict[str, dict[str, int]] = {}
    for trigger, feature in sorted(found.met, key=lambda pair: (pair[1], pair[0])):
        rows.setdefault(feature, {})[trigger] = found.cases((trigger, feature))
    return {"format": 1, "pairs": len(found.met), "features": rows}
