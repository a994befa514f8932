"""Collectives timed beside each other: the backend's own, and the suite's over send and recv.

All systems take turns in the same ranks: in each round every size is timed for one after the other,
in an order that is drawn anew.  The time of a call is that of the slowest rank;
of several rounds the median counts.  Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): with
S bytes (the whole output of an all-gather, the whole input of a reduce-scatter, else one rank's
tensor) and t seconds

    algorithm bandwidth  S / t
    bus bandwidth        S / t times 2(N-1)/N (all-reduce), (N-1)/N (reduce-scatter, all-gather),
                         1 (broadcast)

Alpha and beta are fitted over all sizes to t = rounds alpha + bytes beta, where rounds and the
bytes that the busiest rank sends are those of the algorithm's closed formula
(``costs/collectives.py``); of the backend's own, those of the algorithm that it is known for
(``model/alpha_beta.py``).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.backends import BACKENDS
from shardproof.bench.clock import Clock, finish
from shardproof.bench.leader_tasks import LaunchFailed, on_ranks
from shardproof.bench.model import alpha_beta
from shardproof.comm import Comm, Mesh
from shardproof.costs import collectives as costs
from shardproof.files import Stored
from shardproof.launch.pool import Pool
from shardproof.registry import collectives as own
from shardproof.table import Table

#: From a single number to what no cache holds.
SIZES = tuple(4 ** (power + 1) for power in range(13))
ROUNDS = 7
#: Calls of one measurement, fewer for large vectors: at most so many bytes.
CALLS, CALL_BYTES = 16, 4 * 2**20
BACKEND = costs.BACKEND
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
#: Seconds beside those of the ranks: to start, and to end.
_STARTING = 120.0


@dataclass(frozen=True)
class Request:
    """What to time.  ``algorithms``: these of the suite's (empty: all that serve the world)."""

    backend: str = "gloo"
    world: int = 2
    algorithms: tuple[str, ...] = ()
    ranks_per_node: int = 0
    sizes: tuple[int, ...] = SIZES
    rounds: int = ROUNDS
    deadline: float = 900.0

    @property
    def systems(self) -> list[tuple[str, str]]:
        """(operation, algorithm); the backend's own first."""
        chosen = []
        for operation in OPERATIONS:
            mine = [name for name in own.names()[operation] if self._is_chosen(name)]
            chosen += [(operation, name) for name in ([BACKEND, *mine] if mine else [])]
        return chosen

    def _is_chosen(self, name: str) -> bool:
        if self.algorithms:
            return name in self.algorithms
        return name != own.HIERARCHICAL or bool(self.ranks_per_node)

    def check(self) -> None:
        """:raises SelectionError: an unknown algorithm, or one that cannot serve the world."""
        for name in self.algorithms or ((own.HIERARCHICAL,) if self.ranks_per_node else ()):
            own.check(name, self.world, self.ranks_per_node)

    def id_of(self, operation: str, algorithm: str) -> str:
        return f"collectives::{operation}::{algorithm}::{self.backend}::world{self.world}"


@dataclass(frozen=True)
class Timed(Stored):
    """One system: seconds of a call by bytes, one figure a round, of the slowest rank."""

    id: str
    operation: str
    algorithm: str
    backend: str
    world: int
    ranks_per_node: int
    seconds: Mapping[str, Sequence[float]]
    verdict: str = "measured"

    @property
    def medians(self) -> dict[int, float]:
        """Bytes -> seconds."""
        return {int(size): statistics.median(each) for size, each in self.seconds.items()}

    def factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth."""
        if self.operation == "broadcast":
            return 1.0
        return (2 if self.operation == "all_reduce" else 1) * (self.world - 1) / self.world

    def fit(self) -> tuple[float, float]:
        """Alpha in seconds a round, beta in seconds a byte that the busiest rank sends."""
        rows = []
        for size, seconds in self.medians.items():
            rounds, sent = self.cost(size)
            rows.append((rounds / seconds, sent / seconds))
        return alpha_beta.least_squares(rows)

    def cost(self, size: int) -> tuple[float, float]:
        """Rounds, and bytes that the busiest rank sends."""
        if self.algorithm == BACKEND:
            known = alpha_beta.ALGORITHMS.get(self.backend, {}).get(self.operation, ("ring",))
            steps, volume = alpha_beta.cost(self.operation, known[0], self.world)
            return float(steps), float(volume) * size
        each = costs.sent(
            self.operation, self.algorithm, self.world, size // 4, self.ranks_per_node
        )
        return float(each[0].rounds), 4.0 * max(one.elements for one in each)


def run(request: Request, workdir: Path) -> list[Timed]:
    """Time all systems in fresh ranks.

    :raises LaunchFailed: ranks broke, hung or ran out of time.
    """
    with Pool(1, tasks=(in_leader,)) as pool:
        seconds = request.deadline + _STARTING
        with closing(pool.run(in_leader, [("collectives", (request, workdir), seconds)])) as ends:
            (end,) = ends
    if end.value is None:
        raise LaunchFailed("crash", f"the process that led the ranks ended: {end.output[-400:]}")
    if "problem" in end.value:
        raise LaunchFailed(*end.value["problem"])
    return [Timed.from_dict(each) for each in end.value["answer"]]


def in_leader(task: tuple[Request, Path]) -> Any:
    """Task of a leader: what the ranks measured, put together."""
    request, workdir = task
    try:
        ranks = on_ranks(request, workdir, Seconds, lambda rank: measure(request, rank))
    except LaunchFailed as failed:
        return {"problem": [failed.verdict, failed.reason]}
    timed = []
    for place, (operation, algorithm) in enumerate(request.systems):
        slowest = {
            str(size): [max(each) for each in zip(*(r[place][at] for r in ranks), strict=True)]
            for at, size in enumerate(request.sizes)
        }
        name = request.id_of(operation, algorithm)
        where = request.backend, request.world, request.ranks_per_node
        timed.append(Timed(name, operation, algorithm, *where, slowest).to_dict())
    return {"answer": timed}


#: By system and size: seconds of a call, one figure a round.
Seconds = list[list[list[float]]]


def measure(request: Request, rank: int) -> Seconds:
    """What one rank measures; the first round warms up, and does not count."""
    from shardproof.bench import pinning

    torch.set_num_threads(1)
    pinning.pin(rank, request.world, BACKENDS[request.backend].threads)
    comm = Mesh({"replicate": request.world}, device=BACKENDS[request.backend].device).comm(
        "replicate"
    )
    systems = request.systems
    found: Seconds = [[[] for _ in request.sizes] for _ in systems]
    most = max(request.sizes) // 4 + comm.size
    whole, shard = (torch.zeros(most, device=comm.device) for _ in range(2))
    for number in range(request.rounds + 1):
        for at, size in enumerate(request.sizes):
            # The same on all ranks.  On a busy machine a process that has waited long runs first:
            # whoever always followed the slowest would gain by it.
            turns = random.Random(number * len(request.sizes) + at)
            for place in turns.sample(range(len(systems)), len(systems)):
                call = _call(systems[place], comm, whole, shard, size, request.ranks_per_node)
                seconds = _seconds(call, comm, max(1, min(CALLS, CALL_BYTES // size)))
                if number:
                    found[place][at].append(seconds)
    return found


def _seconds(call: Callable[[], object], comm: Comm, calls: int) -> float:
    """Mean seconds of a call, back to back from a common start."""
    finish(comm.device)
    comm.barrier()
    clock = Clock(comm.device)
    clock.mark()
    for _ in range(calls):
        call()
    clock.mark()
    return clock.seconds()[0] / calls


def _call(
    system: tuple[str, str],
    comm: Comm,
    whole: Tensor,
    shard: Tensor,
    size: int,
    ranks_per_node: int,
) -> Callable[[], object]:
    (operation, algorithm), count = system, size // 4
    part = -(-count // comm.size)  # the backend's own take equal shards only
    if algorithm != BACKEND:
        tensor = whole[:count]
        return lambda: own.start(operation, algorithm, tensor, comm, ranks_per_node).wait()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(comm.all_reduce, whole[:count]),
        "reduce_scatter": partial(comm.reduce_scatter, shard[:part], whole[: part * comm.size]),
        "all_gather": partial(comm.all_gather, whole[: part * comm.size], shard[:part]),
        "broadcast": partial(comm.broadcast, whole[:count]),
    }
    return calls[operation]


# ------------------------------------------------------------------------------------------ tables


def over_backend(line: Timed, lines: Iterable[Timed], size: int) -> float | None:
    """Seconds over the backend's own, round by round, the median; ``None``: that was not timed."""
    place = line.operation, line.backend, line.world
    base = next(
        (b for b in lines if b.algorithm == BACKEND and (b.operation, b.backend, b.world) == place),
        None,
    )
    if base is None or str(size) not in base.seconds:
        return None
    pairs = zip(line.seconds[str(size)], base.seconds[str(size)], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def summary(lines: Sequence[Timed]) -> Table:
    """A row for each system: latency, bandwidth, the fit, and seconds over the backend's own."""
    rows = []
    for line in lines:
        medians, (alpha, beta) = line.medians, line.fit()
        small, large = min(medians), max(medians)
        busiest = max(size * line.factor() / seconds for size, seconds in medians.items())
        near = min(medians, key=lambda size: abs(size - 16 * 2**20))
        ratio = over_backend(line, lines, near)
        rows.append(
            (
                line.operation,
                line.algorithm,
                f"{line.backend} x {line.world}",
                f"{medians[small] * 1e6:,.0f}",
                f"{medians[large] * 1e3:,.1f}",
                f"{busiest / 1e9:.2f}",
                f"{alpha * 1e6:,.1f}",
                f"{1 / beta / 1e9:.2f}" if beta else "-",
                "-" if ratio is None or line.algorithm == BACKEND else f"{ratio:.2f}",
            )
        )
    sizes = sorted({size for line in lines for size in line.medians})
    near = min(sizes, key=lambda size: abs(size - 16 * 2**20))
    headings = (
        *("operation", "algorithm", "ranks", f"{text(sizes[0])} us", f"{text(sizes[-1])} ms"),
        *("best bus GB/s", "alpha us", "1/beta GB/s", f"x backend, {text(near)}"),
    )
    return Table("Collectives", headings, rows, align="lllrrrrrr", row_header=1)


def by_size(lines: Sequence[Timed]) -> Table:
    """A row for each system and size."""
    rows = []
    for line in lines:
        for size, seconds in line.medians.items():
            ratio = over_backend(line, lines, size)
            rows.append(
                (
                    *(line.operation, line.algorithm, f"{line.backend} x {line.world}"),
                    f"{size:,}",
                    f"{seconds * 1e6:,.1f}",
                    f"{size / seconds / 1e9:.4f}",
                    f"{size * line.factor() / seconds / 1e9:.4f}",
                    "-" if ratio is None or line.algorithm == BACKEND else f"{ratio:.2f}",
                )
            )
    headings = (
        *("operation", "algorithm", "ranks", "bytes", "us", "algorithm GB/s", "bus GB/s"),
        "x backend",
    )
    return Table("Collectives by size", headings, rows, align="lllrrrrr", row_header=1)


def text(size: int) -> str:
    """4 B, 16 KiB, 64 MiB."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"
