"""Binomial broadcast: in every round, each rank that has the vector sends it to one that does not.

    8 ranks, root 0

    round 0     0 ----------------------> 4                     1 has it, then 2
    round 1     0 ----------> 2           4 ----------> 6       4
    round 2     0 ---> 1      2 ---> 3    4 ---> 5      6 ---> 7      8

    In terms of v = (rank - root) mod N and K = ceil(lg N): in round t, with d = 2^(K-1-t), those
    with v mod 2d = 0 send to v + d, if there is such a rank.

Cost.  Every rank but the root receives n elements once.  A rank sends n to each of its children,
v + d for every power of two d below N that is smaller than the lowest bit of v (any d for the
root) with v + d < N.  Rounds: ceil(lg N) (0 if n = 0).  Over all ranks N - 1 messages and (N - 1) n
elements.  In seconds ceil(lg N) (alpha + n beta): Thakur, Rabenseifner and Gropp (2005),
Optimization of collective communication operations in MPICH, section 4.2; the fewest rounds
possible, for the number of ranks that have the vector at most doubles in each.
Numbers: copies; all ranks end with the root's bits.
Left out: pipelining (a long vector is sent whole from level to level).
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives.schedule import Replace, Round, Send


def rounds(rank: int, size: int, length: int, root: int = 0) -> Iterator[Round]:
    """The schedule after which all ranks have the vector of ``root``."""
    place, whole = (rank - root) % size, range(length)
    for distance in distances(size):
        if place % (2 * distance) == 0 and place + distance < size:
            yield [Send((rank + distance) % size, whole)]
        elif place % (2 * distance) == distance:
            yield [Replace((rank - distance) % size, whole)]
        else:
            yield []


def distances(size: int) -> list[int]:
    """Powers of two below ``size``, the largest first."""
    return [2**level for level in reversed(range((size - 1).bit_length()))]
