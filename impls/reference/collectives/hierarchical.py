"""Hierarchical all-reduce: inside each node, then across nodes, then inside again.

Links inside a node are fast, those between nodes slow, and shared by the node's ranks.  So a node
first sums what its own ranks have; across nodes each rank then carries only its share of that.

    2 nodes of 3 ranks, chunks 0 1 2

                    node 0                       node 1
                    rank 0  rank 1  rank 2       rank 3  rank 4  rank 5
    [1] inside      reduce-scatter in a ring     reduce-scatter in a ring
                    c0      c1      c2           c0      c1      c2       sums of 3 ranks
    [2] across      rank 0 <-> 3: all-reduce of c0     rank 1 <-> 4: c1     rank 2 <-> 5: c2
                    c0*     c1*     c2*          c0*     c1*     c2*      sums of 6 ranks
    [3] inside      all-gather in a ring         all-gather in a ring

Ranks of a node have neighbouring numbers: node r // L, place r mod L, of M = N / L nodes of L.

Cost.  Rank r, at place l in node q, sends what ring_reduce_scatter.py and ring_all_gather.py say
for rank l of L and n elements, and what ring.py says for rank q of M and the c_l elements of its
chunk.  Rounds: 2 (L - 1) + 2 (M - 1) (0 if n = 0).  Over all ranks 2 (N - 1) n elements, as the
ring's, of which 2 (M - 1) n go between nodes; but only 2 (M - 1) rounds wait for a slow link, not
all 2 (N - 1), and all ranks of a node send over it at once.  In seconds 2(L-1) alpha_1 +
2(L-1)/L n beta_1 + 2(M-1) alpha_2 + 2(M-1)/(M L) n beta_2: ring.py's formula, once for each level.
BlueConnect (Cho et al. 2019) describes the same decomposition for any number of levels.
Numbers: every sum is made once and then copied: equal bits on all ranks.
Left out: worlds that are not whole nodes (refused); more than two levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardproof.impls.reference.collectives import ring, ring_all_gather, ring_reduce_scatter
from shardproof.impls.reference.collectives.schedule import Round, Schedule, cut, moved


def rounds(rank: int, size: int, length: int, ranks_per_node: int) -> Iterator[Round]:
    """Sum over ranks, on every rank; ``size`` is a multiple of ``ranks_per_node``.

    :raises ValueError: it is not.
    """
    if size % ranks_per_node:
        raise ValueError(f"{size} ranks cannot be divided into nodes of {ranks_per_node} ranks")
    number, place = divmod(rank, ranks_per_node)
    node = range(number * ranks_per_node, (number + 1) * ranks_per_node)
    peers = range(place, size, ranks_per_node)  # at the same place in all nodes
    own = cut(range(length), ranks_per_node)[place]
    inside = partial(_of, place, node, range(length))
    yield from inside(ring_reduce_scatter.rounds)  # [1]
    yield from _of(number, peers, own, ring.rounds)  # [2]
    yield from inside(ring_all_gather.rounds)  # [3]


def _of(rank: int, ranks: range, elements: range, schedule: Schedule) -> Iterator[Round]:
    """``schedule`` of ``ranks`` over ``elements``."""
    return moved(schedule(rank, len(ranks), len(elements)), ranks, elements.start)
