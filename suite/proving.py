"""One call from Python: judge an implementation and get its verdicts as a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.case import Case, Lane, WorkloadSpec
from suite.contract import OptimizerSpec
from suite.errors import Problem, SelectionError

if TYPE_CHECKING:
    import pandas as pd

    from suite.contract import Implementation

#: Each skips what it has no promise for; memory is weighed on ``in_memory``.
CHECKS = ("equivalence", "replicas", "norm", "traffic", "memory", "overlap", "engagement")
#: The dtype of each lane.
DTYPES: Mapping[str, str] = {
    "bitwise": "float32",
    "dyadic": "float64",
    "fp64": "float64",
    "native": "bfloat16",
}
COLUMNS = (
    *("case", "implementation", "backend", "world", "workload", "traits", "optimizer", "clip"),
    *("lane", "dtype", "verdict", "reason", "error", "bound", "bytes_sent", "bytes_expected"),
    *("seconds", "rerun"),
)


def prove(
    implementation: str | type[Implementation],
    *,
    workload: str | WorkloadSpec = "charnames_gpt",
    traits: Sequence[str] = (),
    optimizer: str | OptimizerSpec = "sgd",
    clip: Sequence[float | None] = (None,),
    backends: Sequence[str] = ("in_memory",),
    worlds: Sequence[int] = (1, 2, 3),
    axis: str | None = None,
    meshes: Sequence[Mapping[str, int]] = (),
    lanes: Sequence[Lane] = ("fp64",),
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    checks: Sequence[str] = CHECKS,
    steps: int = 3,
    deadline: float = 60.0,
    jobs: int = 1,
    results: Path | None = None,
) -> pd.DataFrame:
    """Judge ``implementation`` in every combination, and return one row per case.

    ``implementation`` is a name (``reference/ddp``, ``package.module:Class``) or a class that has
    one.  ``workload`` is the model with its data (``shardproof list traits`` names the conditions
    that make it harder).  Meshes are ``{axis: world}`` for every one of ``worlds``, ``axis`` being
    the one that the implementation claims unless given; or ``meshes`` as given, which a strategy of
    several axes needs.  ``clip`` are clip norms, ``None`` is off.  ``dtype`` is that of the lane
    unless given.  With ``results`` the evidence is written into that run folder.

    Columns: :data:`COLUMNS`; ``verdict`` is one of the suite's.  Cases run in processes of their
    own, so that nothing that an implementation does can harm the caller.

    :raises SelectionError: an implementation, backend or lane that does not exist, or several axes
        and neither ``axis`` nor ``meshes``.
    """
    from suite import registry
    from suite.runner import Session

    name = implementation if isinstance(implementation, str) else _path_of(implementation)
    registry.check(name)
    backends, lanes = _known(backends, "backends"), _known(lanes, "lanes")
    settings: dict[str, Any] = {
        "options": dict(options or {}),
        "checks": tuple(checks),
        "steps": steps,
        "deadline": deadline,
    }
    with Session(jobs) as session:
        if not meshes:
            along = axis or _only_axis(name, session.axes(name, settings["options"]))
            meshes = [{along: world} for world in worlds]
        cases = [
            _case(name, mesh, backend, lane, norm, _spec(workload, traits), optimizer, dtype)
            for mesh in meshes
            for backend in backends
            for lane in lanes
            for norm in clip
        ]
        cases = [replace(case, **settings) for case in cases]
        if results is None:
            found, _ = session.run(cases, lambda result: None)
        else:
            from suite import verdicts
            from suite.results import RunFolder

            with RunFolder(Path(results), ["prove"]) as folder:
                folder.plan(cases)
                found, _ = session.run(cases, folder.add, on_account=folder.keep)
                folder.close(verdicts.exit_code(verdicts.count(found)))
    return _frame(found, cases)


def _only_axis(name: str, axes: Sequence[str]) -> str:
    if len(axes) > 1:
        mesh = ", ".join(f"{axis!r}: 2" for axis in axes)
        what = f"{name} has the axes {' and '.join(axes)}"
        remedy = f"give meshes, e.g. meshes=[{{{mesh}}}], or axis for a mesh along one of them"
        raise SelectionError(Problem(what, remedy))
    # Who does not tell is broken or refuses the options: its case says how.
    return axes[0] if axes else "replicate"


def _known(names: Sequence[str], what: str) -> Sequence[Any]:
    if isinstance(names, str):
        names = (names,)
    if what == "backends":
        from suite.backends import BACKENDS

        valid = list(BACKENDS)
    else:
        valid = list(DTYPES)
    for name in names:
        if name not in valid:
            raise SelectionError(Problem(f"unknown {what}", f"{what}: {', '.join(valid)}", name))
    return names


def _path_of(cls: type) -> str:
    """How other processes import ``cls``."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        what = "ranks cannot import this class"
        raise SelectionError(Problem(what, "put it at the top of a module", cls.__qualname__))
    return f"{cls.__module__}:{cls.__qualname__}"


def _spec(workload: str | WorkloadSpec, traits: Sequence[str]) -> WorkloadSpec:
    spec = WorkloadSpec(workload) if isinstance(workload, str) else workload
    return replace(spec, traits=tuple(dict.fromkeys((*spec.traits, *traits))))


def _case(
    name: str,
    mesh: Mapping[str, int],
    backend: str,
    lane: Lane,
    clip: float | None,
    workload: WorkloadSpec,
    optimizer: str | OptimizerSpec,
    dtype: str | None,
) -> Case:
    if isinstance(optimizer, str):
        rate = 0.1 if optimizer == "sgd" else 1e-3
        optimizer = OptimizerSpec(name=optimizer, lr=rate)  # type: ignore[arg-type]
    spec = replace(optimizer, clip_norm=clip if clip is not None else optimizer.clip_norm)
    shape = "x".join(f"{axis}{n}" for axis, n in mesh.items())
    clipped = "noclip" if spec.clip_norm is None else f"clip{spec.clip_norm:g}"
    words = (workload.name, *workload.traits)
    return Case(
        id=f"prove::{name}::{backend}::{shape}::{'+'.join(words)}::{spec.name}::{clipped}::{lane}",
        scenario="prove",
        implementation=name,
        backend=backend,
        mesh=dict(mesh),
        workload=workload,
        optimizer=spec,
        lane=lane,
        checks=(),
        dtype=dtype or DTYPES[lane],
    )


def _frame(results: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> pd.DataFrame:
    import pandas as pd

    by_id = {result["id"]: result for result in results}
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
            "error": by_id[case.id]["worst_error"],
            **{
                key: by_id[case.id][key]
                for key in ("verdict", "reason", "bound", "bytes_sent", "bytes_expected")
            },
            "seconds": by_id[case.id]["seconds"],
            "rerun": f"prove({case.implementation!r}, ...): case {case.id}",
        }
        for case in cases
        if case.id in by_id
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
