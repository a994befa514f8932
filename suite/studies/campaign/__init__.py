"""Randomized clean cases: the measure of false alarms.

A campaign draws cases of implementations that are believed right, over seeds, meshes, backends,
options, optimizers, clipping, lanes and combinations of traits, and expects every one to pass.
Case ``number`` depends on the campaign's seed and on that number alone: a false alarm can be
repeated from its id, whatever else was drawn or filtered.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from shardproof import registry, workloads
from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.checks import GENERAL
from shardproof.contract import OptimizerSpec, Refused
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.scenarios.matrix import OVERFLOW
from shardproof.studies.campaign.fits import (
    DYADIC,
    MOST_PROCESSES,
    NORMED,
    System,
    coordinates,
    windows_of,
)
from shardproof.studies.campaign.systems import SYSTEMS
from shardproof.workloads import TRAITS, WORKLOADS

_ID = re.compile(r"campaign-([0-9]{1,10})::([0-9]{1,6})::")
MOST_TRAITS = 3
#: Batches that are tried with a mesh and options before others are drawn.
MOST_TRIES = 300
#: Where it is declined, no rank may have fewer samples than micro-batches either.
UNEQUAL = "unequal_micro_batches"
STRIDED = "non_contiguous"
#: Traits that a system declines under its options.
Declines = Callable[[str, Mapping[str, Any]], Collection[str]]
#: Whether a system has a schedule for windows of a size: name, options, mesh, micro-batches.
Schedules = Callable[[str, Mapping[str, Any], Mapping[str, int], int], bool]
#: Mixed precision: what the model is built in, and the policy.
POLICIES: Sequence[tuple[str, Mapping[str, str]]] = (
    ("float32", {}),
    ("bfloat16", {}),
    ("float32", {"parameters": "bfloat16"}),
    ("float32", {"parameters": "bfloat16", "reduce": "float32"}),
    ("float32", {"parameters": "float16"}),
    ("float32", {"reduce": "bfloat16"}),
)


def draw(count: int, case: Callable[[int], Case], wanted: Callable[[Case], bool]) -> list[Case]:
    """The first ``count`` of the cases 0, 1, 2, ... that are ``wanted``."""
    return list(itertools.islice(filter(wanted, map(case, itertools.count())), count))


def first_cases(count: int, seed: int, patterns: Sequence[str] = ()) -> list[Case]:
    """The first ``count`` random clean cases of ``seed`` whose implementation a glob matches.

    :raises SelectionError: a pattern that matches none of a campaign's systems.
    """
    known = sorted({system.name for system in SYSTEMS})
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            remedy = nearest(pattern, known, "implementations")
            raise SelectionError(Problem("--impl matches nothing in a campaign", remedy, pattern))
    return draw(
        count,
        lambda number: numbered_case(number, seed),
        lambda case: not patterns or any(fnmatchcase(case.implementation, p) for p in patterns),
    )


def numbered_case(number: int, seed: int) -> Case:
    """Case ``number`` of the campaign with ``seed``, over all traits that its workload can carry
    and its implementation takes.

    But for the overflow, which only systems with a loss scaler train through.
    """
    carried = {
        name: [t for t, about in TRAITS.items() if name in about.applies_to and t != OVERFLOW]
        for name in WORKLOADS
    }
    return case_of(
        number,
        seed,
        carried,
        lambda name, options: registry.load(name).capabilities(options).declines,
        _has_schedule,
    )


def _has_schedule(
    name: str, options: Mapping[str, Any], mesh: Mapping[str, int], micro_batches: int
) -> bool:
    """Whether ``name`` does not refuse windows of so many micro-batches."""
    try:
        registry.load(name).schedule(options, mesh.get("pipe", 1), micro_batches)
    except Refused:
        return False
    return True


def by_id(name: str) -> Case | None:
    """The case of a campaign that is called ``name``; ``None`` if that is no id of a campaign.

    :raises SelectionError: this version of the suite draws another case under that number.
    """
    drawn = _ID.match(name)
    if drawn is None:
        return None
    case = numbered_case(int(drawn[2]), int(drawn[1]))
    if case.id != name:
        remedy = "campaigns of another version of the suite cannot be repeated"
        raise SelectionError(Problem("no such case", remedy, name))
    return case


def case_of(
    number: int,
    seed: int,
    traits: Mapping[str, Sequence[str]],
    declines: Declines,
    schedules: Schedules,
) -> Case:
    """Case ``number`` of the campaign with ``seed``.

    ``traits`` maps each workload to the traits it can carry.
    """
    source = random.Random(f"{seed} {number}")
    while True:
        case = _drawn(source, f"campaign-{seed}::{number:04d}", traits, declines, schedules)
        if case is not None:
            return case


def _drawn(
    source: random.Random,
    prefix: str,
    traits: Mapping[str, Sequence[str]],
    declines: Declines,
    schedules: Schedules,
) -> Case | None:
    """A case whose id begins with ``prefix``; ``None`` if no batch goes with what is drawn."""
    system = source.choices(SYSTEMS, [system.chance for system in SYSTEMS])[0]
    mesh, options, workload = _configured(source, system)
    backend = source.choice(system.backends)
    if math.prod(mesh.values()) > MOST_PROCESSES:
        backend = "in_memory"
    lane, dtype, policy = _lane(source, workload, system)
    if workload == NORMED and "parameters" in policy:
        policy = {**policy, "buffers": policy["parameters"]}
    if not system.takes(options, policy, workload == NORMED):
        dtype, policy = POLICIES[0]
    if policy:
        options["precision"] = dict(policy)
    one = lane == "bitwise" and system.sums_ranks_first(options, mesh)
    strided = lane == "bitwise" and system.flattens(options, mesh)
    more = (*((UNEQUAL,) if one else ()), *((STRIDED,) if strided else ()))
    declined = {*declines(system.name, options), *more}
    carried = sorted(trait for trait in traits[workload] if trait not in declined)

    def cuts(spec: WorkloadSpec) -> bool:
        sizes = {len(window) for window in windows_of(mesh, spec)}
        return system.cuts(options, mesh, spec) and all(
            schedules(system.name, options, mesh, size) for size in sizes
        )

    spec = _workload(
        source,
        workload,
        carried,
        most_micro_batches=1 if one else system.most_micro_batches,
        equal_over=coordinates(mesh) if UNEQUAL in declined else 1,
        stages=system.stages(options, mesh),
        params=system.sizes(source, workload, mesh, options),
        cuts=cuts,
    )
    if spec is None:
        return None
    groups = workloads.suggested_groups(spec.traits)
    optimizer = replace(_optimizer(source, lane, system.clips), groups=groups)
    clipped = "noclip" if optimizer.clip_norm is None else "clip"
    shape = "x".join(f"{axis}{size}" for axis, size in mesh.items())
    return Case(
        id=f"{prefix}::{system.name}::{backend}::{shape}::{workload}"
        f"::{'+'.join(spec.traits) or 'bare'}::{optimizer.name}::{clipped}"
        f"::{'-'.join((lane, dtype, *policy.values()))}",
        scenario="campaign",
        implementation=system.name,
        options=options,
        backend=backend,
        mesh=mesh,
        workload=spec,
        optimizer=optimizer,
        lane=lane,
        dtype=dtype,
        precision=dict(policy),
        checks=GENERAL,
        steps=source.choice((3, 4)),
    )


def _configured(
    source: random.Random, system: System
) -> tuple[dict[str, int], dict[str, Any], str]:
    """A mesh, options and a workload that go together."""
    while True:
        mesh = dict(source.choice(list(system.meshes)))
        options = {name: source.choice(choices) for name, choices in system.options.items()}
        workload = source.choice(system.workloads)
        if system.only(options, mesh, workload):
            return mesh, options, workload


def _lane(
    source: random.Random, workload: str, system: System
) -> tuple[Lane, str, Mapping[str, str]]:
    """A lane that ``workload`` has a form for, a dtype and a policy with which it is judged."""
    if workload == DYADIC:
        found = [dtype for dtype in ("float32", "float64") if dtype in system.dtypes]
        return "dyadic", source.choice(found), {}
    lane = source.choice(system.lanes)
    if lane == "working_precision":
        policies = POLICIES if system.mixed else POLICIES[:2]
        return lane, *source.choice([one for one in policies if one[0] in system.dtypes])
    return lane, "float32" if lane == "bitwise" else "float64", {}


def _optimizer(source: random.Random, lane: Lane, clips: bool) -> OptimizerSpec:
    """SGD or AdamW; equal bits need clipping off, exact sums need powers of two."""
    if lane == "dyadic":
        return OptimizerSpec(lr=0.125, momentum=0.0)
    name: Literal["sgd", "adamw"] = "sgd" if source.random() < 0.5 else "adamw"
    return OptimizerSpec(
        name=name,
        lr=0.1 if name == "sgd" else 1e-3,
        weight_decay=source.choice((0.0, 0.1)),
        warmup_steps=source.choice((0, 2)),
        clip_norm=None if lane == "bitwise" or not clips else source.choice((None, 0.05)),
    )


def _workload(
    source: random.Random,
    name: str,
    carried: Sequence[str],
    most_micro_batches: int,
    equal_over: int,
    stages: int,
    params: dict[str, Any],
    cuts: Callable[[WorkloadSpec], bool],
) -> WorkloadSpec | None:
    """A random workload that can be made: some traits ask for more than one micro-batch.

    Each of ``equal_over`` ranks has as many micro-batches as the others; the model has a unit at
    least for each of ``stages``, and sizes ``params``.
    """
    params = params | ({"layers": stages + source.randint(0, 2)} if stages else {})
    for _ in range(MOST_TRIES):
        spec = WorkloadSpec(
            name,
            traits=tuple(sorted(source.sample(carried, source.randint(0, MOST_TRAITS)))),
            seed=source.randrange(2**31),
            global_batch=source.choice((12, 15, 24)),
            micro_batches=source.randint(1, most_micro_batches),
            windows=1 if most_micro_batches == 1 else source.choice((1, 1, 2)),
            params=params,
        )
        try:
            workloads.check(spec)
        except workloads.WorkloadError:
            continue
        if len(set(spec.micro_batch_counts(equal_over))) == 1 and cuts(spec):
            return spec
    return None
