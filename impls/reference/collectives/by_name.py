"""A collective by the name of its algorithm, for timing or testing it alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.collectives import algorithms
from shardproof.impls.reference.collectives.executor import Running, in_lanes
from shardproof.impls.reference.engine.choices import Hierarchical

#: The algorithm that must know the ranks of a node.
HIERARCHICAL = "hierarchical"


def names() -> dict[str, list[str]]:
    """Operation -> its algorithms."""
    found = {operation: [*by_name] for operation, by_name in algorithms.ALGORITHMS.items()}
    return {**found, "all_reduce": [*found["all_reduce"], HIERARCHICAL]}


def start(
    operation: str, algorithm: str, tensor: Tensor, comm: Comm, ranks_per_node: int = 0
) -> Any:
    """Start the collective over ``tensor``, in place; ``wait`` completes it."""
    if algorithm == HIERARCHICAL:
        schedule = algorithms.all_reduce(Hierarchical(ranks_per_node=ranks_per_node))
    else:
        schedule = algorithms.ALGORITHMS[operation][algorithm]
    assert schedule is not None
    if operation == "all_reduce":
        return in_lanes(schedule, tensor, comm)
    return Running(schedule(comm.rank, comm.size, tensor.numel()), tensor, comm)
