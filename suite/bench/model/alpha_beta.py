"""The alpha-beta model: what a call to a process group costs, from latency and bandwidth.

A call of *n* payload bytes in a group of *N* ranks takes

    seconds = steps(N) * alpha + volume(N) * n * beta

``alpha`` is the latency of one message in seconds, ``beta`` the seconds a byte on the way of one
rank; arithmetic (gamma) and copies are part of ``beta``.  *n* is the payload of the traffic ledger:
the whole output of an all-gather, the whole input of a reduce-scatter, one rank's shard of a gather
or scatter, what leaves the rank in an all-to-all, else the tensor.

    algorithm           operation       steps            volume           source
    ring                all-reduce      2(N-1)           2(N-1)/N         NCCL tuning.cc
                        reduce-scatter, N-1              (N-1)/N          MPICH src/mpi/coll
                        all-gather
    pipelined ring      broadcast,      N-1              1                nccl-tests (bus factor 1),
                        reduce                                            hops [derived]
    pairwise            all-to-all      N-1              1                own chunks stay [derived]
    linear              gather, scatter N-1              N-1              all of it at the root
    recursive doubling  all-reduce      lg N             lg N             MPICH src/mpi/coll
      N no power of 2                   floor(lg N)+2    floor(lg N)+2
    rabenseifner        all-reduce      2 lg N           2(N-1)/N         MPICH; Thakur 2005
      N no power of 2                   2 floor(lg N)+2  2(N-1)/N + 2
    tree                all-reduce      2 ceil(lg N)     2 ceil(lg N)     binomial, unpipelined
                        broadcast,      ceil(lg N)       ceil(lg N)       [from MPICH bcast, reduce]
                        reduce, barrier
    double tree         all-reduce      2 ceil(lg N)     2                NCCL tuning.cc, volume
                                                                          pipelined [derived]
    fold                any             N                N                suite/backends/hub.py: the
                                                                          last rank works for all
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from shardproof.backends import BACKENDS
from shardproof.bench.subjects import Call, GroupRecord, ProbeRecord
from shardproof.errors import Problem, SelectionError, nearest


class Cost(NamedTuple):
    """How often ``alpha`` is paid, and how often the payload's ``beta``."""

    steps: Fraction
    volume: Fraction

    def seconds(self, payload: float, alpha: float, beta: float) -> float:
        """Seconds of a call of ``payload`` bytes."""
        return float(self.steps) * alpha + float(self.volume) * payload * beta


FREE = Cost(Fraction(0), Fraction(0))


def _floor_lg(ranks: int) -> int:
    return ranks.bit_length() - 1


def _ceil_lg(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _beyond(ranks: int) -> int:
    """Ranks beyond the largest power of 2 hand their data in before and get it back afterwards."""
    return 0 if ranks == 1 << _floor_lg(ranks) else 2


Formula = Callable[[int], tuple[int, int | Fraction]]
#: Steps and volume for N >= 2 ranks.
_FORMULAS: dict[str, Formula] = {
    "ring": lambda n: (2 * (n - 1), 2 * Fraction(n - 1, n)),
    "half ring": lambda n: (n - 1, Fraction(n - 1, n)),
    "pipelined ring": lambda n: (n - 1, 1),
    "ring and gather": lambda n: (n, 2 * Fraction(n - 1, n)),
    "linear": lambda n: (n - 1, n - 1),
    "recursive doubling": lambda n: (_floor_lg(n) + _beyond(n), _floor_lg(n) + _beyond(n)),
    "rabenseifner": lambda n: (2 * _floor_lg(n) + _beyond(n), 2 * Fraction(n - 1, n) + _beyond(n)),
    "tree": lambda n: (_ceil_lg(n), _ceil_lg(n)),
    "two trees": lambda n: (2 * _ceil_lg(n), 2 * _ceil_lg(n)),
    "double tree": lambda n: (2 * _ceil_lg(n), 2),
    "message": lambda n: (1, 1),
    "fold": lambda n: (n, n),
}
#: (operation, algorithm) -> its formula, where that has another name.
_OTHERWISE = {
    ("all_reduce", "tree"): "two trees",
    ("reduce_scatter", "ring"): "half ring",
    # torch's gloo sums everything on every rank and keeps a part: measured, an all-reduce's bytes.
    ("reduce_scatter", "all-reduce ring"): "ring",
    ("all_gather", "ring"): "half ring",
    # Everybody's whole payload straight to everybody, or to the root: backends/mpi_messages.py.
    ("all_reduce", "direct"): "linear",
    ("reduce", "direct"): "linear",
    # In turn with each other rank, 1/(N-1) of what leaves this one: N-1 messages of n in all.
    ("all_to_all", "pairwise"): "pipelined ring",
}
_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": (
        *("ring", "recursive doubling", "rabenseifner", "tree", "double tree", "direct", "fold"),
    ),
    "reduce_scatter": ("ring", "all-reduce ring", "fold"),
    "all_gather": ("ring", "fold"),
    "all_to_all": ("pairwise", "fold"),
    "gather": ("linear", "fold"),
    "scatter": ("linear", "fold"),
    "broadcast": ("tree", "pipelined ring", "fold"),
    # A ring's reduce-scatter, then every rank sends its part to the root: gloo/reduce.cc.
    "reduce": ("tree", "pipelined ring", "ring and gather", "direct", "fold"),
    "barrier": ("tree", "fold"),
    # A message is paid for once, with its sender.
    "send": ("message",),
}
#: (operation, algorithm) -> steps and volume for N >= 2 ranks.
COSTS: dict[tuple[str, str], Formula] = {
    (operation, name): _FORMULAS[_OTHERWISE.get((operation, name), name)]
    for operation, names in _ALGORITHMS.items()
    for name in names
}

#: By the first of its algorithms.
_RINGS = {operation: names[:1] for operation, names in _ALGORITHMS.items()}


def algorithms_of(backend: str) -> Mapping[str, Sequence[str]]:
    """Operation -> algorithms that may carry it out, of which the cheapest counts.

    Empty: the backend's are not known.
    """
    known = BACKENDS.get(backend)
    return {} if known is None or known.algorithms is None else {**_RINGS, **known.algorithms}


def cost(operation: str, algorithm: str, ranks: int) -> Cost:
    """Steps and volume of ``operation`` in a group of ``ranks``; nothing in a group of one.

    :raises SelectionError: no such pair of operation and algorithm.
    """
    if operation == "recv":  # paid for with its send
        return FREE
    formula = COSTS.get((operation, algorithm))
    if formula is None:
        known = [name for op, name in COSTS if op == operation]
        remedy = nearest(algorithm, known, f"algorithms of {operation}")
        raise SelectionError(
            Problem("no time formula for this algorithm", remedy, f"{operation} by {algorithm}")
        )
    if ranks < 2:
        return FREE
    steps, volume = formula(ranks)
    return Cost(Fraction(steps), Fraction(volume))


@dataclass(frozen=True)
class Fit:
    """Alpha (seconds) and beta (seconds a byte) of one operation, from times of ``ranks`` ranks.

    ``residual`` is the root mean square of the relative errors at the sizes measured, ``worst`` the
    largest one (signed: positive where the formula says more than was measured).  ``busy``: cores
    that a rank kept busy meanwhile, its helper threads included.
    """

    operation: str
    ranks: int
    alpha: float
    beta: float
    residual: float = 0.0
    worst: float = 0.0
    sizes: tuple[int, ...] = ()
    busy: float = 1.0

    def seconds(self, payload: float, ranks: int, algorithms: Sequence[str]) -> float:
        """A call of ``payload`` bytes in a group of ``ranks``, by the cheapest algorithm."""
        costs = [cost(self.operation, algorithm, ranks) for algorithm in algorithms]
        return min(each.seconds(payload, self.alpha, self.beta) for each in costs)


def fit(
    operation: str, algorithm: str, ranks: int, times: Mapping[int, float], busy: float = 1.0
) -> Fit:
    """Alpha and beta by least squares of relative errors (weights ``1 / t^2``), neither negative.

    ``times`` maps payload bytes to seconds.  One size gives no more than a sum of both: then all of
    it is ``beta`` for a payload, ``alpha`` without one.

    :raises ValueError: no times, or one that is not positive.
    """
    if not times or any(not t > 0 for t in times.values()):
        raise ValueError(f"{operation}: a cost model needs positive times, not {dict(times)}")
    steps, volume = map(float, cost(operation, algorithm, ranks))
    if not steps:
        raise ValueError(f"no cost model: {operation} sends nothing in a group of size {ranks}")
    # Each row: steps/t * alpha + volume*n/t * beta = 1.
    rows = [(steps / t, volume * n / t) for n, t in sorted(times.items())]
    alpha, beta = least_squares(rows)
    errors = [a * alpha + b * beta - 1 for a, b in rows]
    residual = math.sqrt(math.fsum(e * e for e in errors) / len(errors))
    told = residual, max(errors, key=abs), tuple(sorted(times)), busy
    return Fit(operation, ranks, alpha, beta, *told)


def least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The ``(x, y)``, neither negative, that bring ``a x + b y`` closest to 1 over all rows."""
    aa, bb, ab = (math.fsum(p) for p in zip(*((a * a, b * b, a * b) for a, b in rows), strict=True))
    a1, b1 = (math.fsum(column) for column in zip(*rows, strict=True))
    spread = aa * bb - ab * ab
    if len(rows) > 1 and spread > 1e-9 * aa * bb:
        x, y = (a1 * bb - b1 * ab) / spread, (aa * b1 - ab * a1) / spread
        if x >= 0 and y >= 0:
            return x, y
    along = [(a1 / aa, 0.0)] + ([(0.0, b1 / bb)] if bb else [])
    best = min(along, key=lambda p: math.fsum((a * p[0] + b * p[1] - 1) ** 2 for a, b in rows))
    return along[-1] if len(rows) == 1 else best


@dataclass(frozen=True)
class Group:
    """The probes of groups of ``ranks`` ranks; ``times`` are seconds by operation and payload
    bytes.
    """

    ranks: int
    fits: Mapping[str, Fit]
    times: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Links:
    """Alpha and beta of calls: ``fits`` by operation, and those ``along`` axes that were probed
    apart, because their groups go over links of their own.
    """

    fits: Mapping[str, Fit]
    along: Mapping[str, Group] = field(default_factory=dict)

    def of(self, call: Call) -> Fit | None:
        """That of the groups which ``call`` goes over; ``None``: not probed."""
        apart = self.along.get(call.axis)
        return (self.fits if apart is None else apart.fits).get(call.operation)


@dataclass(frozen=True)
class Machine:
    """The machine by the probes of all ranks, together and at once.

    ``fits`` and ``times`` (seconds by operation and payload bytes) are those of the group of all
    ``ranks``; ``along``: of all groups of an axis at once, where several axes are cut.
    ``flop_rate`` (FLOP/s, ``None``: not probed) and ``byte_rate`` (bytes/s of a copy, read and
    written) are those of the slowest rank.
    """

    backend: str
    ranks: int
    fits: Mapping[str, Fit]
    times: Mapping[str, Mapping[int, float]]
    flop_rate: float | None
    byte_rate: float
    along: Mapping[str, Group] = field(default_factory=dict)

    @property
    def links(self) -> Links:
        """The cost of calls on it."""
        return Links(self.fits, self.along)


def machine(backend: str, records: Sequence[ProbeRecord]) -> Machine:
    """Fits and rates of the probes: of each call the slowest rank, of several sweeps the median."""
    along = {
        axis: _group(backend, [record.groups[axis] for record in records])
        for axis in records[0].groups
    }
    everybody = along.pop("")
    flops = [*map(min, zip(*(record.flop_rates for record in records), strict=True))]
    copies = [*map(min, zip(*(record.byte_rates for record in records), strict=True))]
    rates = statistics.median(flops) if flops else None, statistics.median(copies)
    found = everybody.ranks, everybody.fits, everybody.times
    return Machine(backend, *found, *rates, along)


def _group(backend: str, records: Sequence[GroupRecord]) -> Group:
    ranks = records[0].ranks
    times: dict[str, dict[int, float]] = {}
    for rows in zip(*(record.collectives for record in records), strict=True):
        operation, payload, _ = rows[0]
        sweeps = zip(*(seconds for _, _, seconds in rows), strict=True)
        times.setdefault(operation, {})[payload] = statistics.median(map(max, sweeps))
    fits = {
        # By the first algorithm that the backend has for it.
        operation: fit(
            *(operation, algorithms_of(backend)[operation][0], ranks, by_payload),
            busy=_busy(backend, operation, records),
        )
        for operation, by_payload in times.items()
        if ranks > 1
    }
    return Group(ranks, fits, times)


def _busy(backend: str, operation: str, records: Sequence[GroupRecord]) -> float:
    """Mean cores of a rank during ``operation``; threads of one process cannot be distinguished."""
    if BACKENDS[backend].threads:
        return 1.0
    wall, used = (math.fsum(r.used[operation][i] for r in records) for i in (0, 1))
    return used / wall if wall else 1.0
