"""What ranks measure for the model of a step, as they return it: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AloneSteps:
    """Seconds without traffic of whole ``steps`` and to the ``gradients``, by segment and step."""

    steps: list[list[float]]
    gradients: list[list[float]]


@dataclass(frozen=True)
class ProbeRecord:
    """What the probes of one rank found, sweep by sweep.

    ``collectives`` are (operation, payload bytes, seconds of each sweep), ``used`` wall and CPU
    seconds by operation, rates FLOP/s and bytes/s.
    """

    collectives: list[tuple[str, int, list[float]]]
    used: dict[str, tuple[float, float]]
    flop_rates: list[float]
    byte_rates: list[float]


@dataclass(frozen=True)
class Call:
    """``count`` calls of ``operation`` that a rank makes in a step, in groups of ``ranks`` ranks;
    ``bytes`` is the payload of each (the mean: the model is linear).
    """

    operation: str
    ranks: int
    bytes: float
    count: float = 1
    floating: bool = True


@dataclass(frozen=True)
class WatchedStep:
    """A step that the traffic ledger watched on one rank, and the work of the plain model.

    ``flops`` are those of products of matrices, ``products`` the shapes of most FLOPs with how
    often a step makes each, ``elements`` those that are trained.
    """

    calls: list[Call]
    flops: int
    products: list[tuple[tuple[int, int, int, int], int]]
    elements: int


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
