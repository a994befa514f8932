"""The algorithms by their option names.

name                  file                     rounds             elements a rank sends, about
all_reduce:
  ring                ring.py                  2 (N - 1)          2n
  recursive_doubling  recursive_doubling.py    lg N               n lg N
  rabenseifner        rabenseifner.py          2 lg N             2n
  binomial_tree       binomial_tree.py         2 lg N             2n, rank 0 n lg N
  double_binary_tree  double_binary_tree.py    2 lg N + pieces    2n
  hierarchical        hierarchical.py          2 (L-1) + 2 (M-1)  2n, 2n/L between nodes
reduce_scatter, all_gather:
  ring                ring_reduce_scatter.py, ring_all_gather.py    N - 1    n
broadcast:
  binomial            binomial_broadcast.py    lg N               n for each child
"""

from __future__ import annotations

from functools import partial

from shardproof.impls.reference.collectives import (
    binomial_broadcast,
    binomial_tree,
    double_binary_tree,
    hierarchical,
    rabenseifner,
    recursive_doubling,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from shardproof.impls.reference.collectives.schedule import Schedule
from shardproof.impls.reference.engine.choices import AllReduce, Hierarchical

#: Operation -> algorithm -> schedule; ``hierarchical`` also takes ``ranks_per_node``.
ALGORITHMS: dict[str, dict[str, Schedule]] = {
    "all_reduce": {
        "ring": ring.rounds,
        "recursive_doubling": recursive_doubling.rounds,
        "rabenseifner": rabenseifner.rounds,
        "binomial_tree": binomial_tree.rounds,
        "double_binary_tree": double_binary_tree.rounds,
    },
    "reduce_scatter": {"ring": ring_reduce_scatter.rounds},
    "all_gather": {"ring": ring_all_gather.rounds},
    "broadcast": {"binomial": binomial_broadcast.rounds},
}


def all_reduce(chosen: AllReduce) -> Schedule | None:
    """The schedule that an option chooses; ``None`` for the backend's own collective."""
    if isinstance(chosen, Hierarchical):
        return partial(hierarchical.rounds, ranks_per_node=chosen.ranks_per_node)
    return ALGORITHMS["all_reduce"].get(chosen)
