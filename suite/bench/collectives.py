"""Collectives timed side by side: the backend's own, and the suite's over send and recv.

All systems take turns in the same ranks: in each round every size is timed for one after the other,
in an order that is drawn anew.  The time of a call is that of the slowest rank;
of several rounds the median counts.  What is made of the times: ``collective_times.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardproof.axes import replicas
from shardproof.backends import BACKENDS, USUAL_PROCESSES
from shardproof.bench.collective_times import Timed
from shardproof.bench.on_rank import Clock, finish, pin
from shardproof.comm import Comm, Mesh
from shardproof.costs import collectives as costs
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.registry import collectives as own

#: From a single number to what no cache holds.
SIZES = tuple(4 ** (power + 1) for power in range(13))
ROUNDS = 7
#: Calls of one measurement, fewer for large vectors: at most so many bytes.
CALLS, CALL_BYTES = 16, 4 * 2**20
BACKEND = costs.BACKEND
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


#: By system and size: seconds of a call, one figure a round.
Seconds = list[list[list[float]]]


@dataclass(frozen=True)
class Request:
    """The calls to time. ``algorithms``: these of the suite's (empty: all that serve the world)."""

    backend: str = USUAL_PROCESSES
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
            _check(name, self.world, self.ranks_per_node)

    def id_of(self, operation: str, algorithm: str) -> str:
        """The id of a line about one algorithm."""
        return f"collectives::{operation}::{algorithm}::{self.backend}::world{self.world}"


def _check(algorithm: str, world: int, ranks_per_node: int) -> None:
    """:raises SelectionError: there is no such algorithm, or it cannot serve the world."""
    known = sorted({name for by_name in own.names().values() for name in by_name})
    if algorithm not in known:
        remedy = nearest(algorithm, known, "algorithms")
        raise SelectionError(Problem("unknown algorithm", remedy, algorithm))
    if algorithm == own.HIERARCHICAL and (ranks_per_node < 1 or world % ranks_per_node):
        what = f"hierarchical needs full nodes: {world} ranks, {ranks_per_node} per node"
        remedy = "give --ranks-per-node a divisor of --world, or another algorithm"
        raise SelectionError(Problem(what, remedy, algorithm))


def together(request: Request, ranks: Sequence[Seconds]) -> list[Timed]:
    """The times that the ``ranks`` measured: of each call the slowest."""
    timed = []
    for place, (operation, algorithm) in enumerate(request.systems):
        slowest = {
            str(size): [max(each) for each in zip(*(r[place][at] for r in ranks), strict=True)]
            for at, size in enumerate(request.sizes)
        }
        name = request.id_of(operation, algorithm)
        where = request.backend, request.world, request.ranks_per_node
        timed.append(Timed(name, operation, algorithm, *where, slowest))
    return timed


def measure(request: Request, rank: int) -> Seconds:
    """The times of one rank; the first round warms up and does not count."""
    torch.set_num_threads(1)
    pin(rank, request.world, BACKENDS[request.backend].threads)
    axes = replicas(request.world)
    comm = Mesh(axes, device=BACKENDS[request.backend].device).comm(*axes)
    systems = request.systems
    found: Seconds = [[[] for _ in request.sizes] for _ in systems]
    most = max(request.sizes) // 4 + comm.size
    buffers = torch.zeros(most, device=comm.device), torch.zeros(most, device=comm.device)
    for number in range(request.rounds + 1):
        for at, size in enumerate(request.sizes):
            # The same on all ranks.  On a busy machine a process that has waited long runs first:
            # whoever always followed the slowest would gain by it.
            turns = random.Random(number * len(request.sizes) + at)
            for place in turns.sample(range(len(systems)), len(systems)):
                call = _call(systems[place], comm, buffers, size, request.ranks_per_node)
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
    system: tuple[str, str], comm: Comm, buffers: tuple[Tensor, Tensor], size: int, per_node: int
) -> Callable[[], object]:
    (operation, algorithm), (whole, shard), count = system, buffers, size // 4
    part = -(-count // comm.size)  # the backend's own take equal shards only
    if algorithm != BACKEND:
        tensor = whole[:count]
        return lambda: own.start(operation, algorithm, tensor, comm, per_node).wait()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": partial(comm.all_reduce, whole[:count]),
        "reduce_scatter": partial(comm.reduce_scatter, shard[:part], whole[: part * comm.size]),
        "all_gather": partial(comm.all_gather, whole[: part * comm.size], shard[:part]),
        "broadcast": partial(comm.broadcast, whole[:count]),
    }
    return calls[operation]
