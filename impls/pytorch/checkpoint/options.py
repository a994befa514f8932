"""The option ``checkpoint`` of the adapters for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardproof.contract import Refused
from shardproof.impls.reference.engine.options import at_least

#: What ``get_state_dict`` takes: a module and its optimizer.
FORMATS = ("dcp", "dcp_async", "full")
#: Stages of several ranks: torch gathers no full state dict of these.
SHARDED = ("dcp", "dcp_async")
#: Backends that cannot gather what lies below DTensor, and why.
NO_DTENSOR = {
    "gloo_cuda": "the all-gather of this backend ends the process or never returns "
    "(pytorch/pytorch#152645, #132471)"
}


@dataclass(frozen=True)
class Checkpoints:
    """``format``: the format that ``save`` writes. ``keep``: the number of a run's checkpoints to
    keep.
    """

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
    denies: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The ``Capabilities`` of a system that saves in ``formats``, except where it ``denies``.

    :raises Refused: another format was chosen; ``why`` it is not there.
    """
    if chosen.format not in formats:
        raise Refused(
            f"option 'checkpoint.format' = {chosen.format!r}: {why}; valid: {', '.join(formats)}"
        )
    # async_save calls collectives on a thread of its own.
    needs = ("any_thread",) if chosen.format == "dcp_async" else ()
    return {"checkpoints": tuple(formats), "denies": denies or {}, "needs": needs}
