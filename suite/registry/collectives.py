"""The suite's own collectives over send and recv (``impls/reference/collectives/``), by name.

For those who time or judge them, and may not import implementations themselves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardproof.comm import Comm
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.impls.reference.collectives import algorithms
from shardproof.impls.reference.collectives.executor import Running, in_lanes
from shardproof.impls.reference.engine.choices import Hierarchical

#: The algorithm that must know the ranks of a node.
HIERARCHICAL = "hierarchical"


def names() -> dict[str, list[str]]:
    """Operation -> its algorithms."""
    found = {operation: [*by_name] for operation, by_name in algorithms.ALGORITHMS.items()}
    return {**found, "all_reduce": [*found["all_reduce"], HIERARCHICAL]}


def check(algorithm: str, world: int, ranks_per_node: int) -> None:
    """:raises SelectionError: there is no such algorithm, or it cannot serve the world."""
    known = sorted({name for by_name in names().values() for name in by_name})
    if algorithm not in known:
        remedy = nearest(algorithm, known, "algorithms")
        raise SelectionError(Problem("unknown algorithm", remedy, algorithm))
    if algorithm == HIERARCHICAL and (ranks_per_node < 1 or world % ranks_per_node):
        what = f"hierarchical needs whole nodes: {world} ranks, {ranks_per_node} a node"
        remedy = "give --ranks-per-node a divisor of --world, or another algorithm"
        raise SelectionError(Problem(what, remedy, algorithm))


def start(
    operation: str, algorithm: str, tensor: Tensor, comm: Comm, ranks_per_node: int = 0
) -> Any:
    """The collective under way over ``tensor``, in place; ``wait`` ends it."""
    if algorithm == HIERARCHICAL:
        schedule = algorithms.all_reduce(Hierarchical(ranks_per_node=ranks_per_node))
    else:
        schedule = algorithms.ALGORITHMS[operation][algorithm]
    assert schedule is not None
    if operation == "all_reduce":
        return in_lanes(schedule, tensor, comm)
    return Running(schedule(comm.rank, comm.size, tensor.numel()), tensor, comm)
