"""Ranks as threads of one process: deterministic, and without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof.backends.backend import Algorithms, Backend, Joining

if TYPE_CHECKING:
    from shardproof.backends.errors import Absence, CommError

_COLLECTIVES = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"),
    *("broadcast", "reduce", "barrier"),
)


class InMemory(Backend):
    """Ranks meet in a hub (``hub.py``), where the last one to arrive does the arithmetic."""

    name = "in_memory"
    threads = True
    any_thread = False
    adds_in_rank_order = True
    outlives_members = True
    exact_memory = True
    takes_over = False
    default_seconds = 0.4
    hides_latency = False
    hides_because = "the threads of all ranks share one interpreter; the last one works for all"
    algorithms: ClassVar[Algorithms | None] = dict.fromkeys(_COLLECTIVES, ("fold",)) | {
        "send": ("message",)
    }

    def available(self, world: int = 1) -> str | None:
        """``None``: it needs torch only."""
        return None

    def hub(self, world: int, timeout_s: float) -> Any:
        """Where ``world`` rank threads meet."""
        from shardproof.backends.in_memory.hub import Hub

        return Hub(world, timeout_s)

    def join(self, joining: Joining) -> None:
        """Make the calling thread a rank of its hub.

        :raises ValueError: the hub is missing, or of another number of ranks.
        """
        hub = joining.hub
        if hub is None or hub.world != joining.world:
            raise ValueError(f"{self.name}: pass the same Hub({joining.world}, ...) to all ranks")
        _group().join(joining.rank, hub, joining.disturbances)

    def leave(self) -> bool:
        """Destroy all groups of the calling thread."""
        _group().leave()
        return True

    def give_up(self, error: CommError) -> None:
        """Raise ``error`` on every rank: one that learns of it late would blame the others."""
        _group().hub().give_up(error)

    def never_coming(self, there: Sequence[int], missing: Sequence[int]) -> Mapping[int, Absence]:
        """The hub knows what every rank waits for."""
        return _group().hub().never_coming(there, missing)

    def depart(self) -> None:
        """Take the calling rank out of all groups; ranks that wait for it learn of it."""
        _group().depart()

    def renew(self) -> None:
        """Let all groups forget calls that were never completed; no rank is in a call."""
        _group().hub().renew()


def _group() -> ModuleType:
    from shardproof.backends.in_memory import group

    return group
