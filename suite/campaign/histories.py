"""Random clean histories of saves, loads and reshapes: ``python -m tools.studies checkpoints``.

A history is a case of the campaign, of a system that can save, with a checkpoint plan that is drawn
as well: format, how many stay, when and how often it saves, and who loads: the same ranks, another
mesh, another strategy, another policy of precision.  The check ``checkpoint`` judges each, beside
those that any case has; one that fails is a false alarm.  Case ``number`` depends on the seed and
on that number alone.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof import registry, workloads
from shardproof.backends import USUAL, USUAL_PROCESSES
from shardproof.campaign import draws
from shardproof.campaign.systems import DYADIC, NORMED, SYSTEMS, Setup, System
from shardproof.case import Case, CheckpointPlan
from shardproof.registry.declaration import Declaration

SCENARIO = "histories"
CHECKS = ("equivalence", "replicas", "traffic", "checkpoint")
#: A system of the suite: what upstream checkpoints get wrong are findings, not false alarms.
FAMILY = "reference/"
MOST_KEPT = 3
#: Who loads is drawn so often, then it is who saved.
MOST_TRIES = 30


@functools.cache
def systems() -> tuple[System, ...]:
    """Those of a campaign that can save."""
    able = []
    for system in SYSTEMS:
        some = {name: choices[0] for name, choices in system.options.items()}  # none is refused
        is_ours = system.name.startswith(FAMILY)  # others may lack a package here
        if is_ours and registry.load(system.name).capabilities(some).checkpoints:
            able.append(system)
    return tuple(able)


def first_cases(count: int, seed: int, patterns: Sequence[str] = ()) -> list[Case]:
    """The first ``count`` histories of ``seed`` whose saver a glob matches.

    :raises SelectionError: a pattern that matches none of the systems.
    """
    known = sorted({system.name for system in systems()})
    draw = functools.partial(numbered_case, seed=seed)
    return draws.matching(count, draw, patterns, known, "that saves")


def by_id(name: str) -> Case | None:
    """The history with the id ``name``; ``None`` if that is no id of one.

    :raises SelectionError: this version of the suite draws another case under that number.
    """
    return draws.drawn_again(name, SCENARIO, numbered_case)


def numbered_case(number: int, seed: int) -> Case:
    """A trained case of the campaign, and what is saved and loaded of it."""
    source = random.Random(f"{seed} history {number}")
    base = draws.numbered_case(number, source.randrange(2**31), systems())
    formats = registry.load(base.implementation).capabilities(base.options).checkpoints
    chosen = {"format": source.choice(sorted(formats)), "keep": source.randint(1, MOST_KEPT)}
    base = dataclasses.replace(
        base,
        options={**base.options, "checkpoint": chosen},
        # Of saves MPI shows nothing that gloo does not, and takes three times as long.
        backend=USUAL_PROCESSES if base.backend == USUAL_PROCESSES else USUAL,
        steps=source.choice((3, 4, 5)),
    )
    save_at = source.randint(1, base.steps - 1)
    saves = source.randint(1, save_at)
    into, shape = _into(source, base)
    trained = source.choice((0, 0, save_at))
    system, _, *rest = base.id.split("::")[2:]
    written = f"{chosen['format']}-{saves}-at-{save_at}-keep-{chosen['keep']}"
    written += f"-trained-{trained}" if trained else ""
    start = f"{SCENARIO}-{seed}::{number:04d}"
    name = "::".join([start, system, base.backend, *rest, written, shape])
    return dataclasses.replace(
        base,
        id=name,
        scenario=SCENARIO,
        checks=CHECKS,
        checkpoint=CheckpointPlan(save_at, saves, into, trained=trained),
    )


def _into(source: random.Random, case: Case) -> tuple[Mapping[str, Any], str]:
    """The restoring system of ``case``, in the form of scenarios, and a word for it."""
    kind = source.choice(("same", "mesh", "mesh", "system", "system", "precision"))
    if "compress" in case.options:
        kind = "same"  # what is lost hangs on the shape
    for _ in range(MOST_TRIES if kind != "same" else 0):
        if kind == "precision":
            if (policy := _policy(source, case)) is not None:
                return {"precision": policy}, f"as-{'-'.join(policy.values()) or case.dtype}"
            continue
        named = kind == "mesh"
        whole = [s for s in systems() if "compress" not in s.options]
        system = source.choice([s for s in whole if (s.name == case.implementation) == named])
        mesh = dict(source.choice(list(system.meshes)))
        drawn = {name: source.choice(choices) for name, choices in system.options.items()}
        kept = {k: v for k, v in case.options.items() if k not in ("checkpoint", "precision")}
        setup = Setup(kept if named else drawn, mesh, case.workload.name)
        # Several systems may have one name, and other choices.
        is_own = all(kept.get(name) in choices for name, choices in system.options.items())
        if named and (mesh == case.mesh or not is_own):
            continue
        if not _fits(system, setup, case):
            continue
        name = "x".join(f"{axis}{size}" for axis, size in mesh.items())
        if named:
            return {"mesh": mesh}, f"on-{name}"
        into = {"implementation": system.name, "options": drawn, "mesh": mesh}
        return into, f"as-{system.name.removeprefix(FAMILY)}-{name}"
    return {}, "same"


def _fits(system: System, setup: Setup, case: Case) -> bool:
    """Whether ``setup`` can continue with the state that ``case`` trains."""
    spec = case.workload
    if spec.name not in system.workloads or case.lane not in (*system.lanes, "dyadic"):
        return False
    if not system.only(setup) or not system.takes(setup, case.precision):
        return False
    clips = case.optimizer.clip_norm is not None
    if (case.precision and not system.mixed) or (clips and not system.clips):
        return False
    every = setup.options.get("recompute_every", 0)
    if every and every > len(workloads.make(spec, case.dtype, case.lane).units):
        return False
    options = {**setup.options, **({"precision": case.precision} if case.precision else {})}
    declared = Declaration.of(registry.load(system.name), options)
    loads = dataclasses.replace(case, implementation=system.name, options=options, mesh=setup.mesh)
    if declared.excludes_case(loads, ""):  # e.g. a loss term over the global batch
        return False
    return draws.can_train(system, setup, spec, declared.declines) and _can_share(setup, case)


def _can_share(setup: Setup, case: Case) -> bool:
    """Whether tensor ranks and stages can share the model, as the campaign draws it for them."""
    knobs = case.workload.params
    if setup.parts("layers") > 1 and "layers" not in knobs:
        return False
    ranks = setup.parts("widths")
    if ranks == 1:
        return True
    if case.workload.name == DYADIC:
        return knobs.get("width") == 60
    heads, kv = knobs.get("heads", 0), knobs.get("kv_heads", 0)
    return bool(heads and kv) and heads % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0)


def _policy(source: random.Random, case: Case) -> Mapping[str, str] | None:
    """Another policy of what was built alike; ``None``: the system or the lane has none."""
    system = next(s for s in systems() if s.name == case.implementation)
    if case.lane != "working_precision" or not system.mixed:
        return None
    policies = [p for built, p in draws.POLICIES if built == case.dtype]
    if case.workload.name == NORMED:  # buffers of another dtype are refused
        kept = case.precision.get("parameters")
        buffers = {"buffers": kept} if kept else {}
        policies = [{**p, **buffers} for p in policies if p.get("parameters") == kept]
    policies = [policy for policy in policies if policy != case.precision]
    return source.choice(policies) if policies else None
