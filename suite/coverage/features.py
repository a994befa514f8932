"""Features of a case: what of a system a trigger can touch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardproof.case import Case
from shardproof.contract import Options

#: Values with which an option asks for nothing.
_NOTHING = (None, False, 0, "none", "backend", "global", "shared", "inferred")
#: Options that ask for something with ``False``, too: their default is another value.
_EITHER = ("broadcast_buffers", "loss_parallel", "reshard_after_forward")
#: What a checkpoint's loader may have of its own, and the feature's word for it.
_LOADERS = {"implementation": "system", "mesh": "mesh", "options": "options", "precision": "dtype"}


def of(case: Case) -> frozenset[str]:
    """Their names: a kind, and mostly a value, such as ``strategy reference/ddp``."""
    return frozenset((*_asked(case), *_of_options(case.options)))


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
