"""The reductions of a case: one row each, those that save most time first.

A reduction lists smaller cases, the smallest first.  It does not ask whether a system can run them:
:func:`possible` leaves out what a declaration or a scenario file rules out, and what is left is
tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from shardproof import axes, registry, workloads
from shardproof.backends import BACKENDS
from shardproof.case import Case, WorkloadSpec
from shardproof.cases import kinds
from shardproof.cases.kinds.kind import UntrainedKind
from shardproof.contract import OptimizerSpec, Options, Refused
from shardproof.registry.declaration import BrokenContract, Declaration
from shardproof.scenarios.matrix import DTYPES
from shardproof.scenarios.vocabulary import Vocabulary
from shardproof.shrink import document
from shardproof.shrink.cause import Cause
from shardproof.workloads.knobs import Knob

#: Meshes that are tried of one case, and settings of one option.
_MOST_MESHES = 14


@dataclass(frozen=True)
class Reduction:
    """``name``: what becomes less; ``smaller``: the smaller forms of a case, the smallest first."""

    name: str
    smaller: Callable[[Case], Iterator[Case]]


def ladder(least: int, most: int) -> list[int]:
    """Sizes below ``most``: ``least``, then twice as many each time, then one less than now."""
    sizes = [least]
    while sizes[-1] * 2 < most:
        sizes.append(max(sizes[-1] * 2, sizes[-1] + 1))
    return [*dict.fromkeys(size for size in (*sizes, most - 1) if least <= size < most)]


def parts(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """``items`` without some: none of them, either half, then all but one."""
    if not items:
        return
    half = len(items) // 2
    few = [(), tuple(items[:half]), tuple(items[half:])] if len(items) > 2 else [()]
    less_one = [tuple(one for one in items if one is not other) for other in items]
    yield from dict.fromkeys((*few, *less_one))


# ----------------------------------------------------------------------------- ranks and steps


def _backends(case: Case) -> Iterator[Case]:
    cost = BACKENDS[case.backend].default_seconds
    own = sorted(BACKENDS.own.items(), key=lambda one: one[1].default_seconds)
    for name, backend in own:
        if backend.default_seconds < cost and backend.has_values and backend.device == "cpu":
            yield replace(case, backend=name)


def _meshes(case: Case) -> Iterator[Case]:
    mesh = case.mesh
    sizes = {
        name: sorted({1, 2, 3, size // 2, size - 1, size} & {*range(1, size + 1)})
        for name, size in mesh.items()
    }
    found = []
    for kept in itertools.product(*([0, *sizes[name]] for name in mesh)):
        other = {name: size for name, size in zip(mesh, kept, strict=True) if size}
        if other and other != dict(mesh):
            found.append(other)
    # Where ranks are as few, fewer axes are simpler, and the order is that of the mesh.
    found.sort(key=lambda other: (math.prod(other.values()), len(other), -max(other.values())))
    world, count = case.world, len(mesh)
    smaller = [o for o in found if (math.prod(o.values()), len(o)) < (world, count)]
    for other in smaller[:_MOST_MESHES]:
        yield _with_mesh(case, other)


def _with_mesh(case: Case, mesh: Mapping[str, int]) -> Case:
    """``case`` on ``mesh``, with its plans on ranks that are left."""
    last = math.prod(mesh.values()) - 1
    fault = case.fault
    if fault is not None:
        blames = None if fault.blames is None else min(fault.blames, last)
        fault = replace(fault, rank=min(fault.rank, last), blames=blames)
    members = {s: tuple(r for r in ranks if r <= last) for s, ranks in case.membership.items()}
    deaths = tuple(death for death in case.deaths if death.rank <= last)
    members = {step: ranks for step, ranks in members.items() if ranks}
    return replace(case, mesh=mesh, fault=fault, membership=members, deaths=deaths)


def _steps(case: Case) -> Iterator[Case]:
    for steps in ladder(1, case.steps):
        yield _with_steps(case, steps)


def _with_steps(case: Case, steps: int) -> Case:
    """``case`` of so many steps, with its plans inside of them."""
    fault, saves = case.fault, case.checkpoint
    if fault is not None:
        fault = replace(fault, step=min(fault.step, steps - 1))
    if saves is not None:
        at = max(1, min(saves.save_at, steps - 1))
        again = min(saves.again_at, steps - 1)
        few = min(saves.saves, at), min(saves.trained, at)
        saves = replace(saves, save_at=at, saves=few[0], again_at=again, trained=few[1])
    members = {s: ranks for s, ranks in case.membership.items() if int(s) < steps}
    deaths = tuple(death for death in case.deaths if death.step < steps)
    changed = replace(case, steps=steps, fault=fault, checkpoint=saves)
    return replace(changed, membership=members, deaths=deaths)


# ------------------------------------------------------------------------------------ workload


def _of_workload(change: Callable[[Case], Iterator[Mapping[str, Any]]]) -> Any:
    def smaller(case: Case) -> Iterator[Case]:
        for changes in change(case):
            workload = replace(case.workload, **changes)
            # Parameter groups that only a trait suggested go with it.
            suggested = workloads.suggested_groups(case.workload.traits)
            optimizer = case.optimizer
            if suggested and optimizer.groups == suggested:
                groups = workloads.suggested_groups(workload.traits)
                optimizer = replace(optimizer, groups=groups)
            yield replace(case, workload=workload, optimizer=optimizer)

    return smaller


#: Sizes of models, and those below which none is simpler to read.
_LEAST = {"layers": 1, "width": 8, "channels": 2, "seq": 4, "heads": 1}


def _knobs(spec: WorkloadSpec) -> Mapping[str, Knob]:
    """The knobs of a workload; of one that trains nothing, as they are set."""
    if isinstance(kind := kinds.of(spec), UntrainedKind):
        return {name: Knob(value) for name, value in kind.resolve(spec).items()}
    family = workloads.WORKLOADS.get(spec.name)
    return family.knobs if family is not None else {}


def _sizes(case: Case) -> Iterator[Mapping[str, Any]]:
    """Knobs that are numbers: all at once, then each."""
    spec, known = case.workload, _knobs(case.workload)
    trains = kinds.of(spec).trains
    shown = {*spec.params, *(_LEAST if trains else known)} & {*known}
    now = {name: spec.params.get(name, known[name].default) for name in known if name in shown}
    counts = {n: v for n, v in now.items() if type(v) is int and not known[n].choices}
    least = {n: max(known[n].minimum, _LEAST.get(n, 1)) for n in counts}
    least = {n: size for n, size in least.items() if size < counts[n]}
    if len(least) > 1:
        yield {"params": {**spec.params, **least}}
    for name in least:
        for size in ladder(least[name], counts[name]):
            yield {"params": {**spec.params, name: size}}


def _params(case: Case) -> Iterator[Mapping[str, Any]]:
    """Parameters that are choices, or of a workload that trains nothing: left at their defaults."""
    spec, known = case.workload, _knobs(case.workload)
    given = [
        n for n in spec.params if n not in known or known[n].choices or known[n].default is None
    ]
    rest = {name: value for name, value in spec.params.items() if name not in given}
    for kept in parts(given):
        yield {"params": {**rest, **{name: spec.params[name] for name in kept}}}


def _traits(case: Case) -> Iterator[Mapping[str, Any]]:
    for kept in parts(case.workload.traits):
        yield {"traits": kept}


def _batch(case: Case) -> Iterator[Mapping[str, Any]]:
    spec = case.workload
    if not kinds.of(spec).trains:
        return
    least = max(1, case.data_coordinates * spec.micro_batches * spec.windows)
    for size in ladder(least, spec.global_batch):
        yield {"global_batch": size}


def _cuts(case: Case) -> Iterator[Mapping[str, Any]]:
    spec = case.workload
    if not kinds.of(spec).trains:
        return
    if spec.micro_batches > 1 and spec.windows > 1:
        yield {"micro_batches": 1, "windows": 1}
    for name in ("windows", "micro_batches"):
        for size in ladder(1, getattr(spec, name)):
            yield {name: size}


def _seed(case: Case) -> Iterator[Mapping[str, Any]]:
    if case.workload.seed:
        yield {"seed": 0}


# ---------------------------------------------------------------------- optimizer and precision


def _optimizers(case: Case) -> Iterator[Case]:
    """Plain SGD, then each setting as it is by default."""
    spec = case.optimizer
    plain = OptimizerSpec(lr=spec.lr if spec.name == "sgd" else 0.1)
    groups = workloads.suggested_groups(case.workload.traits)
    for other in (replace(plain, groups=groups, momentum=0.0), replace(plain, groups=groups)):
        if spec not in (other, replace(other, momentum=0.0)):
            yield replace(case, optimizer=other)
    usual = OptimizerSpec(spec.name, lr=spec.lr, groups=groups)
    for field in fields(OptimizerSpec):
        value = getattr(usual, field.name)
        if getattr(spec, field.name) not in (value, 0.0):
            yield replace(case, optimizer=replace(spec, **{field.name: value}))


def _precisions(case: Case) -> Iterator[Case]:
    plain = {k: v for k, v in case.options.items() if k != "precision"}
    if case.lane != "fp64":
        yield replace(case, lane="fp64", dtype=DTYPES["fp64"], precision={}, options=plain)
    if case.precision or case.dtype != DTYPES[case.lane]:
        yield replace(case, dtype=DTYPES[case.lane], precision={}, options=plain)
    for kept in parts([*case.precision]):
        policy = {name: case.precision[name] for name in kept}
        if policy:
            yield replace(case, precision=policy, options={**plain, "precision": policy})


# ---------------------------------------------------------------------------- options and plans


def _options(case: Case) -> Iterator[Case]:
    policy = {k: v for k, v in case.options.items() if k == "precision"}
    own = {k: v for k, v in case.options.items() if k not in policy}
    for other in _less(own):
        yield replace(case, options={**other, **policy}, label=case.label if other else "")


def _less(options: Options) -> Iterator[dict[str, Any]]:
    """``options`` without some, with less inside of one, or with a smaller number."""
    for kept in parts([*options]):
        yield {name: options[name] for name in kept}
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from ({**options, name: inner} for inner in _less(value) if inner)
        elif type(value) is int:
            yield from ({**options, name: size} for size in ladder(1, value))
        elif isinstance(value, list | tuple) and len(value) > 1:
            yield {**options, name: [*value[: len(value) // 2]]}


def _plans(case: Case) -> Iterator[Case]:
    """Without a plan, its check, or what it asks for beyond the check."""
    if case.fault is not None:
        yield replace(case, fault=None, checks=_without(case, "faults"))
    if case.checkpoint is not None:
        yield replace(case, checkpoint=None, checks=_without(case, "checkpoint"))
    if case.changes_members:
        checks = _without(case, "membership")
        yield replace(case, membership={}, deaths=(), checks=checks)
        for kept in parts(case.deaths):
            yield replace(case, deaths=kept)
        for steps in parts([*case.membership]):
            yield replace(case, membership={step: case.membership[step] for step in steps})
    if (saves := case.checkpoint) is not None:
        yield from (replace(case, checkpoint=replace(saves, into=o)) for o in _less(saves.into))
        small: Mapping[str, Any] = {"saves": 1, "again_at": 0, "trained": 0, "save_at": 1}
        for name, least in small.items():
            if getattr(saves, name) != least:
                yield replace(case, checkpoint=replace(saves, **{name: least}))
    if case.expect:
        relation = {k: v for k, v in case.expect.items() if k == "relation"}
        for expect in ({}, relation):
            checks = case.checks if expect else _without(case, "relations")
            if expect != case.expect:
                yield replace(case, expect=expect, checks=checks)


def _without(case: Case, check: str) -> tuple[str, ...]:
    return tuple(name for name in case.checks if name != check)


def only_check(case: Case, cause: Cause) -> Case:
    """``case`` judged by the check of ``cause`` alone, and what its plans need."""
    asked = {
        "faults": case.fault,
        "checkpoint": case.checkpoint,
        "relations": case.expect.get("relation"),
    }
    needed = [name for name, plan in asked.items() if plan]
    needed += ["membership"] if case.changes_members else []
    first = cause.check or next(iter(case.checks), "")
    kept = tuple(name for name in case.checks if name == first or name in needed)
    ours = {"relation": ("relations",), "traffic": ("traffic",), "memory": ("memory",)}
    expect = {k: v for k, v in case.expect.items() if {*ours.get(k, kept)} & {*kept}}
    return replace(case, checks=kept, expect=expect)


#: In the order in which they are tried.
REDUCTIONS = (
    Reduction("backend", _backends),
    Reduction("plans", _plans),
    Reduction("ranks", _meshes),
    Reduction("steps", _steps),
    Reduction("traits", _of_workload(_traits)),
    Reduction("sizes", _of_workload(_sizes)),
    Reduction("micro-batches", _of_workload(_cuts)),
    Reduction("batch", _of_workload(_batch)),
    Reduction("options", _options),
    Reduction("precision", _precisions),
    Reduction("optimizer", _optimizers),
    Reduction("parameters", _of_workload(_params)),
    Reduction("seed", _of_workload(_seed)),
)


def at_once(case: Case, vocabulary: Vocabulary) -> Iterator[Case]:
    """Many reductions in one jump: all, all but steps, all but what makes faults show, and so on.

    Options stay: without them a default may hold that takes more steps or ranks.
    """
    shows = ("traits", "plans", "parameters")
    for kept in ((), ("steps",), ("steps", *shows), ("ranks", "steps", *shows)):
        jump = case
        for one in REDUCTIONS:
            if one.name in ("options", *kept):
                continue
            forms = (form for form in one.smaller(jump) if one.name != "ranks" or form.world > 1)
            jump = next((form for form in forms if possible(form, vocabulary) is not None), jump)
        if jump != case:
            yield jump


def possible(case: Case, vocabulary: Vocabulary) -> Case | None:
    """``case`` as its file has it; ``None``: no file can, or the system declares that it cannot."""
    if (again := document.as_file(case, vocabulary)) is None:
        return None
    name = case.implementation
    if not registry.is_foreign(name) and registry.changes_nothing(name):
        try:
            declared = Declaration.of(registry.load(name), again.options)
            if kinds.of(again.workload).excludes(declared, again, ""):
                return None
        except (Refused, BrokenContract):
            return None
    # None of the ranks may be without samples, where the batch is shared out.
    shares = again.workload.cut(axes.size(again.mesh, axes.sharing(again.mesh)))
    return again if all(shares) or not kinds.of(again.workload).trains else None
