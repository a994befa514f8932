"""The words of a promise: flows of bytes, bytes by class, and their bounds.

A :class:`CostModel` answers from a ``costs.model_facts.ModelFacts`` alone.  What it does not
promise it leaves ``None``, and the checks then say so instead of at_point.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal

from shardproof.costs.model_facts import (
    ITEMSIZE,
    ModelFacts,
    TensorFacts,
    counter_bytes,
    slots,
    used_by,
)

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send", "recv"
]
#: A name's share of what ranks may keep of their last agreement by integers.
VOTE_BYTES = 16
#: The classes that a memory promise is about; the other classes of the ledger are not judged.
JUDGED = ("parameters", "masters", "gradients", "optimizer_state")
Bytes = dict[str, int]


class NoCostModel(ValueError):
    """No formula for these options; the message says which and what would be promised."""


@dataclass(frozen=True)
class Flow:
    """Calls of one kind along one axis in one optimizer step, summed over all ranks.

    ``calls`` is exact, a range, or ``None`` where no number is promised; groups of one rank send
    nothing and are not counted.  ``bytes`` are logical (see :mod:`shardproof.ledgers.traffic`).
    """

    axis: str
    operation: Operation
    bytes: Fraction
    calls: int | tuple[int, int] | None

    @property
    def range(self) -> tuple[int, int]:
        """Fewest and most calls."""
        if self.calls is None:
            return 0, sys.maxsize
        return self.calls if isinstance(self.calls, tuple) else (self.calls, self.calls)


@dataclass(frozen=True)
class Bound:
    """What the peak of a class must lie in, bytes of one rank, both ends included."""

    low: int
    high: int


@dataclass(frozen=True)
class Local:
    """What one rank holds, in elements: for the check that the feature is really on.

    ``parameters`` and ``optimizer`` map a name to the elements of its pieces on this rank (names
    that it holds nothing of are left out).
    """

    parameters: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prefetch:
    """Program order on one rank.

    ``gathers``: at least so many are issued while another unit computes, and waited for later, in
    each forward and backward that the rank computes.
    At most so many reductions are issued after backward has ended: ``late`` in a round that the
    rank computes, ``idle`` in one that only others compute; in the step's last round ``last`` or
    ``last_idle`` more.  ``once``: the rounds before the last reduce nothing.
    ``depth``: by phase, least and most gathers under way at once when a unit begins, at the moment
    of a step that has most; a phase without an entry promises none.
    ``watched``: whether the log tells the beginning of every unit, so that a reduction without
    computing behind it would show.
    """

    gathers: int
    late: int
    idle: int = 0
    last: int = 0
    last_idle: int = 0
    once: bool = False
    watched: bool = True
    depth: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def after_backward(self, rounds: int, idle: int) -> int:
        """Most late reductions in a step of so many rounds; the idle ones come last."""
        if self.once:
            rounds, idle = (0, 1) if idle else (min(rounds, 1), 0)
        return self.late * rounds + self.idle * idle + (self.last_idle if idle else self.last)


class CostModel(ABC):
    """What a strategy costs for one plan.  ``source`` says where the formulas are published."""

    strategy: ClassVar[str]
    source: ClassVar[str]
    #: What bytes per parameter tend to for many ranks and one-dtype models, in units of
    #: (parameters, gradients, optimizer): which of the three the world size divides.
    divided: ClassVar[tuple[bool, bool, bool]] = (False, False, False)
    #: Whether shards rest as built, whatever is computed with: they are masters themselves.
    rests_as_built: ClassVar[bool] = False
    #: The strategy that an upstream system carries out: what it sends is told as a multiple of it.
    textbook: ClassVar[str] = ""

    def __init__(self, plan: ModelFacts) -> None:
        self.plan = plan

    @abstractmethod
    def flows(self) -> list[Flow]:
        """Floating-point traffic of one optimizer step."""

    @abstractmethod
    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by judged class on ``rank`` at the observation points of ``step``.

        ``updated`` is the last step whose update has been made (-1: none yet).
        """

    def at_point(self, rank: int, point: str, updated: int) -> Bytes:
        """Bytes by judged class where they differ between points; put over :meth:`resident`."""
        return {}

    def unjudged(self) -> dict[str, str]:
        """Classes that are not compared with their bytes, and why: told beside the verdict."""
        return {}

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """Bounds of the largest bytes of a class (or ``communication``) in a phase of ``step``."""
        return {}

    def why_not_measured(self) -> str:
        """Why no bytes are promised for this plan (``""``: they are)."""
        return ""

    def communication_at_rest(self, rank: int, step: int) -> int | None:
        """Most bytes of class ``communication`` at the observation points of ``step``, where
        nothing is in flight; ``None``: not promised.
        """
        return None

    def unclassified_limit(self, rank: int, step: int) -> int | None:
        """Most bytes at the observation points that are neither state nor buffers of any kind:
        activations and temporaries, which are over by then.  ``None``: not promised.
        """
        return None

    def by_layout(self, rank: int) -> Mapping[str, Mapping[str, int]]:
        """Elements of parameters on ``rank`` by name, told apart by how they lie on the ranks;
        nothing where there is only one way.
        """
        return {}

    def host(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by judged class on the host tier (offload); :meth:`resident` is the device's."""
        return {}

    def host_traffic(self, rank: int, step: int, updated: int) -> dict[str, int]:
        """Floating-point bytes that ``rank`` copies between the tiers in ``step``, by direction."""
        return {"down": 0, "up": 0}

    def prefetch(self) -> Prefetch | None:
        """What overlaps, once the order of the units is known; ``None``: not promised."""
        return None

    @abstractmethod
    def local(self, rank: int) -> Local:
        """Elements by name on ``rank`` after the last step."""

    # ------------------------------------------------------------------------------ for formulas

    def payload(self) -> Fraction:
        """Bytes sent in one step, all axes together."""
        return sum((flow.bytes for flow in self.flows()), Fraction(0))

    def held(self, kind: str) -> int:
        """Bytes of class ``kind`` on the rank that holds most, when all state exists."""
        return max(self._complete(rank)[kind] for rank in range(self.plan.world))

    def total(self) -> int:
        """Bytes of all judged classes on the rank that holds most, when all state exists."""
        return max(sum(self._complete(rank).values()) for rank in range(self.plan.world))

    def _complete(self, rank: int) -> Bytes:
        last = self.plan.steps - 1
        return self.resident(rank, last, last) | self.at_point(rank, "after_update", last)


def flow(
    plan: ModelFacts, axis: str, operation: Operation, payloads: Iterable[int], times: int = 1
) -> list[Flow]:
    """The flow of one call per payload (bytes), made ``times`` times by every rank.

    The payload is the whole output of an all-gather and the whole input of a reduce-scatter.
    """
    size, sizes = plan.size(axis), [payload for payload in payloads if payload]
    if size == 1 or not sizes or not times:
        return []
    factor = 2 * (size - 1) if operation == "all_reduce" else size - 1
    groups = plan.world // size
    total = Fraction(factor * sum(sizes) * groups * times)
    return [Flow(axis, operation, total, len(sizes) * times * plan.world)]


def norm_flow(plan: ModelFacts, axis: str) -> list[Flow]:
    """The global norm's float64 scalar, where gradients are clipped and lie in shards."""
    return flow(plan, axis, "all_reduce", [8] if plan.clipped else [])


def state_bytes(
    plan: ModelFacts, parts: Iterable[tuple[TensorFacts, int]], step: int, dtype: str | None = None
) -> int:
    """Bytes of an element-wise optimizer's state over ``(tensor, elements)`` after ``step``.

    Slots in ``dtype`` (``None``: as built) and one step counter per part, for those that had a
    gradient by then.
    """
    ready = {t.name for t in used_by(plan.parameters, step)}
    return sum(
        slots(plan) * count * ITEMSIZE[dtype or tensor.dtype] + counter_bytes(plan)
        for tensor, count in parts
        if tensor.name in ready
    )
