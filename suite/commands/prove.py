"""One call from Python: judge an implementation and get its verdicts as a DataFrame."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from shardproof.axes import cutting
from shardproof.backends import USUAL, USUAL_PROCESSES
from shardproof.by_path import only_in_programs
from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.checks import GENERAL
from shardproof.checks.results import OF_THIS_RUN, CaseResult
from shardproof.commands.prove_arguments import (
    are,
    are_folders,
    dtype_name,
    is_ones_own,
    rerun,
    several,
)
from shardproof.contract import OptimizerSpec, Options
from shardproof.errors import InputError, Problem, ScenarioError, SelectionError
from shardproof.registry import adapters

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from shardproof.contract import Implementation
    from shardproof.workloads.own import OwnWorkload

#: Trained in every lane that it has a form for; in others, the first workload that has one.
DEFAULT_WORKLOAD = "charnames_gpt"
#: Added to an optimizer that is given by its name, so that a system which ignores either fails.
BY_NAME = {"weight_decay": 0.1, "warmup_steps": 2}
COLUMNS = (
    *("case", "implementation", "backend", "world", "workload", "traits", "optimizer", "clip"),
    *("lane", "dtype", "verdict", "reason", "error", "bound", "bytes_sent", "bytes_expected"),
    *("seconds", "rerun"),
)


P = ParamSpec("P")
R = TypeVar("R")


def _told_alone(function: Callable[P, R]) -> Callable[P, R]:
    """Wrong input ends with its message below the caller's line: how it was found is no help."""

    @functools.wraps(function)
    def told(*given: P.args, **named: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*given, **named)
        except InputError as error:
            raise error.with_traceback(None) from None

    return told


@_told_alone
def prove(
    implementation: str | type[Implementation] | None = None,
    *,
    hook: adapters.Thing | None = None,
    state: adapters.Thing | None = None,
    schedule: adapters.Thing | None = None,
    tensor_plan: adapters.Thing | None = None,
    sampler: adapters.Thing | None = None,
    workload: str | WorkloadSpec | OwnWorkload | None = None,
    traits: Sequence[str] = (),
    optimizer: str | OptimizerSpec | Callable[..., Any] = "sgd",
    settings: str | OptimizerSpec | None = None,
    clip: Sequence[float | None] = (None,),
    backends: Sequence[str] | None = None,
    worlds: Sequence[int] = (1, 2, 3),
    axis: str | None = None,
    meshes: Sequence[Mapping[str, int]] = (),
    lanes: Sequence[Lane] = ("fp64",),
    dtype: str | torch.dtype | None = None,
    precision: Mapping[str, str | torch.dtype] | None = None,
    options: Options | None = None,
    checks: Sequence[str] = GENERAL,
    depth: Literal["", "family", "layout"] = "",
    steps: int = 3,
    deadline: float = 60.0,
    jobs: int = 1,
    results: Path | None = None,
) -> pd.DataFrame:
    """Judge ``implementation`` in every combination, and return one row per case.

    ``implementation`` is a name (``reference/ddp``, ``package.module:Class``) or a class that has
    one.  In its place may stand, as an object that a module or this program holds or as its path
    ``package.module:name`` (``docs/what-you-have.md``): ``hook``, a communication hook of DDP (with
    what makes its ``state``); ``optimizer``, a function that makes one of parameters and
    ``settings``; ``schedule``, a class of ``torch.distributed.pipelining``; ``tensor_plan``, what
    ``parallelize_module`` takes; ``sampler``, a class that is made and used like torch's
    ``DistributedSampler``.

    ``workload`` is the model with its data, one of the suite's or an ``OwnWorkload``
    (``shardproof list traits`` names the conditions that make it harder); unless given
    ``charnames_gpt``, in the lane ``dyadic`` ``dyadic_mlp``, the only one with a form for it, by
    steps of plain SGD that a power of two scales.  An optimizer by its name decays weights by 0.1
    and warms up for 2 steps; an ``OptimizerSpec`` is taken as it is.  Defaults leave out parameter
    groups (the trait ``two_groups``), clipping, loss scaling, buffers, uneven batches, other
    traits, backends and dtypes, and steps after the third.

    Meshes are ``{axis: world}`` for every one of ``worlds``, ``axis`` being the one that the
    implementation claims unless given; or ``meshes`` as given, which a strategy of several axes
    needs.  ``backends``: unless given ``in_memory``, or ``gloo`` where the system does not run on
    that.  ``clip`` are clip norms, ``None`` is off.  ``dtype`` is that of the lane unless given,
    ``precision`` what differs from it, as in a scenario (``{"reduce": "bfloat16"}``); dtypes are
    named or torch's.  ``depth``:
    how closely the system is held to its strategy, unless as it declares.  ``deadline``: CPU
    seconds that a rank may compute.
    With ``results`` the evidence is written into that run folder, which must not hold another case
    of the same id: one for each workload.  Whatever is not given here has the defaults of a
    scenario file, for the call becomes one (``scenarios/``).

    A sampler, or a system of a workload that trains nothing (``calls``, ``epochs``), is compared in
    lane ``bitwise`` by the check of that workload, without an optimizer.

    Columns: :data:`COLUMNS`; ``verdict`` is one of the suite's, ``rerun`` a command that judges
    the case alone.  Cases run in processes of their own, so that nothing that an implementation
    does can harm the caller.

    :raises SelectionError: before anything runs: an implementation that does not exist or cannot
        be loaded, a value that is not valid, a lane without a form of the workload, or several axes
        and neither ``axis`` nor ``meshes``.
    """
    import torch

    from shardproof import registry
    from shardproof.cases import kinds
    from shardproof.cases.kinds.kind import UntrainedKind
    from shardproof.cases.runner import Session

    only_in_programs()
    are({"options": options, "precision": precision}, Mapping, "a mapping")
    are_folders(results)
    named = {"dtype": dtype} | {f"precision[{key!r}]": of for key, of in (precision or {}).items()}
    are(named, (str, torch.dtype), "the name of a dtype, such as 'float32'")
    built = None if dtype is None else dtype_name(dtype)
    lowered = {key: dtype_name(of) for key, of in (precision or {}).items()}
    things = {"hook": hook, "state": state, "schedule": schedule, "tensor_plan": tensor_plan}
    things["sampler"] = sampler
    if sampler is not None and workload is None:
        workload = kinds.SAMPLES.name
    called = None if workload is None else kinds.of(_spec(workload, ()))
    if isinstance(called, UntrainedKind):
        axis = axis or cutting("samples")
        lanes = ("bitwise",) if lanes == ("fp64",) else lanes
        checks = (called.only_check,) if checks == GENERAL else checks
    data: str | OptimizerSpec
    path = isinstance(optimizer, str) and ":" in optimizer
    if isinstance(optimizer, OptimizerSpec | str) and not path:
        data = optimizer
        if settings is not None:
            remedy = "give it beside a function of your own; optimizer='adamw' says all by itself"
            raise SelectionError(Problem("settings= belongs to optimizer=", remedy))
    else:
        is_ones_own(optimizer, implementation)
        things["optimizer"], data = optimizer, settings or "sgd"
    name, options = adapters.subject(implementation, things, options or {})
    registry.check(name)
    choice = {"name": name, **({"options": options, "label": "given"} if options else {})}

    dtypes = {**({} if built is None else {"built": built}), **lowered}
    policy = {"precision": {"label": "-".join(dtypes.values()), **dtypes}} if dtypes else {}

    def expanded(along: str, on: Sequence[str]) -> list[Case]:
        places = [
            (mesh, backend)
            for mesh in several(meshes) or [{along: world} for world in several(worlds)]
            for backend in on
        ]
        # World by world, each with its lanes: the order of the arguments, not that of scenarios.
        # By id, for a value may be given twice.
        by_id = {
            case.id: case
            for mesh, backend in places
            for lane in several(lanes)
            for case in _cases_of(
                {
                    "name": "prove",
                    "about": "cases of one call of prove()",
                    "sees": "whatever the checks see",
                    "workload": _workload(workload, traits, lane),
                    "matrix": {
                        "implementation": choice,
                        "backend": backend,
                        "mesh": mesh,
                        "clip": _clips(clip, data),
                        "lane": lane,
                        **policy,
                        **_trained_by(data, lane, called is None or called.trains),
                        **_variants(workload),
                    },
                    "checks": several(checks),
                    "steps": steps,
                    "deadline": deadline,
                }
            )
        }
        return list(by_id.values())

    # Once before a process starts, so that bad values are refused at once.
    along = cutting("samples") if axis is None else axis
    on = [USUAL] if backends is None else several(backends)
    cases = expanded(along, on)
    if not cases:
        raise SelectionError(Problem("nothing to judge", "name a world, a backend and a lane"))
    if depth not in ("", "family", "layout"):
        raise SelectionError(Problem("depth: unknown", "family or layout", repr(depth)))
    if type(jobs) is not int or jobs < 1:
        raise SelectionError(Problem("jobs: not a number of processes", "jobs=2", repr(jobs)))
    with Session(jobs) as session:
        session.check(name, options)
        asks_axis = axis is None and not meshes
        if asks_axis or backends is None:
            axes, usable = session.places(name, options)
            along = _only_axis(name, axes) if asks_axis else along
            if backends is None and usable and USUAL not in usable:
                on = [USUAL_PROCESSES if USUAL_PROCESSES in usable else usable[0]]
            cases = expanded(along, on)
        cases = session.with_found_traits([replace(case, depth=depth) for case in cases])
        if results is None:
            judged, _ = session.run(cases, lambda result: None)
        else:
            from shardproof import verdicts
            from shardproof.runs.run_folder import RunFolder, require_run_or_new

            require_run_or_new(Path(results))
            with RunFolder(Path(results), ["prove"]) as folder:
                folder.plan(cases)
                judged, _ = session.run(cases, folder.add, on_account=folder.keep)
                folder.close(verdicts.exit_code(verdicts.count(judged)))
    call = {
        "workload": workload if workload is None else _spec(workload, ()),
        "traits": tuple(several(traits)),
        "optimizer": data,
        "dtype": built,
        "precision": lowered,
        "options": options,
        "checks": tuple(several(checks)),
        "depth": depth,
        "steps": steps,
        "deadline": deadline,
    }
    return _frame(judged, cases, call)


def _only_axis(name: str, axes: Sequence[str]) -> str:
    if len(axes) > 1:
        mesh = ", ".join(f"{axis!r}: 2" for axis in axes)
        what = f"{name} has the axes {' and '.join(axes)}"
        one = " or ".join(f"axis={axis!r}" for axis in axes)
        remedy = f"give {one} for meshes along one, or all, e.g. meshes=[{{{mesh}}}]"
        raise SelectionError(Problem(what, remedy))
    # Who does not tell is broken or refuses the options: its case says how.
    return axes[0] if axes else cutting("samples")


def _clips(clip: Any, optimizer: str | OptimizerSpec) -> list[Any]:
    """The norms to clip by; an optimizer's own stands where ``clip`` is off."""
    own = None if isinstance(optimizer, str) else optimizer.clip_norm
    return list(dict.fromkeys(own if norm is None else norm for norm in several(clip)))


def _refuse(value: object) -> None:
    """What JSON, and so a scenario, has no form for.

    :raises SelectionError: always.
    """
    remedy = "give text, numbers, true or false, None, lists and mappings of these"
    raise SelectionError(Problem("not a value that a scenario can hold", remedy, repr(value)))


def _cases_of(scenario: Mapping[str, Any]) -> list[Case]:
    """The cases of ``scenario``, made and refused as those of a file are.

    :raises SelectionError: what the file would be refused for, without a line.
    """
    from shardproof.scenarios.load import load_text
    from shardproof.scenarios.matrix import expand
    from shardproof.scenarios.vocabulary import installed

    try:
        text = json.dumps(scenario, default=_refuse)
        return [replace(case, source="") for case in expand(load_text(text, "prove"), installed())]
    except ScenarioError as error:
        raise SelectionError(
            [
                replace(problem, file="prove", line=None, what=problem.what.replace("matrix.", ""))
                for problem in error.problems
            ]
        ) from None


def _workload(
    workload: str | WorkloadSpec | OwnWorkload | None, traits: Sequence[str], lane: Lane
) -> dict[str, Any]:
    """What ``lane`` trains, as a scenario says it."""
    from shardproof.workloads import in_lane

    if workload is None:
        valid = in_lane(lane)
        workload = DEFAULT_WORKLOAD if DEFAULT_WORKLOAD in valid else valid[0]
    spec = _spec(workload, several(traits))
    return asdict(spec) | {"traits": list(spec.traits)}


def _trained_by(optimizer: str | OptimizerSpec, lane: Lane, trains: bool) -> dict[str, Any]:
    return {"optimizer": _optimizer(optimizer, lane)} if trains else {}


def _variants(workload: Any) -> dict[str, Any]:
    """What a sampler is asked, where its workload is given by its name alone."""
    from shardproof.cases.kinds.samples.workload import NAME, USUAL

    if workload != NAME:
        return {}
    usual = USUAL.items()
    return {"workload": [{"label": label, "params": knobs} for label, knobs in usual]}


def _spec(workload: str | WorkloadSpec | OwnWorkload, traits: Sequence[str]) -> WorkloadSpec:
    """The workload as data, with ``traits`` beside its own."""
    if not isinstance(workload, WorkloadSpec):
        workload = WorkloadSpec(adapters.path_of(workload, "workload"))
    return replace(workload, traits=tuple(dict.fromkeys((*workload.traits, *traits))))


def _optimizer(optimizer: str | OptimizerSpec, lane: Lane) -> dict[str, Any]:
    """As a scenario says it; by its name in lane dyadic: plain SGD, scaled by a power of two."""
    name = optimizer if isinstance(optimizer, str) else optimizer.name
    if lane == "dyadic" and name == "adamw":
        what = "lane dyadic has exact sums with plain SGD only"
        raise SelectionError(Problem(what, "optimizer='sgd', or other lanes", name))
    if not isinstance(optimizer, str):
        return {key: value for key, value in asdict(optimizer).items() if key != "clip_norm"}
    return {"name": name, **({"lr": 0.125, "momentum": 0.0} if lane == "dyadic" else BY_NAME)}


def _of_called(case: Case) -> dict[str, Any]:
    """The argument that chooses a case of a workload that trains nothing."""
    from shardproof.cases import kinds

    return {} if kinds.of(case.workload).trains else {"workload": case.workload}


def _frame(
    results: Sequence[CaseResult], cases: Sequence[Case], call: Mapping[str, Any]
) -> pd.DataFrame:
    import pandas as pd

    by_id = {result.id: result for result in results}
    rows = [
        {
            "case": case.id,
            "implementation": case.implementation,
            "backend": case.backend,
            "world": case.world,
            "workload": case.workload.name,
            "traits": " ".join(case.workload.traits),
            "optimizer": case.optimizer.name,
            "clip": case.optimizer.clip_norm,
            "lane": case.lane,
            "dtype": case.dtype,
            "error": by_id[case.id].worst_error,
            **{
                key: getattr(by_id[case.id], key)
                for key in ("verdict", "reason", "bound", "bytes_sent", "bytes_expected")
            },
            "seconds": by_id[case.id].seconds,
            "rerun": (
                rerun(prove, case, {**call, **_of_called(case)})
                if OF_THIS_RUN in by_id[case.id].rerun
                else by_id[case.id].rerun
            ),
        }
        for case in cases
        if case.id in by_id
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
