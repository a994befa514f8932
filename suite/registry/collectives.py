"""The suite's own collectives over send and recv (``impls/reference/collectives/``), by their
names.

For those who time or judge them, and may not import implementations themselves.
"""

from __future__ import annotations

from shardproof.errors import Problem, SelectionError, nearest
from shardproof.impls.reference.collectives.by_name import HIERARCHICAL, names, start

__all__ = ["HIERARCHICAL", "check", "names", "start"]


def check(algorithm: str, world: int, ranks_per_node: int) -> None:
    """:raises SelectionError: there is no such algorithm, or it cannot serve the world."""
    known = sorted({name for by_name in names().values() for name in by_name})
    if algorithm not in known:
        remedy = nearest(algorithm, known, "algorithms")
        raise SelectionError(Problem("unknown algorithm", remedy, algorithm))
    if algorithm == HIERARCHICAL and (ranks_per_node < 1 or world % ranks_per_node):
        what = f"hierarchical needs full nodes: {world} ranks, {ranks_per_node} per node"
        remedy = "give --ranks-per-node a divisor of --world, or another algorithm"
        raise SelectionError(Problem(what, remedy, algorithm))
