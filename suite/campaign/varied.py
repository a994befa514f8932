"""Cases of the scenarios with other data, traits, batches, meshes and models.

What no list of systems has (checkpoints, members, loss scales, models, options of few) a scenario
has: :class:`Variations` draws two of a feature of the coverage table, a trigger that it meets and a
condition (``conditions.py``), then a case that has both, so that neither is rarer for having few
cases.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardproof import axes, registry, workloads
from shardproof.backends import BACKENDS
from shardproof.campaign import conditions
from shardproof.campaign.systems import LARGEST_GRID, MOST_PROCESSES, NORMED
from shardproof.case import Case
from shardproof.contract import Options, Refused, ScalerSpec
from shardproof.coverage import features, pairs, triggers
from shardproof.registry.declaration import LOSS_SCALE, Declaration
from shardproof.scenarios.load import SHIPPED, find
from shardproof.scenarios.matrix import expand, substitute
from shardproof.scenarios.rules import OVERFLOW
from shardproof.scenarios.vocabulary import installed

#: Sums of these come out in one order only: a promise of one mesh and one cut.
EXACT = ("bitwise", "dyadic")
SCALER = ScalerSpec(initial=1024.0, growth=2.0, backoff=0.5, interval=2)
#: Other loss scales: none, and one whose squares overflow in fp32.
SCALES = (1.0, 2.0**80)
#: Options that name ranks or stages: their mesh stays.
BY_RANK = {"split", "order", "dies", "schedule"}
#: How often what few systems have is added.
RARE = 0.15
#: Other cuts of the batch.
BATCHES, COUNTS, WINDOWS = (4, 12, 15, 24), (1, 2, 3, 4), (1, 1, 2)
MOST_STEPS = 6


def can_vary(case: Case) -> bool:
    """Whether ``case`` trains a few steps, is run and must pass, and is held to no other run."""
    plain = case.fault is None and "relation" not in case.expect and case.steps <= MOST_STEPS
    if not (plain and pairs.counts(case) and _has_room(case)):
        return False
    declared = pairs.declared(pairs.setup_of(case))
    return declared is not None and not declared.excludes_case(case, "")


def _has_room(case: Case) -> bool:
    most = LARGEST_GRID if BACKENDS[case.backend].threads else MOST_PROCESSES
    return case.world <= most


def scaled(case: Case) -> Case:
    """``case`` with a loss scaler and an overflow, where its system takes them."""
    spec = case.workload
    declared = Declaration.of(registry.load(case.implementation), case.options)
    if {OVERFLOW, LOSS_SCALE} & {*declared.declines} or spec.name not in workloads.TRAITS[
        OVERFLOW
    ].applies_to:
        return case
    if case.checkpoint is not None and declared.trains_alone:
        return case  # a checkpoint has one scale, and each rank has its own
    traits = tuple(sorted({*spec.traits, OVERFLOW}))
    optimizer = replace(case.optimizer, scaler=SCALER)
    other = replace(case, workload=replace(spec, traits=traits), optimizer=optimizer)
    return case if _is_ruled_out(other, case) else other


def other(source: random.Random, case: Case, most_traits: int, keeps: float = 0.0) -> Case | None:
    """``case`` with another batch, mesh or model that its system takes; ``None``: no luck.

    ``keeps``: how often each of these, and the traits, stay as they are.
    """
    own, drawn = case.workload, case
    if not (case.membership or case.deaths) and source.random() < 0.5 * (1 - keeps):
        drawn = replace(case, mesh=_mesh(source, case))
    name, params, traits = own.name, own.params, own.traits
    if _takes_images(drawn) and source.random() < RARE * (1 - keeps):
        name, params, traits = NORMED, {}, ()
    declared = Declaration.of(registry.load(case.implementation), case.options)
    if source.random() >= keeps:
        able = [n for n, trait in workloads.TRAITS.items() if name in trait.applies_to]
        able = [n for n in able if n not in declared.declines and n != OVERFLOW]
        chosen = source.sample(able, source.randint(0, min(most_traits, len(able))))
        traits = tuple(sorted({*chosen, *({OVERFLOW} & {*own.traits})}))
    spec = replace(own, name=name, params=params, traits=traits)
    if source.random() >= keeps:
        cut: dict[str, Any] = {
            "global_batch": source.choice((own.global_batch, *BATCHES)),
            "micro_batches": source.choice((own.micro_batches, *COUNTS)),
            "windows": source.choice((own.windows, *WINDOWS)),
        }
        spec = replace(spec, **cut)
    groups = workloads.suggested_groups(spec.traits)
    drawn = replace(drawn, workload=spec, optimizer=replace(case.optimizer, groups=groups))
    if not (case.membership or case.deaths) and source.random() < RARE:
        drawn = scaled(drawn)
    drawn = conditioned(source, drawn)
    return drawn if _can_be(drawn, declared) and not _is_ruled_out(drawn, case) else None


def conditioned(source: random.Random, case: Case) -> Case:
    """``case``, most often with decay, a warm-up, no momentum or another loss scale."""
    if case.lane in EXACT:
        return case
    spec = case.optimizer
    scaler = spec.scaler
    if scaler is not None and case.lowest_dtype != "float16":
        scaler = replace(scaler, initial=source.choice((scaler.initial, *SCALES)))
    changed = replace(
        spec,
        weight_decay=source.choice((spec.weight_decay, 0.1)),
        warmup_steps=source.choice((spec.warmup_steps, 2)),
        momentum=source.choice((spec.momentum, spec.momentum, 0.0)),
        scaler=scaler,
    )
    return replace(case, optimizer=changed)


def _options(case: Case) -> Options:
    """Its own, and those of the strategy inside of a hybrid."""
    return {**case.options, **case.options.get("data_options", {})}


def _mesh(source: random.Random, case: Case) -> Mapping[str, int]:
    """Other sizes of its data axes: layers, stages and who serves fit the others.

    An axis of one rank beside others may be one that the strategy takes no more of.
    """
    asked = _options(case)
    nodes, chunks = asked.get("all_reduce"), asked.get("reshard_after_forward")
    counts_ranks = isinstance(nodes, Mapping) or not isinstance(chunks, bool | None)
    if counts_ranks or not BY_RANK.isdisjoint(asked):
        return case.mesh
    able = axes.growing(case.mesh)
    if len(case.mesh) == 1:
        return {n: source.randint(1, 5) if n in able else k for n, k in case.mesh.items()}
    return {n: source.randint(1, 4) if n in able and k > 1 else k for n, k in case.mesh.items()}


def _takes_images(case: Case) -> bool:
    """Whether its model can be one with batch norms, which has other units."""
    plain = case.lane == "fp64" and not case.precision
    asked = _options(case)
    by_unit = asked.get("wrap") or asked.get("recompute_every")
    return plain and not by_unit and not axes.exchanging(case.mesh)


def _is_ruled_out(case: Case, base: Case) -> bool:
    """Whether ``reasons.yaml`` says of a pair that ``case`` meets why no case has both.

    Those that ``base`` meets are for its mesh: one rank takes what several refuse.
    """
    known = pairs.of(base) if case.mesh == base.mesh else ()
    return any(pairs.ruled_out(pair) for pair in pairs.of(case).difference(known))


def _can_be(case: Case, declared: Declaration) -> bool:
    system = registry.load(case.implementation)
    try:
        workloads.check(case.workload, case.lane)
        for rank in range(case.world):
            system.role(rank, case.world, case.options)
        for share in case.workload.cut(case.data_coordinates):
            for window in share:
                system.schedule(case.options, axes.parts(case.mesh, "layers"), len(window))
    except (workloads.WorkloadError, Refused):
        return False
    return _has_room(case) and not declared.excludes_case(case, "")


@functools.cache
def shipped() -> Variations:
    """Of the scenarios that come with the suite, whatever folder this is: ids stay the same."""
    cases = (case for file in find(folder=SHIPPED) for case in expand(file, installed()))
    return Variations([case for case in cases if can_vary(case)])


def of_ones_own(names: Sequence[str]) -> Variations:
    """The cells of the scenarios that a user's own classes declare nothing against.

    They have been loaded before.  Equal bits and members that change are not asked for.
    """
    cells = []
    for case in (case for name in names for case in substitute(shipped().cases, name)):
        with contextlib.suppress(Refused):
            declared = Declaration.of(registry.load(case.implementation), case.options)
            odd = case.lane in EXACT or case.membership or case.deaths
            if not (odd or declared.excludes_case(case, "")):
                cells.append(case)
    return Variations(cells)


class Variations:
    """The variations of cases: every pair of a trigger and a feature that they have alike."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = cases
        self._with: dict[str, set[int]] = {}
        for number, case in enumerate(cases):
            for name in (*triggers.of(case), *features.acting(case), *conditions.of(case)):
                self._with.setdefault(name, set()).add(number)
        own = {name for case in cases for name in features.acting(case)}
        others = {name for case in cases for name in conditions.of(case)} - own
        #: Features, triggers, and what else three conditions are made of.
        kinds = own, {*self._with} - own - others, others
        self._kinds = [sorted(names) for names in kinds if names]

    @property
    def systems(self) -> list[str]:
        """Those whose cases these are."""
        return sorted({case.implementation for case in self.cases})

    def draw(self, source: random.Random, most_traits: int) -> Case:
        """Two of a feature, a trigger and a condition, such a case, and, as often as not, each
        other thing of it changed.

        Which of the two comes first is drawn, too: neither has to be common where the other is.
        """
        while True:
            first, second = source.sample(self._kinds, 2)
            both = self._with[source.choice(first)]
            # One rank alone has no feature that acts.
            if others := [own for n in second if (own := self._with[n] & both)]:
                both = source.choice(others)
            case = self.cases[source.choice(sorted(both))]
            case = replace(case, workload=replace(case.workload, seed=source.randrange(2**31)))
            can_change = case.lane not in EXACT and _is_ours(case)
            drawn = other(source, case, most_traits, keeps=0.5) if can_change else case
            if drawn is not None:
                return drawn


def _is_ours(case: Case) -> bool:
    """Known defects of other systems are found by hand, and listed under xfail."""
    return case.implementation.startswith("reference/") or registry.is_foreign(case.implementation)
