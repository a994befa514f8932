"""What ranks measure for the model of a step, as they return it: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AloneSteps:
    """Seconds without traffic of whole ``steps`` and to the ``gradients``, by segment and step."""

    steps: list[list[float]]
    gradients: list[list[float]]


@dataclass(frozen=True)
class GroupRecord:
    """What the probes of one rank found in one of its groups.

    ``collectives`` are (operation, payload bytes, seconds of each sweep), ``used`` wall and CPU
    seconds by operation.
    """

    collectives: list[tuple[str, int, list[float]]]
    used: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class AxisRecord(GroupRecord):
    """The same in the group of ``ranks`` ranks along ``axis``; all groups of the axis at once."""

    axis: str
    ranks: int


@dataclass(frozen=True)
class ProbeRecord(GroupRecord):
    """What the probes of one rank found, sweep by sweep: in the group of all ranks, along axes, and
    rates in FLOP/s and bytes/s.
    """

    flop_rates: list[float]
    byte_rates: list[float]
    along: list[AxisRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """``count`` calls of ``operation`` that a rank makes in a step, in groups of ``ranks`` ranks;
    ``bytes`` is the payload of each (the mean: the model is linear).  ``axis``: as the traffic
    ledger names it; empty: nobody told.
    """

    operation: str
    ranks: int
    bytes: float
    count: float = 1
    floating: bool = True
    axis: str = ""


@dataclass(frozen=True)
class WatchedStep:
    """A step that the traffic ledger watched on one rank, and the work of the plain model.

    ``flops`` are those of products of matrices, ``products`` the shapes of most FLOPs with how
    often a step makes each, ``elements`` those that are trained; ``schedule`` is that of a pipeline
    with one window a step, as :meth:`~shardproof.schedules.Schedule.to_dict` gives it.
    """

    calls: list[Call]
    flops: int
    products: list[tuple[tuple[int, int, int, int], int]]
    elements: int
    schedule: dict[str, Any] | None = None


@dataclass(frozen=True)
class RankRounds:
    """What a rank measured of some runs in rounds: each without traffic and with it.

    ``together`` are seconds by run, round and step.
    """

    rank: int
    cores: list[int]
    threads: int
    alone: list[AloneSteps]
    together: list[list[list[float]]]
    probes: ProbeRecord


@dataclass(frozen=True)
class Rounds:
    """What all ranks measured, and the watched step of each run (of rank 0)."""

    watched: list[WatchedStep]
    measured: list[RankRounds]
