"""Binomial tree all-reduce: a reduction up a tree to rank 0, then a broadcast down the same tree.

    7 ranks

    up      round 0     0 <- 1      2 <- 3      4 <- 5      6
            round 1     0 <------- 2            4 <------- 6
            round 2     0 <-------------------- 4                   rank 0 has the sum
    down    rounds 3, 4, 5: the same arrows the other way           (binomial_broadcast.py)

    up, round t, with d = 2^t: those with r mod 2d = d send to r - d and are done; those with
    r mod 2d = 0 receive from r + d, if there is such a rank.

Cost.  A rank other than 0 sends n up once; each rank sends n down to each of its children, r + d
for every power of two d below the lowest bit of r (any d for rank 0) with r + d < N.  Rounds:
2 ceil(lg N) (0 if n = 0).  Over all ranks 2 (N - 1) messages, 2 (N - 1) n elements.  In seconds
ceil(lg N) (2 alpha + 2 n beta + n gamma): the sum of a binomial reduce and a binomial broadcast
(Thakur, Rabenseifner and Gropp 2005, sections 4.2 and 4.4).  The ring's bytes in all, but rank 0
alone sends ceil(lg N) n: for short vectors only.
Numbers: the sum is made once, on rank 0, and then copied: equal bits on all ranks.
Left out: pipelining; see double_binary_tree.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives import binomial_broadcast
from shardproof.impls.reference.collectives.schedule import Reduce, Round, Send


def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
    """Sum over ranks, on every rank."""
    yield from reduction(rank, size, length)
    yield from binomial_broadcast.rounds(rank, size, length)


def reduction(rank: int, size: int, length: int) -> Iterator[Round]:
    """Sum over ranks on rank 0; the others keep partial sums."""
    whole = range(length)
    for distance in reversed(binomial_broadcast.distances(size)):
        if rank % (2 * distance) == distance:
            yield [Send(rank - distance, whole)]
        elif rank % (2 * distance) == 0 and rank + distance < size:
            yield [Reduce(rank + distance, whole)]
        else:
            yield []
