"""The parts of a cost model: flows of bytes, bytes by class, and their bounds.

A :class:`CostModel` computes from a :class:`~shardproof.costs.model_facts.ModelFacts` alone.  It
answers ``None`` where it has no formula; the checks then say so instead of comparing.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal

from shardproof import axes
from shardproof.costs import model_facts
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts

Operation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "recv",
]
#: A name's share of what ranks may keep of their last agreement by integers.
VOTE_BYTES = 16
#: The classes of the memory ledger that are compared with a cost model.
JUDGED = ("parameters", "masters", "gradients", "optimizer_state")
Bytes = dict[str, int]


class NoCostModel(ValueError):
    """There is no formula for these options; the message names them."""


@dataclass(frozen=True)
class Flow:
    """Calls of one kind along one axis in one optimizer step, summed over all ranks.

    ``calls`` is exact, a range, or ``None`` (any number); groups of one rank send nothing and are
    not counted.  ``bytes`` are logical (see :mod:`shardproof.ledgers.traffic`).  ``by_rank``: calls
    and bytes of each global rank, where ranks differ and each is promised its own.  ``integers``:
    it moves those, which are counted apart from floats.  ``ranks``: those of each group,
    neighbours along the axis; 0: not told.  ``between``: of messages, bytes by the places of both
    ends on the axis; empty: not told.
    """

    axis: str
    operation: Operation
    bytes: Fraction
    calls: int | tuple[int, int] | None
    by_rank: tuple[tuple[int, Fraction], ...] | None = None
    integers: bool = False
    ranks: int = 0
    between: Mapping[tuple[int, int], Fraction] = field(default_factory=dict)

    @property
    def range(self) -> tuple[int, int]:
        """Fewest and most calls."""
        if self.calls is None:
            return 0, sys.maxsize
        return self.calls if isinstance(self.calls, tuple) else (self.calls, self.calls)

    def in_any_calls(self) -> Flow:
        """The same bytes in a number of calls that is not promised."""
        return replace(self, calls=None, by_rank=None)


@dataclass(frozen=True)
class Bound:
    """Limits of the peak of a class in bytes of one rank, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class Local:
    """The elements that one rank holds, name -> count (not 0), for the check ``active``."""

    parameters: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        held: Mapping[str, int],
        updated: Mapping[str, int] | None = None,
    ) -> Local:
        """A rank that holds ``held`` and updates ``updated`` (``None``: the same): gradients of
        what the last step used, optimizer state of what any step did.
        """
        own = held if updated is None else updated
        now, ever = (
            {t.name: own[t.name] for t in find(facts.parameters, facts.steps - 1) if t.name in own}
            for find in (model_facts.used, model_facts.updated_by)
        )
        return cls(held, now, ever if model_facts.slots(facts) else {})


@dataclass(frozen=True)
class Prefetch:
    """Program order on one rank: what overlaps with computing.

    A round is *computing* where this rank has a micro-batch, and *idle* where only others have one.
    """

    #: Fewest gathers, in a computing round, that are issued while another unit computes and waited
    #: for later.
    gathers: int
    #: Most reductions of a round that are issued after its backward has ended.
    late_when_computing: int
    late_when_idle: int = 0
    #: The same, in addition, of the last round of a step.
    last_when_computing: int = 0
    last_when_idle: int = 0
    #: Only the last round of a step reduces.
    once: bool = False
    #: The log has the beginning of every unit, so a reduction with no computing behind it shows.
    watched: bool = True
    #: Phase -> fewest and most gathers in flight when a unit begins, at the fullest moment of a
    #: step; a phase without an entry is not judged.
    depth: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Gathers are waited for in the order in which they are issued.
    in_order: bool = False

    def after_backward(self, rounds: int, idle: int) -> int:
        """Most late reductions of a step: ``rounds`` computing ones, then ``idle`` idle ones."""
        if self.once:
            rounds, idle = (0, 1) if idle else (min(rounds, 1), 0)
        last = self.last_when_idle if idle else self.last_when_computing
        return self.late_when_computing * rounds + self.late_when_idle * idle + last


class CostModel(ABC):
    """The cost of a strategy in one case. ``source`` says where the formulas are published."""

    strategy: ClassVar[str]
    source: ClassVar[str]
    #: What bytes per parameter tend to for many ranks and one-dtype models, in units of
    #: (parameters, gradients, optimizer): which of the three the world size divides.
    divided: ClassVar[tuple[bool, bool, bool]] = (False, False, False)
    #: Whether shards rest as built, whatever is computed with: they are masters themselves.
    rests_as_built: ClassVar[bool] = False
    #: Dtypes that parameters are built in, if the formulas follow no policy of precision (empty:
    #: any dtype, and they follow one).
    unmixed: ClassVar[tuple[str, ...]] = ()
    #: Whether gradients are gone when the next step begins.
    frees_gradients: ClassVar[bool] = False
    #: The strategy that an upstream system carries out; its bytes are shown as a multiple of that.
    textbook: ClassVar[str] = ""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts

    @property
    def reductions(self) -> int:
        """How often a step reduces a gradient: where a rank keeps a shard, in every round."""
        return self.facts.rounds if self.divided[1] else 1

    @abstractmethod
    def flows(self) -> list[Flow]:
        """Floating-point traffic of one optimizer step."""

    @abstractmethod
    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by judged class on ``rank`` at the observation points of ``step``.

        ``updated`` is the last step whose update has been made (-1: none yet).
        """

    def metadata_bytes(self) -> int:
        """Most bytes of integers in one step that tell the shapes of what is sent, all ranks."""
        return 0

    def control_limit(self) -> int | None:
        """Most bytes of integers in one step that are no values and tell no shapes, all ranks;
        ``None``: as many as data parallelism may need.
        """
        return None

    def agreements(self, rank: int) -> tuple[int, int] | None:
        """Most broadcasts of integers after updates in which ``rank`` takes part: after one update,
        and in all steps; ``None``: no formula.
        """
        return None

    def at_point(self, rank: int, point: str, updated: int) -> Bytes:
        """Bytes by judged class where they differ between points; overrides :meth:`resident`."""
        return {}

    def unjudged(self) -> dict[str, str]:
        """Class -> why its bytes are not compared; shown with the verdict."""
        return {}

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """Bounds of the largest bytes of a class (or ``communication``) in a phase of ``step``."""
        return {}

    def why_not_measured(self) -> str:
        """Why there is no formula for the bytes held in this case; ``""``: there is one."""
        return ""

    def why_state_is_not_promised(self) -> str:
        """Why no formula tells whose gradients and optimizer state a rank has; ``""``: one does."""
        return ""

    def communication_at_rest(self, rank: int, step: int) -> int | None:
        """Most bytes of class ``communication`` at the observation points of ``step``, where
        nothing is in flight; ``None``: no formula.
        """
        return None

    def unclassified_limit(self, rank: int, step: int) -> int | None:
        """Most bytes at the observation points that are neither state nor buffers of any kind:
        activations and temporaries, which are gone by then.  ``None``: no formula.
        """
        return None

    def by_layout(self, rank: int) -> Mapping[str, Mapping[str, int]]:
        """Layout -> name -> elements of parameters on ``rank``; empty where there is one layout."""
        return {}

    def host(self, rank: int, step: int, updated: int) -> Bytes:
        """Bytes by judged class in host memory (offload); :meth:`resident` is the device's."""
        return {}

    def host_traffic(self, rank: int, step: int, updated: int) -> dict[str, int]:
        """Floating-point bytes that ``rank`` copies in ``step``: ``down``, to the host, ``up``."""
        return {"down": 0, "up": 0}

    def gpu_traffic(self, rank: int, step: int, updated: int) -> dict[str, int]:
        """Further copies, as in :meth:`host_traffic`, where the device is a GPU.

        Gradients in host memory are multiplied there by the factor of clipping: a float64 comes
        down.  On a CPU an operator reads a single number where it lies.
        """
        is_clipped = self.facts.clipped and updated == step
        return {"down": 8 * (is_clipped and any(self.host(rank, step, updated).values()))}

    def why_overlap_is_not_judged(self) -> str:
        """Why the log of calls does not tell what overlaps in this case; ``""``: it does."""
        return ""

    def prefetch(self) -> Prefetch | None:
        """The overlap once the order of the units is known; ``None``: no formula."""
        return None

    @abstractmethod
    def local(self, rank: int) -> Local:
        """Elements on ``rank`` after the last step (name -> count)."""

    def payload(self) -> Fraction:
        """Bytes sent in one step, all axes together."""
        return sum((flow.bytes for flow in self.sent()), Fraction(0))

    def sent(self) -> list[Flow]:
        """:meth:`flows`, and the sums over ranks of what global terms of the loss are made of."""
        over = axes.sharing(self.facts.axes)
        summed = (flow(self.facts, axis, "all_reduce", self.facts.terms) for axis in over)
        return [*self.flows(), *(one for each in summed for one in each)]

    def held(self, kind: str) -> int:
        """Bytes of class ``kind`` on the rank that holds most, when all state exists."""
        return max(self._complete(rank)[kind] for rank in range(self.facts.world))

    def total(self) -> int:
        """Bytes of all judged classes on the rank that holds most, when all state exists."""
        return max(sum(self._complete(rank).values()) for rank in range(self.facts.world))

    def _complete(self, rank: int) -> Bytes:
        last = self.facts.steps - 1
        return self.resident(rank, last, last) | self.at_point(rank, "after_update", last)


def flow(
    facts: ModelFacts, axis: str, operation: Operation, payloads: Iterable[int], times: int = 1
) -> list[Flow]:
    """The flow of one call per payload (bytes), made ``times`` times by every rank."""
    size = facts.size(axis)
    times *= facts.world // size
    return grouped_flow(axis, operation, payloads, size, times) if times else []


def grouped_flow(
    axis: str,
    operation: Operation,
    payloads: Iterable[int],
    ranks: int,
    times: int,
    integers: bool = False,
) -> list[Flow]:
    """The flow of one call per payload (bytes) in groups of ``ranks``, ``times`` in all groups.

    The payload is the whole output of an all-gather, the whole input of a reduce-scatter, and what
    a rank gives to, or gets from, an all-to-all on average over the ranks.
    """
    sizes = [payload for payload in payloads if payload]
    if ranks == 1 or not sizes:
        return []
    # Over all ranks: an all-reduce is a reduce-scatter and an all-gather of (N - 1) payloads each.
    factor = 2 * (ranks - 1) if operation == "all_reduce" else ranks - 1
    total, calls = Fraction(factor * sum(sizes) * times), len(sizes) * times * ranks
    return [Flow(axis, operation, total, calls, integers=integers, ranks=ranks)]


def norm_flow(facts: ModelFacts, axis: str) -> list[Flow]:
    """The global norm's float64 scalar, where gradients are clipped and lie in shards."""
    return flow(facts, axis, "all_reduce", [8] if facts.clipped else [])


def state_bytes(facts: ModelFacts, parts: Iterable[tuple[TensorFacts, int]], step: int) -> int:
    """Bytes of an element-wise optimizer's state over ``(tensor, elements)`` after ``step``.

    Slots as built and one step counter per part, for those that were updated by then.
    """
    ready = {t.name for t in model_facts.updated_by(facts.parameters, step)}
    slots, counter = model_facts.slots(facts), model_facts.counter_bytes(facts)
    return sum(slots * n * ITEMSIZE[t.dtype] + counter for t, n in parts if t.name in ready)
