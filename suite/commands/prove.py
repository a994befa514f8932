"""One call from Python: judge an implementation and get its verdicts as a DataFrame."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shardproof import old_words
from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.checks import GENERAL
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec, Options
from shardproof.errors import Problem, ScenarioError, SelectionError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from shardproof.contract import Implementation

#: Ranks, as in scenarios.
MOST = 1024
#: Trained in every lane that it has a form for; in others, the first workload that has one.
DEFAULT_WORKLOAD = "charnames_gpt"
COLUMNS = (
    *("case", "implementation", "backend", "world", "workload", "traits", "optimizer", "clip"),
    *("lane", "dtype", "verdict", "reason", "error", "bound", "bytes_sent", "bytes_expected"),
    *("seconds", "rerun"),
)


def prove(
    implementation: str | type[Implementation],
    *,
    workload: str | WorkloadSpec | None = None,
    traits: Sequence[str] = (),
    optimizer: str | OptimizerSpec = "sgd",
    clip: Sequence[float | None] = (None,),
    backends: Sequence[str] = ("in_memory",),
    worlds: Sequence[int] = (1, 2, 3),
    axis: str | None = None,
    meshes: Sequence[Mapping[str, int]] = (),
    lanes: Sequence[Lane] = ("fp64",),
    dtype: str | None = None,
    options: Options | None = None,
    checks: Sequence[str] = GENERAL,
    steps: int = 3,
    deadline: float = 60.0,
    jobs: int = 1,
    results: Path | None = None,
) -> pd.DataFrame:
    """Judge ``implementation`` in every combination, and return one row per case.

    ``implementation`` is a name (``reference/ddp``, ``package.module:Class``) or a class that has
    one.  ``workload`` is the model with its data (``shardproof list traits`` names the conditions
    that make it harder); unless given ``charnames_gpt``, in the lane ``dyadic`` ``dyadic_mlp``, the
    only one with a form for it, by steps of plain SGD that a power of two scales.  Meshes are
    ``{axis: world}`` for every one of ``worlds``, ``axis`` being the one that the implementation
    claims unless given; or ``meshes`` as given, which a strategy of several axes needs.  ``clip``
    are clip norms, ``None`` is off.  ``dtype`` is that of the lane unless given.  ``deadline``:
    seconds a case.  With ``results`` the evidence is written into that run folder.  Whatever is not
    given here has the defaults of a scenario file, for the call becomes one (``scenarios/``).

    Columns: :data:`COLUMNS`; ``verdict`` is one of the suite's.  Cases run in processes of their
    own, so that nothing that an implementation does can harm the caller.

    :raises SelectionError: before anything runs: an implementation that does not exist or cannot
        be loaded, a value that is not valid, a lane without a form of the workload, or several axes
        and neither ``axis`` nor ``meshes``.
    """
    from shardproof import registry
    from shardproof.backends import BACKENDS
    from shardproof.case import AXES
    from shardproof.cases.runner import Session
    from shardproof.checks import CHECKS
    from shardproof.scenarios.schema import DtypeName

    name = implementation if isinstance(implementation, str) else _path_of(implementation)
    registry.check(name)
    backends = _known(backends, "backends", BACKENDS)
    lanes = _known(lanes, "lanes", get_args(Lane), "lane")
    checks = _known(checks, "checks", CHECKS, "check")
    _known(() if dtype is None else (dtype,), "dtype", get_args(DtypeName), empty=True)
    _known(() if axis is None else (axis,), "axis", AXES, empty=True)
    for mesh in meshes:
        _check_mesh(mesh, AXES)
    worlds = _sizes(worlds, "worlds", "worlds=(2, 3)")
    _sizes((steps,), "steps", "steps=3")
    _sizes((jobs,), "jobs", "jobs=2")
    if not _positive(deadline):
        raise SelectionError(
            Problem("deadline is not a time", "give seconds above 0", str(deadline))
        )
    clips = {lane: _clips(clip, optimizer, lane) for lane in lanes}
    workloads = {lane: _workload(workload, traits, lane) for lane in lanes}
    optimizers = {lane: _optimizer(optimizer, lane) for lane in lanes}
    with Session(jobs) as session:
        session.check(name)
        if not meshes:
            along = axis or _only_axis(name, session.axes(name, dict(options or {})))
            meshes = [{along: world} for world in worlds]
        choice = {"name": name, **({"options": dict(options), "label": "given"} if options else {})}
        cases = [
            replace(case, source="")
            for lane in lanes
            for case in _expanded(
                {
                    "name": "prove",
                    "about": "cases of one call of prove()",
                    "sees": "whatever the checks see",
                    "workload": workloads[lane],
                    "matrix": {
                        "implementation": choice,
                        "backend": list(backends),
                        "mesh": [dict(mesh) for mesh in meshes],
                        "optimizer": optimizers[lane],
                        "clip": clips[lane],
                        "lane": lane,
                        **({"precision": {"label": dtype, "built": dtype}} if dtype else {}),
                    },
                    "checks": list(checks),
                    "steps": steps,
                    "deadline": deadline,
                }
            )
        ]
        # World by world, each with its lanes: the order of the arguments, not that of scenarios.
        order = [(dict(mesh), backend) for mesh in meshes for backend in backends]
        cases.sort(key=lambda case: order.index((dict(case.mesh), case.backend)))
        if results is None:
            judged, _ = session.run(cases, lambda result: None)
        else:
            from shardproof import verdicts
            from shardproof.runs.run_folder import RunFolder

            with RunFolder(Path(results), ["prove"]) as folder:
                folder.plan(cases)
                judged, _ = session.run(cases, folder.add, on_account=folder.keep)
                folder.close(verdicts.exit_code(verdicts.count(judged)))
    return _frame(judged, cases)


def _only_axis(name: str, axes: Sequence[str]) -> str:
    if len(axes) > 1:
        mesh = ", ".join(f"{axis!r}: 2" for axis in axes)
        what = f"{name} has the axes {' and '.join(axes)}"
        remedy = f"give meshes, e.g. meshes=[{{{mesh}}}], or axis for a mesh along one of them"
        raise SelectionError(Problem(what, remedy))
    # Who does not tell is broken or refuses the options: its case says how.
    return axes[0] if axes else "replicate"


def _known(
    names: Any,
    what: str,
    valid: Collection[str],
    kind: old_words.Kind | None = None,
    empty: bool = False,
) -> Sequence[Any]:
    """``names``, each of which must be among ``valid``; old words for a ``kind`` warn."""
    if isinstance(names, str):
        names = (names,)
    remedy = f"{what}: {', '.join(valid)}"
    if not isinstance(names, Collection) or not (names or empty):
        raise SelectionError(Problem(f"{what} is empty", remedy, repr(names)))
    if kind is not None:
        names = [old_words.current(kind, name) for name in names]
    for name in names:
        if name not in valid:
            raise SelectionError(Problem(f"unknown {what}", remedy, str(name)))
    return tuple(names)


def _sizes(numbers: Any, what: str, example: str) -> Sequence[int]:
    """``numbers``, whole and from 1 to the most ranks that a scenario may ask for."""
    remedy = f"whole numbers from 1 to {MOST}, e.g. {example}"
    if isinstance(numbers, str) or not isinstance(numbers, Collection) or not numbers:
        raise SelectionError(Problem(f"{what} is not a list of numbers", remedy, repr(numbers)))
    for number in numbers:
        if type(number) is not int or not 1 <= number <= MOST:
            raise SelectionError(Problem(f"{what} has an invalid value", remedy, repr(number)))
    return tuple(numbers)


def _check_mesh(mesh: Any, axes: Sequence[str]) -> None:
    remedy = f"an axis ({', '.join(axes)}) and its ranks, e.g. {{'replicate': 2, 'shard': 2}}"
    if not isinstance(mesh, Mapping) or not mesh:
        raise SelectionError(Problem("meshes: not a mesh", remedy, repr(mesh)))
    for axis in mesh:
        if axis not in axes:
            raise SelectionError(Problem("meshes: unknown axis", remedy, repr(mesh)))
    _sizes(tuple(mesh.values()), "meshes", "{'replicate': 2, 'shard': 2}")


def _positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number < math.inf


def _clips(clip: Any, optimizer: str | OptimizerSpec, lane: str) -> list[float | None]:
    """The norms to clip by; an optimizer's own stands where ``clip`` is off."""
    if isinstance(clip, str) or not isinstance(clip, Collection) or not clip:
        remedy = "None (off) or numbers above 0, e.g. clip=(None, 0.5)"
        raise SelectionError(Problem("clip is not a list of norms", remedy, repr(clip)))
    own = None if isinstance(optimizer, str) else optimizer.clip_norm
    for norm in (*clip, own):
        if norm is not None and not _positive(norm):
            raise SelectionError(
                Problem("clip: not a norm", "None or a number above 0", repr(norm))
            )
        if norm is not None and lane in ("bitwise", "dyadic"):
            what = f"lane {lane} needs clipping off: a norm's sum has no fixed order"
            raise SelectionError(
                Problem(what, "lanes with clipping: fp64, working_precision", repr(norm))
            )
    return list(dict.fromkeys(own if norm is None else norm for norm in clip))


def _path_of(cls: Any) -> str:
    """How other processes import ``cls``."""
    if not isinstance(cls, type):
        remedy = "give a name, e.g. 'reference/ddp', or a class"
        raise SelectionError(Problem("not an implementation", remedy, repr(cls)))
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        what = "ranks cannot import this class"
        raise SelectionError(Problem(what, "put it at the top of a module", cls.__qualname__))
    return f"{cls.__module__}:{cls.__qualname__}"


def _expanded(scenario: Mapping[str, Any]) -> list[Case]:
    """The cases of ``scenario``, by the same way as those of a file.

    :raises SelectionError: what the file would be refused for, without a line.
    """
    from shardproof.scenarios.load import load_text
    from shardproof.scenarios.matrix import expand
    from shardproof.scenarios.vocabulary import installed

    try:
        return expand(load_text(json.dumps(scenario), "prove"), installed())
    except ScenarioError as error:
        problems = [replace(problem, file="prove", line=None) for problem in error.problems]
        raise SelectionError(problems) from None


def _workload(
    workload: str | WorkloadSpec | None, traits: Sequence[str], lane: Lane
) -> dict[str, Any]:
    """What ``lane`` trains, as a scenario says it."""
    from shardproof.workloads import in_lane

    if workload is None:
        valid = in_lane(lane)
        workload = DEFAULT_WORKLOAD if DEFAULT_WORKLOAD in valid else valid[0]
    spec = WorkloadSpec(workload) if isinstance(workload, str) else workload
    more = (traits,) if isinstance(traits, str) else traits
    return asdict(spec) | {"traits": list(dict.fromkeys((*spec.traits, *more)))}


def _optimizer(optimizer: str | OptimizerSpec, lane: Lane) -> dict[str, Any]:
    """As a scenario says it; by its name in lane dyadic: plain SGD, scaled by a power of two."""
    name = optimizer if isinstance(optimizer, str) else optimizer.name
    if name not in ("sgd", "adamw"):
        remedy = nearest(name, ("sgd", "adamw"), "optimizers")
        raise SelectionError(Problem("unknown optimizer", remedy, name))
    if lane == "dyadic" and name != "sgd":
        what = "lane dyadic has exact sums with plain SGD only"
        raise SelectionError(Problem(what, "optimizer='sgd', or other lanes", name))
    if not isinstance(optimizer, str):
        return {key: value for key, value in asdict(optimizer).items() if key != "clip_norm"}
    return {"name": name, **({"lr": 0.125, "momentum": 0.0} if lane == "dyadic" else {})}


def _frame(results: Sequence[CaseResult], cases: Sequence[Case]) -> pd.DataFrame:
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
            "rerun": f"prove({case.implementation!r}, ...): case {case.id}",
        }
        for case in cases
        if case.id in by_id
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
