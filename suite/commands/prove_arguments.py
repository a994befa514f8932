"""What ``prove`` is given: what cannot be used is refused in words, and written down as a call."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from shardproof.backends import USUAL
from shardproof.case import Case, WorkloadSpec
from shardproof.contract import GroupSpec, OptimizerSpec, ScalerSpec
from shardproof.errors import Problem, SelectionError


def are(given: Mapping[str, Any], kind: Any, wanted: str) -> None:
    """Whether each of these arguments is a ``kind``, or was not given.

    :raises SelectionError: one is neither.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise SelectionError(Problem(f"{name}: cannot be used", f"give {wanted}", repr(value)))


def are_folders(results: Any) -> None:
    """:raises SelectionError: ``results`` is given, and no folder can be there."""
    are({"results": results}, (str, PathLike), "the path of a folder")
    if results is None:
        return
    remedy = "give the path of a folder, e.g. results='results/mine'"
    if not str(results).strip():
        raise SelectionError(Problem("results: an empty path", remedy, repr(results)))
    path = Path(results)
    for at in (path, *path.parents):
        if at.exists() and not at.is_dir():
            what = "results: is a file" if at == path else f"results: {str(at)!r} is a file"
            raise SelectionError(Problem(what, remedy, repr(str(path))))


def is_ones_own(optimizer: Any, implementation: Any) -> None:
    """An optimizer that is to be judged is a function of one's own, and is judged alone.

    :raises SelectionError: it is torch's own class or an optimizer that is made already, or stands
        beside an implementation.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    of_torch = f"{kind.__module__}.".startswith("torch.") and hasattr(kind, "step")
    by_name = {"SGD": "optimizer='sgd'", "AdamW": "optimizer='adamw'"}
    name = by_name.get(kind.__name__, "optimizer='sgd' or 'adamw'")
    takes = "groups, **settings.arguments" if kind.__name__ in by_name else "groups, ..."
    spec = "an OptimizerSpec of shardproof.contract"
    if implementation is not None:
        what = "optimizer=: what an implementation is trained with is given by its name"
        remedy = f"{name}, or {spec}; an optimizer of your own is judged without an implementation"
    elif not of_torch:
        return
    else:
        what = "optimizer=: a function of your own is judged, that makes the optimizer"
        remedy = (
            f"write def mine(groups, settings): return {kind.__name__}({takes}) and give "
            f"optimizer=mine; what an implementation is trained with: {name}"
        )
    shown = kind.__qualname__ if isinstance(optimizer, type) else repr(optimizer)
    raise SelectionError(Problem(what, remedy, " ".join(shown.split())))


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def several(values: Any) -> list[Any]:
    """A list of ``values``, of which one may be given alone."""
    alone = isinstance(values, str | Mapping) or not isinstance(values, Collection)
    return [values] if alone else list(values)


def rerun(prove: Callable[..., Any], case: Case, call: Mapping[str, Any]) -> str:
    """A command that judges ``case`` alone; ``call``: arguments that are the same for all cases."""
    usual = inspect.signature(prove).parameters
    own = {
        "meshes": [dict(case.mesh)],
        "backends": None if case.backend == USUAL else (case.backend,),
        "lanes": (case.lane,),
        "clip": (case.optimizer.clip_norm,),
    }
    given = [
        f"{key}={_written(value)}"
        for key, value in {**own, **call}.items()
        if value not in (usual[key].default, {}, None)
    ]
    text = ", ".join([repr(case.implementation), *given])
    kinds = (WorkloadSpec, OptimizerSpec, GroupSpec, ScalerSpec)
    needed = [kind for kind in kinds if f"{kind.__name__}(" in text]
    more = [f"from {kind.__module__} import {kind.__name__}" for kind in needed]
    judged = f"print(*prove({text}).loc[0], sep=chr(10))"
    code = "; ".join(["from shardproof import prove", *more, judged])
    # Between double quotes a shell leaves text alone in which nothing of this stands.
    is_plain = not {*code} & {*'"$`\\!'}
    return f'python -c "{code}"' if is_plain else f"python -c {shlex.quote(code)}"


def _written(value: Any) -> str:
    """``value`` as Python reads it; of a workload by its name alone, that."""
    if isinstance(value, WorkloadSpec) and value == WorkloadSpec(value.name):
        return repr(value.name)
    return repr(value)
