"""One call from Python: judge an implementation and get its verdicts as a DataFrame."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import shlex
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from shardproof.axes import cutting
from shardproof.backends import USUAL, USUAL_PROCESSES
from shardproof.by_path import only_in_programs
from shardproof.case import Case, Lane, WorkloadSpec
from shardproof.checks import GENERAL
from shardproof.checks.results import OF_THIS_RUN, CaseResult
from shardproof.contract import GroupSpec, OptimizerSpec, Options, ScalerSpec
from shardproof.errors import InputError, Problem, ScenarioError, SelectionError, shown
from shardproof.registry import adapters
from shardproof.workloads.knobs import LIKE_TRAITS

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from shardproof.cases.runner import Session
    from shardproof.contract import Implementation
    from shardproof.workloads.own import OwnWorkload

#: Trained in every lane that it has a form for; in others, the first workload that has one.
DEFAULT_WORKLOAD = "charnames_gpt"
#: Knobs of it under which a rank's whole share has no gradient in the first step, and the trait
#: that they ask for.
IDLE_SHARES = {"first_step": "head"}
IDLE_TRAIT = LIKE_TRAITS["first_step", "head"]
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
    checkpoints: Sequence[Mapping[str, Any]] = (),
    relation: str | Mapping[str, Any] | None = None,
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
    steps of plain SGD that a power of two scales.  Of an ``optimizer`` of your own, and of a class
    whose ranks own shares of a state and that declines no late use of parameters, the largest world
    has a step more on the default workload, the first, in which the head alone has a gradient, so
    that a rank's whole share has none (one world alone: in a case of its own).  An optimizer by its
    name decays weights by 0.1 and warms up for 2 steps; an ``OptimizerSpec`` is taken as it is.
    Defaults leave out parameter groups (the trait ``two_groups``), clipping, loss scaling, buffers,
    uneven batches, other traits, backends and dtypes, and steps after the third.

    Meshes are ``{axis: world}`` for every one of ``worlds``, ``axis`` being the one that the
    implementation claims unless given; or ``meshes`` as given, which a strategy of several axes
    needs.  ``backends``: unless given ``in_memory``, or ``gloo`` where the system does not run on
    that.  ``clip`` are clip norms, ``None`` is off.  ``dtype`` is that of the lane unless given,
    ``precision`` what differs from it, as in a scenario (``{"reduce": "bfloat16"}``); dtypes are
    named or torch's.  ``checkpoints`` are plans of a scenario, one more run of each case for each:
    ``[{"label": "resumed", "save_at": 2}]``; the check ``checkpoint`` judges them.  ``relation``:
    to a second run of each case, as a scenario names it: ``"cut"`` asks that nothing depends on how
    the batch is cut into micro-batches, windows and ranks.  ``depth``:
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
    from shardproof import registry
    from shardproof.cases import kinds
    from shardproof.cases.kinds.kind import UntrainedKind
    from shardproof.cases.kinds.samples import workload as samplers
    from shardproof.cases.runner import Session

    only_in_programs()
    _are({"options": options, "precision": precision}, Mapping, "a mapping")
    _are_folders(results)
    built, lowered = _dtypes(dtype, precision or {})
    if sampler is not None and workload is None:
        workload = kinds.SAMPLES.name
    spec = None if workload is None else _spec(workload, ())
    if spec is not None and isinstance(kind := kinds.of(spec), UntrainedKind):
        axis = axis or cutting("samples")
        lanes = ("bitwise",) if lanes == ("fp64",) else lanes
        checks = (kind.only_check,) if checks == GENERAL else checks
    things = {"hook": hook, "state": state, "schedule": schedule, "tensor_plan": tensor_plan}
    things |= {"sampler": sampler, "optimizer": None}
    data = _trained_by(optimizer, settings, implementation, things)
    name, options = adapters.subject(implementation, things, options or {})
    registry.check(name)
    traits, checks = tuple(_several(traits)), tuple(_several(checks))
    plans = tuple(_several(checkpoints))
    checks += ("checkpoint",) * (bool(plans) and "checkpoint" not in checks)
    checks += ("relations",) * (relation is not None and "relations" not in checks)
    given = (spec, traits, data, built, lowered, options, checks, plans, relation)
    # Of these some leave a rank early where nothing of its own has a gradient.
    chooses = spec is None and not traits
    own_optimizer = things["optimizer"] is not None
    deals = False
    call = ProveCall(*given, depth, steps, deadline)
    matrix = call.matrix(name, clip)
    if workload == kinds.SAMPLES.name:
        usual = samplers.USUAL.items()
        matrix["workload"] = [{"label": label, "params": knobs} for label, knobs in usual]

    def expanded(along: str, on: Sequence[str]) -> list[Case]:
        shapes = _several(meshes) or [{along: world} for world in _several(worlds)]
        return call.cases(matrix, shapes, on, _several(lanes))

    # Once before a process starts, so that bad values are refused at once.
    along = cutting("samples") if axis is None else axis
    on = [USUAL] if backends is None else _several(backends)
    cases = expanded(along, on)
    if not cases:
        raise SelectionError(Problem("worlds, backends or lanes is empty", "give one of each"))
    if depth not in ("", "family", "layout"):
        raise SelectionError(Problem("unknown depth", "write 'family' or 'layout'", repr(depth)))
    if type(jobs) is not int or jobs < 1:
        raise SelectionError(Problem("jobs must be an int, 1 or more", "give jobs=2", repr(jobs)))
    with Session(jobs) as session:
        session.check(name, options)
        asks_axis = axis is None and not meshes
        if asks_axis or backends is None or chooses:
            axes, usable, takes, owns = session.places(name, options)
            owns = owns and registry.is_foreign(name)
            deals = takes and chooses and (own_optimizer or owns)
            along = _only_axis(name, axes) if asks_axis else along
            if backends is None and usable and USUAL not in usable:
                on = [USUAL_PROCESSES if USUAL_PROCESSES in usable else usable[0]]
            cases = expanded(along, on)
        cases = _with_idle_shares(cases, not own_optimizer) if deals else cases
        cases = session.with_found_traits([replace(case, depth=depth) for case in cases])
        judged = _judged(session, cases, results)
    return _frame(judged, cases, call)


@dataclass(frozen=True)
class ProveCall:
    """The common part of all cases of one call of :func:`prove`; fields are its arguments."""

    workload: WorkloadSpec | None
    traits: Sequence[str]
    optimizer: str | OptimizerSpec
    dtype: str | None
    precision: Mapping[str, str]
    options: Options
    checks: Sequence[str]
    checkpoints: Sequence[Mapping[str, Any]]
    relation: str | Mapping[str, Any] | None
    depth: str
    steps: int
    deadline: float

    def matrix(self, name: str, clip: Any) -> dict[str, Any]:
        """The part of a scenario's matrix that all cases have; an optimizer's own norm stands where
        ``clip`` is off.
        """
        own = None if isinstance(self.optimizer, str) else self.optimizer.clip_norm
        dtypes = {**({} if self.dtype is None else {"built": self.dtype}), **self.precision}
        given = {"options": self.options, "label": "given"} if self.options else {}
        return {
            "implementation": {"name": name, **given},
            "clip": list(dict.fromkeys(own if norm is None else norm for norm in _several(clip))),
            **({"precision": {"label": "-".join(dtypes.values()), **dtypes}} if dtypes else {}),
        }

    def cases(
        self,
        matrix: Mapping[str, Any],
        meshes: Sequence[Mapping[str, int]],
        backends: Sequence[str],
        lanes: Sequence[Lane],
    ) -> list[Case]:
        """The cases on each mesh and backend in each lane, in this order, each id once."""
        from shardproof.cases import kinds

        trains = self.workload is None or kinds.of(self.workload).trains
        by_id: dict[str, Case] = {}
        for mesh, backend, lane in itertools.product(meshes, backends, lanes):
            trained = {"optimizer": self._optimizer(lane)} if trains else {}
            scenario = {
                "name": "prove",
                "about": "cases of one call of prove()",
                "sees": "whatever the checks see",
                "workload": self._workload(lane),
                "matrix": {**matrix, "backend": backend, "mesh": mesh, "lane": lane, **trained},
                "checks": self.checks,
                "checkpoints": self.checkpoints,
                "expect": {} if self.relation is None else {"relation": self.relation},
                "steps": self.steps,
                "deadline": self.deadline,
            }
            by_id |= {case.id: case for case in _cases_of(scenario)}
        return list(by_id.values())

    def _workload(self, lane: Lane) -> dict[str, Any]:
        """The workload of ``lane`` in the form of a scenario."""
        from shardproof.workloads import in_lane

        workload: str | WorkloadSpec | None = self.workload
        if workload is None:
            valid = in_lane(lane)
            workload = DEFAULT_WORKLOAD if DEFAULT_WORKLOAD in valid else valid[0]
        spec = _spec(workload, self.traits)
        return asdict(spec) | {"traits": list(spec.traits)}

    def _optimizer(self, lane: Lane) -> dict[str, Any]:
        """The optimizer in the form of a scenario; in lane dyadic its name: plain SGD, scaled by a
        power of two.
        """
        optimizer = self.optimizer
        name = optimizer if isinstance(optimizer, str) else optimizer.name
        if lane == "dyadic" and name == "adamw":
            what = "lane dyadic needs plain SGD: sums are not exact with AdamW"
            raise SelectionError(Problem(what, "choose optimizer='sgd', or leave dyadic out", name))
        if not isinstance(optimizer, str):
            return {key: value for key, value in asdict(optimizer).items() if key != "clip_norm"}
        return {"name": name, **({"lr": 0.125, "momentum": 0.0} if lane == "dyadic" else BY_NAME)}

    def is_idle(self, case: Case) -> bool:
        """Whether ``case`` is one that begins with idle shares because no workload was given."""
        return self.workload is None and dict(case.workload.params) == IDLE_SHARES

    def rerun(self, case: Case, names_work: bool) -> str:
        """A command that judges ``case`` alone; ``names_work``: only the workload's name excludes
        other cases.
        """
        from shardproof.cases import kinds

        usual = inspect.signature(prove).parameters
        arguments: dict[str, Any] = {
            "meshes": [dict(case.mesh)],
            "backends": None if case.backend == USUAL else (case.backend,),
            "lanes": (case.lane,),
            "clip": (case.optimizer.clip_norm,),
            **vars(self),
            **({"workload": case.workload, "steps": case.steps} if names_work else {}),
            **({} if kinds.of(case.workload).trains else {"workload": case.workload}),
        }
        work = arguments["workload"]
        if work is not None and work == WorkloadSpec(work.name):
            arguments["workload"] = work.name  # as people write it
        given = [
            f"{key}={value!r}"
            for key, value in arguments.items()
            if value not in (usual[key].default, {}, None)
        ]
        text = ", ".join([repr(case.implementation), *given])
        specs = (WorkloadSpec, OptimizerSpec, GroupSpec, ScalerSpec)
        needed = [kind for kind in specs if f"{kind.__name__}(" in text]
        more = [f"from {kind.__module__} import {kind.__name__}" for kind in needed]
        judged = f"print(*prove({text}).loc[0], sep=chr(10))"
        code = "; ".join(["from shardproof import prove", *more, judged])
        # Between double quotes a shell leaves text alone in which nothing of this stands.
        is_plain = not {*code} & {*'"$`\\!'}
        return f'python -c "{code}"' if is_plain else f"python -c {shlex.quote(code)}"


def _dtypes(
    dtype: str | torch.dtype | None, precision: Mapping[str, str | torch.dtype]
) -> tuple[str | None, dict[str, str]]:
    """Names of both: ``float32`` for ``torch.float32``.

    :raises SelectionError: something is no dtype.
    """
    import torch

    named = {"dtype": dtype} | {f"precision[{key!r}]": of for key, of in precision.items()}
    _are(named, (str, torch.dtype), "the name of a dtype, such as 'float32'")
    built, *lowered = (str(one).removeprefix("torch.") for one in (dtype, *precision.values()))
    return None if dtype is None else built, dict(zip(precision, lowered, strict=True))


def _trained_by(
    optimizer: Any, settings: Any, implementation: Any, things: MutableMapping[str, Any]
) -> str | OptimizerSpec:
    """The optimizer as data; one of the caller's own becomes one of the ``things`` to judge.

    :raises SelectionError: ``settings`` without such an optimizer, or one that cannot be judged.
    """
    path = isinstance(optimizer, str) and ":" in optimizer
    if isinstance(optimizer, OptimizerSpec | str) and not path:
        if settings is not None:
            remedy = "pass a function of your own to optimizer=, or leave settings= out"
            what = "settings= has no effect without a function as optimizer="
            raise SelectionError(Problem(what, remedy))
        return optimizer
    _is_ones_own(optimizer, implementation)
    things["optimizer"] = optimizer
    return settings or "sgd"


def _judged(session: Session, cases: Sequence[Case], results: Path | None) -> list[CaseResult]:
    """Run ``cases``, with ``results`` into that run folder."""
    from shardproof import verdicts
    from shardproof.runs.run_folder import RunFolder, require_run_or_new

    if results is None:
        return session.run(cases, lambda result: None)[0]
    require_run_or_new(Path(results))
    with RunFolder(Path(results), ["prove"]) as folder:
        cases = folder.bind(cases)
        folder.plan(cases)
        judged, _ = session.run(cases, folder.add, on_account=folder.keep)
        folder.close(verdicts.exit_code(verdicts.count(judged)))
    return judged


def _only_axis(name: str, axes: Sequence[str]) -> str:
    if len(axes) > 1:
        mesh = ", ".join(f"{axis!r}: 2" for axis in axes)
        what = f"{name} has the axes {' and '.join(axes)}"
        one = " or ".join(f"axis={axis!r}" for axis in axes)
        remedy = f"give {one} to use one of them, or meshes with all, e.g. meshes=[{{{mesh}}}]"
        raise SelectionError(Problem(what, remedy))
    # Who does not tell is broken or refuses the options: its case says how.
    return axes[0] if axes else cutting("samples")


def _refuse(value: object) -> None:
    """Refuse a value that JSON, and so a scenario, cannot hold.

    :raises SelectionError: always.
    """
    remedy = "give text, numbers, booleans, None, or lists and mappings of these"
    raise SelectionError(Problem("this value cannot be stored in a scenario", remedy, repr(value)))


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
        told = [(problem, problem.what.replace("matrix.", "")) for problem in error.problems]
        own = [replace(problem, file="prove", line=None, what=what) for problem, what in told]
        raise SelectionError(own) from None


def _spec(workload: str | WorkloadSpec | OwnWorkload, traits: Sequence[str]) -> WorkloadSpec:
    """The workload as data, with ``traits`` added to its own."""
    if not isinstance(workload, WorkloadSpec):
        workload = WorkloadSpec(adapters.path_of(workload, "workload"))
    return replace(workload, traits=tuple(dict.fromkeys((*workload.traits, *traits))))


def _with_idle_shares(cases: Sequence[Case], may_raise: bool) -> list[Case]:
    """``cases``, of which those in the largest world begin with a step more, in which whole shares
    have no gradient.  An optimizer has to leave what has none alone; a class need not have thought
    of it.  An only world has these cases in addition: what raises there says nothing of the rest.
    """
    unasked = IDLE_TRAIT if may_raise else ""
    worlds = {case.world for case in cases}
    changed = []
    for case in cases:
        work = case.workload
        takes = 1 < case.world == max(worlds) and work.name == DEFAULT_WORKLOAD
        changed += [case] if not takes or len(worlds) == 1 else []
        if takes:
            name = case.id.replace("::", "[idle-shares]::", 1)
            work = replace(work, params=IDLE_SHARES)
            steps = case.steps + 1
            changed.append(replace(case, id=name, workload=work, steps=steps, unasked=unasked))
    return changed


def _frame(results: Sequence[CaseResult], cases: Sequence[Case], call: ProveCall) -> pd.DataFrame:
    import pandas as pd

    of_case = ("implementation", "backend", "world", "lane", "dtype")
    of_result = ("verdict", "reason", "bound", "bytes_sent", "bytes_expected", "seconds")
    by_id = {result.id: result for result in results}
    rows, deals = [], any(map(call.is_idle, cases))
    for case, result in ((case, by_id[case.id]) for case in cases if case.id in by_id):
        row = {
            "case": case.id,
            "workload": case.workload.name,
            "traits": " ".join(case.workload.traits),
            "optimizer": case.optimizer.name,
            "clip": case.optimizer.clip_norm,
            "error": result.worst_error,
            "rerun": call.rerun(case, deals) if OF_THIS_RUN in result.rerun else result.rerun,
        }
        row |= {key: getattr(case, key) for key in of_case}
        row |= {key: getattr(result, key) for key in of_result}
        # A message of the user's may hold what moves a cursor, or a command to a runner of CI.
        rows.append(row | {"reason": shown(result.reason or "")})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _are(given: Mapping[str, Any], kind: Any, wanted: str) -> None:
    """Whether each of these arguments is a ``kind``, or was not given.

    :raises SelectionError: one is neither.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise SelectionError(Problem(f"{name}: wrong type", f"give {wanted}", repr(value)))


def _are_folders(results: Any) -> None:
    """:raises SelectionError: ``results`` is given, and no folder can be there."""
    _are({"results": results}, (str, PathLike), "the path of a folder")
    if results is None:
        return
    remedy = "give the path of a folder, e.g. results='results/mine'"
    if not str(results).strip():
        raise SelectionError(Problem("results is an empty path", remedy, repr(results)))
    path = Path(results)
    for at in (path, *path.parents):
        if at.exists() and not at.is_dir():
            what = "results: is a file" if at == path else f"results: {str(at)!r} is a file"
            raise SelectionError(Problem(what, remedy, repr(str(path))))


def _is_ones_own(optimizer: Any, implementation: Any) -> None:
    """Require that an optimizer under test is a function of yours, judged alone.

    :raises SelectionError: it is torch's own class or an optimizer that is made already, or stands
        beside an implementation.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    of_torch = f"{kind.__module__}.".startswith("torch.") and hasattr(kind, "step")
    by_name = {"SGD": "optimizer='sgd'", "AdamW": "optimizer='adamw'"}
    name = by_name.get(kind.__name__, "optimizer='sgd' or 'adamw'")
    takes = "groups, **settings.arguments" if kind.__name__ in by_name else "groups, ..."
    spec = "an OptimizerSpec of shardproof.contract"
    what = "optimizer=: expected a function that makes the optimizer"
    mine = (
        f"write def mine(groups, settings): return {kind.__name__}({takes}) and give optimizer=mine"
    )
    remedy = f"{mine}; to choose an implementation's optimizer: {name}"
    if implementation is not None:
        what = "optimizer=: with an implementation, the optimizer must be given as a name"
        remedy = f"{name}, or {spec}; to judge your own optimizer, leave the implementation out"
    elif not of_torch:
        return
    shown = kind.__qualname__ if isinstance(optimizer, type) else repr(optimizer)
    raise SelectionError(Problem(what, remedy, " ".join(shown.split())))


def _several(values: Any) -> list[Any]:
    """A list of ``values``, of which one may be given alone."""
    alone = isinstance(values, str | Mapping) or not isinstance(values, Collection)
    return [values] if alone else list(values)
