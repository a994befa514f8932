"""Randomized clean cases: the measure of false alarms.

A campaign draws cases of implementations that are believed right, over seeds, meshes, backends,
options, optimizers, clipping, lanes and combinations of traits, and expects every one to pass.
About half are drawn from :mod:`systems`, which combines the options of each freely, the others are
cases of the scenarios, varied (:mod:`varied`).  Case ``number`` depends on the campaign's seed and
on that number alone: a false alarm can be repeated from its id, whatever else was drawn or
filtered.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from shardproof import registry, workloads
from shardproof.axes import cutting
from shardproof.backends import BACKENDS as KNOWN_BACKENDS
from shardproof.backends import USUAL
from shardproof.campaign import systems as known
from shardproof.campaign.systems import Policy, Setup, System
from shardproof.campaign.varied import EXACT, RARE, Variations, of_ones_own, scaled, shipped
from shardproof.case import Case, Death, Lane, WorkloadSpec
from shardproof.checks import GENERAL
from shardproof.contract import Capabilities, OptimizerSpec, Refused
from shardproof.coverage import pairs
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.registry import preflight
from shardproof.registry.declaration import Declaration
from shardproof.scenarios.rules import OVERFLOW
from shardproof.table import number as counted
from shardproof.workloads import TRAITS

MOST_TRAITS = 3
#: How often a case of a scenario is varied, where that is asked for.
VARIED = 0.5
#: Batches that are tried with a setup before another one is drawn.
MOST_TRIES = 300
#: Checks of what a case plans.
PLANNED = ("checkpoint", "membership")
#: Where it is declined, no rank may have fewer samples than micro-batches either.
UNEQUAL = "unequal_micro_batches"
STRIDED = "non_contiguous"
#: Where MPI is missing its cases are skipped.
BACKENDS = tuple(n for n, b in KNOWN_BACKENDS.own.items() if b.device == "cpu" and b.has_values)
#: Mixed precision: what the model is built in, and the policy.
POLICIES: Sequence[tuple[str, Policy]] = (
    ("float32", {}),
    ("bfloat16", {}),
    ("float32", {"parameters": "bfloat16"}),
    ("float32", {"parameters": "bfloat16", "reduce": "float32"}),
    ("float32", {"parameters": "float16"}),
    ("float32", {"reduce": "bfloat16"}),
)


def first_cases(count: int, seed: int, patterns: Sequence[str] = ()) -> list[Case]:
    """The first ``count`` random clean cases of ``seed`` whose implementation a glob matches.

    A ``package.module:Class`` is drawn alone, over the axes that it declares.

    :raises SelectionError: a pattern that matches none of a campaign's systems, or a class that
        cannot be loaded, or that stands beside names.
    """
    variations = variations_of(patterns)
    if own := _own(patterns):
        systems = tuple(map(own_system, own))
        return [numbered_case(n, seed, systems, variations=variations) for n in range(count)]
    draw = functools.partial(numbered_case, seed=seed, variations=variations)
    return matching(count, draw, patterns, names(), "in a campaign")


def matching(
    count: int,
    draw: Callable[[int], Case],
    patterns: Sequence[str],
    systems: Sequence[str],
    where: str,
) -> list[Case]:
    """The first ``count`` cases that ``draw`` gives for a number and whose system a glob matches.

    :raises SelectionError: a pattern that matches none of ``systems``.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in systems):
            remedy = nearest(pattern, systems, "implementations")
            raise SelectionError(Problem(f"--impl matches nothing {where}", remedy, pattern))
    wanted = (case for case in map(draw, itertools.count()) if _is_of(case, patterns))
    return list(itertools.islice(wanted, count))


def coverage(count: int, seed: int, patterns: Sequence[str]) -> tuple[pairs.Coverage, str]:
    """The pairs that :func:`first_cases` meet of those that scenarios meet; how many, in words."""
    cases = [replace(case, tier="full") for case in first_cases(count, seed, patterns)]
    varied = variations_of(patterns).cases
    others = [case for case in varied if _own(patterns) or _is_of(case, patterns)]
    table, wanted = pairs.table(cases, others), pairs.table(others).met
    share = f"{len(table.met & wanted):,} of {len(wanted):,} pairs that a scenario meets"
    return table, f"{counted(count, 'case')} drawn from seed {seed}: {share}"


def planted(case: Case, fault: str) -> Case:
    """``case`` of the system ``fault`` instead of its parent."""
    name = case.id.replace(f"::{case.implementation}::", f"::{fault}::", 1)
    return replace(case, id=name, implementation=fault)


def _is_of(case: Case, patterns: Sequence[str]) -> bool:
    """Whether a glob matches its implementation, or there is none."""
    return not patterns or any(fnmatchcase(case.implementation, glob) for glob in patterns)


def variations_of(patterns: Sequence[str]) -> Variations:
    """The cases that a campaign varies: all shipped systems, or the cells of your own classes.

    :raises SelectionError: a class that cannot be loaded, or that stands beside names.
    """
    if not (own := _own(patterns)):
        return shipped()
    if len(own) < len(patterns):
        remedy = "run one campaign for the classes and one for the names"
        raise SelectionError(Problem("--impl mixes classes and names", remedy, own[0]))
    preflight.check(own)
    return of_ones_own(own)


def _own(patterns: Sequence[str]) -> list[str]:
    return [pattern for pattern in patterns if ":" in pattern]


def names() -> list[str]:
    """The systems whose cases a campaign draws."""
    return sorted({system.name for system in known.SYSTEMS} | {*shipped().systems})


def by_id(name: str) -> Case | None:
    """The case of a campaign with the id ``name``; ``None`` if that is no id of a campaign.

    :raises SelectionError: this version of the suite draws another case under that number.
    """

    def draw(number: int, seed: int) -> Case:
        system = name.split("::")[2]
        fault = system if system.startswith(registry.MUTANTS) else ""
        parent = registry.load_mutant(fault).parent if fault else system
        systems = (own_system(parent),) if ":" in parent else known.SYSTEMS
        case = numbered_case(number, seed, systems, variations=variations_of([parent]))
        return planted(case, fault) if fault else case

    return drawn_again(name, "campaign", draw)


def drawn_again(name: str, kind: str, draw: Callable[[int, int], Case]) -> Case | None:
    """The case with the id ``name``, whose number and seed ``draw`` takes; ``None``: it is not one
    of this ``kind``.

    :raises SelectionError: this version of the suite draws another case under that number.
    """
    found = re.match(f"{kind}-([0-9]{{1,10}})::([0-9]{{1,6}})::", name)
    if found is None:
        return None
    case = draw(int(found[2]), int(found[1]))
    if case.id != name:
        remedy = "use the version of Shardproof that printed this id"
        raise SelectionError(Problem("this version cannot generate the random case", remedy, name))
    return case


def numbered_case(
    number: int,
    seed: int,
    systems: Sequence[System] = known.SYSTEMS,
    most_traits: int = MOST_TRAITS,
    variations: Variations | None = None,
) -> Case:
    """Case ``number`` of ``seed``: of ``systems``, or one of ``variations``."""
    source = random.Random(f"{seed} {number}")
    start = f"campaign-{seed}::{number:04d}"
    if variations is not None and variations.cases and source.random() < VARIED:
        case = variations.draw(source, most_traits)
        asked = dict.fromkeys((*GENERAL, *(name for name in case.checks if name in PLANNED)))
        plain = replace(case, scenario="campaign", label="", tier="quick", expect={}, source="")
        return _named(replace(plain, checks=tuple(asked)), start)
    while (drawn := _drawn(source, systems, most_traits)) is None:
        pass
    may_scale = variations is not None and drawn.lane not in EXACT
    if may_scale and not drawn.deaths and source.random() < RARE:
        drawn = scaled(drawn)
    return _named(drawn, start)


def _named(case: Case, start: str) -> Case:
    """``case`` with an id that tells what it is."""
    shape = "x".join(f"{axis}{size}" for axis, size in case.mesh.items())
    spec, few = case.workload, len(case.workload.traits) <= MOST_TRAITS
    traits = "+".join(spec.traits) if few else f"{len(spec.traits)}-traits"
    clipped = "noclip" if case.optimizer.clip_norm is None else "clip"
    asked = "-".join((case.lane, case.dtype, *case.precision.values()))
    system = f"{case.implementation}::{case.backend}::{shape}"
    model = f"{spec.name}::{traits or 'bare'}::{case.optimizer.name}::{clipped}"
    return replace(case, id=f"{start}::{system}::{model}::{asked}")


@functools.cache
def _carried(workload: str) -> tuple[str, ...]:
    """Traits that ``workload`` can carry but the overflow, which takes a loss scaler."""
    return tuple(
        name for name, trait in TRAITS.items() if workload in trait.applies_to and name != OVERFLOW
    )


def own_system(name: str) -> System:
    """A user's own class, which :func:`preflight.check` has loaded before.

    Options are its defaults.  Equal bits are not asked for: whether ranks or micro-batches are
    added up first, it does not say.

    :raises SelectionError: it takes no default options.
    """
    try:
        declared = Declaration.of(registry.load(name), {})
    except Refused as error:
        raise SelectionError(
            Problem(f"--impl: {error}", "give each option a default value", name)
        ) from error
    largest, several = known.LARGEST_WORLD, len(declared.axes) > 1
    most = declared.max_world or largest
    sizes = range(1, 3 if several or cutting("widths") in declared.axes else largest + 1)
    meshes = [
        dict(zip(declared.axes, shape, strict=True))
        for shape in itertools.product(sizes, repeat=len(declared.axes))
        if math.prod(shape) <= min(most, known.LARGEST_GRID)
    ]
    exact = {"float32", "float64"} & {*declared.dtypes}
    chosen = known.LAYERED if cutting("widths") in declared.axes else System.workloads
    return System(
        name,
        meshes,
        stages=lambda setup: setup.parts("layers") if cutting("layers") in setup.mesh else 0,
        workloads=tuple(workload for workload in chosen if exact or workload != known.DYADIC),
        lanes=known.NO_BITWISE if "float64" in declared.dtypes else ("working_precision",),
    )


def _drawn(source: random.Random, systems: Sequence[System], most_traits: int) -> Case | None:
    """A case without an id; ``None`` if no batch goes with what is drawn."""
    system = source.choices(systems, [system.chance for system in systems])[0]
    setup = _setup(source, system)
    declared = Declaration.of(registry.load(system.name), setup.options)
    backend = source.choice([name for name in BACKENDS if not declared.denied(name)])
    if math.prod(setup.mesh.values()) > known.MOST_PROCESSES:
        backend = USUAL
    lane, dtype, policy = _lane(source, setup.workload, system, declared)
    if setup.workload == known.NORMED and "parameters" in policy:
        policy = {**policy, "buffers": policy["parameters"]}
    if not system.takes(setup, policy):
        dtype, policy = POLICIES[0]
    if policy:
        setup = replace(setup, options={**setup.options, "precision": dict(policy)})
        declared = Declaration.of(registry.load(system.name), setup.options)
    spec = _workload(source, system, setup, lane, declared, most_traits)
    if spec is None:
        return None
    groups = workloads.suggested_groups(spec.traits)
    optimizer = replace(_optimizer(source, lane, system.clips), groups=groups)
    steps = source.choice((3, 4))
    membership, deaths = dict[str, tuple[int, ...]](), list[Death]()
    if system.changes_members:
        steps, threads = 5, KNOWN_BACKENDS[backend].threads
        membership, deaths = _members(source, setup.coordinates, steps, threads)
    return Case(
        id="",
        scenario="campaign",
        implementation=system.name,
        options=setup.options,
        backend=backend,
        mesh=setup.mesh,
        workload=spec,
        optimizer=optimizer,
        lane=lane,
        dtype=dtype,
        precision=dict(policy),
        checks=(*GENERAL, *(("membership",) if membership or deaths else ())),
        steps=steps,
        membership=membership,
        deaths=tuple(deaths),
    )


def _members(
    source: random.Random, world: int, steps: int, die: bool
) -> tuple[dict[str, tuple[int, ...]], list[Death]]:
    """Members that change: some stay at every change, and somebody lives through every death."""
    now = [*range(world)]
    changes, deaths = dict[str, tuple[int, ...]](), list[Death]()
    for step in range(1, steps):
        if source.random() < 0.5:
            stay = source.sample(now, source.randint(1, len(now)))
            others = [rank for rank in range(world) if rank not in now]
            join = source.sample(others, source.randint(0, len(others)))
            if sorted(stay + join) != now:
                now = sorted(stay + join)
                changes[str(step)] = tuple(now)
        if die and len(now) > 1 and source.random() < 0.25:
            # A step has two calls at least: a bucket, and the vote.
            deaths.append(Death(source.choice(now), step, source.randint(0, 1)))
            now = [rank for rank in now if rank != deaths[-1].rank]
    return changes, deaths


def _setup(source: random.Random, system: System) -> Setup:
    while True:
        mesh = dict(source.choice(list(system.meshes)))
        options = {name: source.choice(choices) for name, choices in system.options.items()}
        setup = Setup(options, mesh, source.choice(system.workloads))
        if system.only(setup):
            return setup


def _lane(
    source: random.Random, workload: str, system: System, declared: Capabilities
) -> tuple[Lane, str, Policy]:
    """A lane that ``workload`` has a form for, a dtype and a policy with which it is judged."""
    if workload == known.DYADIC:
        dtypes = [dtype for dtype in ("float32", "float64") if dtype in declared.dtypes]
        return "dyadic", source.choice(dtypes), {}
    lane = source.choice(system.lanes)
    if lane == "working_precision":
        policies = POLICIES if system.mixed else POLICIES[:2]
        return lane, *source.choice([one for one in policies if one[0] in declared.dtypes])
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
    system: System,
    setup: Setup,
    lane: Lane,
    declared: Capabilities,
    most_traits: int,
) -> WorkloadSpec | None:
    """A random workload that can be made: some traits ask for more than one micro-batch.

    The model has a unit at least for each stage.  Where unequal numbers of micro-batches are
    declined, every data coordinate has as many.
    """
    one = lane == "bitwise" and system.sums_ranks_first(setup)
    strided = lane == "bitwise" and system.flattens(setup)
    declined = {*declared.declines, *([UNEQUAL] if one else []), *([STRIDED] if strided else [])}
    carried = sorted(trait for trait in _carried(setup.workload) if trait not in declined)
    most_micro_batches = 1 if one else system.most_micro_batches
    stages, params = system.stages(setup), dict(system.sizes(source, setup))
    if stages:
        params["layers"] = stages + source.randint(0, 2)
    for _ in range(MOST_TRIES):
        spec = WorkloadSpec(
            setup.workload,
            traits=tuple(sorted(source.sample(carried, source.randint(0, most_traits)))),
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
        if can_train(system, setup, spec, declined):
            return spec
    return None


def can_train(system: System, setup: Setup, spec: WorkloadSpec, declined: Collection[str]) -> bool:
    """Whether ``setup`` can go with a workload, of which it declines some traits."""
    if not {*spec.traits}.isdisjoint(declined):
        return False
    counts = spec.micro_batch_counts(setup.coordinates if UNEQUAL in declined else 1)
    sizes, stages = {len(window) for window in setup.windows(spec)}, system.stages(setup)
    return (
        len(set(counts)) == 1
        and spec.params.get("layers", stages) >= stages
        and system.cuts(setup, spec)
        and all(has_schedule(system.name, setup, size) for size in sizes)
    )


def has_schedule(name: str, setup: Setup, micro_batches: int) -> bool:
    """Whether ``name`` does not refuse windows of so many micro-batches."""
    try:
        registry.load(name).schedule(setup.options, setup.parts("layers"), micro_batches)
    except Refused:
        return False
    return True
