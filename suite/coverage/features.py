"""Features of a case: what of a system a trigger can touch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardproof import axes
from shardproof.case import Case
from shardproof.contract import Options

#: Values with which an option asks for nothing.
_NOTHING = (None, False, 0, "none", "backend", "global", "shared", "inferred", "contiguous")
#: Options that ask for something with ``False``, too: their default is another value.
_EITHER = ("broadcast_buffers", "loss_parallel", "reshard_after_forward")
#: What a checkpoint's loader may have of its own, and the feature's word for it.
_LOADERS = {"implementation": "system", "mesh": "mesh", "options": "options", "precision": "dtype"}


#: Features that act where several ranks share what is cut: globs, and the axes whose ranks do.
_NEEDS: Sequence[tuple[Callable[[Mapping[str, int]], Iterable[str]], Sequence[str]]] = (
    (
        axes.summing,
        (
            *("all_reduce *", "reduce_scatter *", "all_gather *", "compress *", "data *"),
            *("*bucket*", "accumulate_without_communication", "sharding_strategy *"),
            *("reshard_after_forward", "no-reshard_after_forward", "prefetch_*", "every"),
            *("no-broadcast_buffers", "find_unused_parameters", "precision reduce *", "outer_*"),
        ),
    ),
    (axes.sending, ("schedule *", "split")),
    (
        lambda mesh: (axes.cutting("widths"),),
        ("sequence_parallel", "*loss_parallel", "sum_each_backward"),
    ),
    (lambda mesh: (axes.cutting("positions"),), ("method *", "cut *", "context")),
)


def of(case: Case) -> frozenset[str]:
    """Their names: a kind, and mostly a value, such as ``strategy reference/ddp``."""
    return frozenset((*_asked(case), *_of_options(case.options)))


def acting(case: Case) -> frozenset[str]:
    """Those that can do something: a group of one rank sends, cuts and sums nothing."""
    if case.world == 1:
        return frozenset()
    single = [globs for along, globs in _NEEDS if axes.size(case.mesh, along(case.mesh)) == 1]
    inert = [glob for globs in single for glob in globs]
    return frozenset(n for n in of(case) if not any(fnmatchcase(n, glob) for glob in inert))


def _asked(case: Case) -> Iterator[str]:
    yield from (f"strategy {case.implementation}", f"backend {case.backend}")
    yield f"optimizer {case.optimizer.name}"
    yield from (f"precision {role} {dtype}" for role, dtype in case.precision.items())
    asked = {
        "clipping": case.optimizer.clip_norm is not None,
        "loss-scaler": case.optimizer.scaler is not None,
        f"built {case.dtype}": case.lane == "working_precision",
        "members change": bool(case.membership),
        "members die": bool(case.deaths),
    }
    yield from (name for name, is_asked in asked.items() if is_asked)
    if case.checkpoint is not None:
        into = [f"load other-{_LOADERS[name]}" for name in case.checkpoint.into]
        yield from into or ["load same"]


def _of_options(options: Options) -> Iterator[str]:
    for name, value in options.items():
        if name == "data_options":
            yield from _of_options(value)
        elif name == "checkpoint":
            if isinstance(value, Mapping) and "format" in value:  # else its system's own default
                yield f"checkpoint {value['format']}"
        elif name == "compress":
            if value:
                yield f"compress {value['method']}"
            if value and value.get("feedback") is False:
                yield "compress without-feedback"
        elif name != "precision" and (said := _said(name, value)):
            yield said


def _said(name: str, value: Any) -> str:
    """One option; of numbers, lists and mappings only that it is given."""
    if value in _NOTHING and not (value is False and name in _EITHER):
        return ""
    if isinstance(value, Mapping):
        value = value.get("algorithm", True)
    if isinstance(value, str):
        return f"{name} {value}"
    return f"no-{name}" if value is False else name
