"""The option ``checkpoint`` of the adapters around PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardproof.contract import Capabilities, Refused
from shardproof.impls.reference.engine.options import at_least

#: What ``get_state_dict`` takes: a module and its optimizer.
FORMATS = ("dcp", "dcp_async", "full")
#: Stages of several ranks: torch gathers no full state dict of these.
SHARDED = ("dcp", "dcp_async")
#: ``async_save`` calls collectives on a thread of its own, which is no rank where ranks are
#: threads, and may not call MPI.
ASYNC_BACKENDS = ("gloo", "gloo_cuda", "nccl")
ANY_BACKEND = Capabilities.backends
#: The all-gather below DTensor ends the process, or never ends, on gloo with CUDA tensors
#: (pytorch/pytorch#152645, #132471).
DTENSOR_BACKENDS = ("in_memory", "gloo", "nccl", "mpi")
#: Where ranks are processes.
PROCESSES = (*ASYNC_BACKENDS, "mpi")


@dataclass(frozen=True)
class Checkpoints:
    """``format``: what ``save`` writes.  ``keep``: how many of a run's checkpoints stay."""

    format: Literal["dcp", "dcp_async", "full"] = "dcp"
    keep: int = 2

    def __post_init__(self) -> None:
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class Saved:
    """The option of all adapters."""

    checkpoint: Checkpoints = field(default_factory=Checkpoints, kw_only=True)


def offered(
    chosen: Checkpoints,
    formats: Sequence[str] = FORMATS,
    why: str = "",
    backends: Sequence[str] = ANY_BACKEND,
) -> dict[str, Any]:
    """What ``Capabilities`` say of a system on ``backends`` that can save in ``formats``.

    :raises Refused: another format was chosen; ``why`` it is not there.
    """
    if chosen.format not in formats:
        raise Refused(
            f"option 'checkpoint.format' = {chosen.format!r}: {why}; valid: {', '.join(formats)}"
        )
    able = ASYNC_BACKENDS if chosen.format == "dcp_async" else ANY_BACKEND
    return {"checkpoints": tuple(formats), "backends": tuple(b for b in backends if b in able)}
