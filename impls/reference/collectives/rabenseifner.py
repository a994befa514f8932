"""Rabenseifner's all-reduce: reduce-scatter by recursive halving, all-gather by recursive doubling.

Recursive doubling sends whole vectors, though a rank needs the sum of each element only once.  So
partners first *halve*: each gives away the half that the other will be responsible for.  After lg N
rounds a rank has one chunk, summed over all.  The same exchanges backwards give all chunks to all.

    4 ranks, chunks 0 1 2 3; who sends what to whom

    halving     round 0     0 -23-> 2    2 -01-> 0    1 -23-> 3    3 -01-> 1    a half, added
                round 1     0 -1-> 1     1 -0-> 0     2 -3-> 3     3 -2-> 2     a quarter, added
                            rank r has the sum of chunk r
    doubling    round 2     0 -0-> 1     1 -1-> 0     2 -2-> 3     3 -3-> 2     a quarter, copied
                round 3     0 -01-> 2    2 -23-> 0    1 -01-> 3    3 -23-> 1    a half, copied

Other numbers of ranks are folded to a power of two first and back in the end (fold.py).

Cost.  With N = P + x, P = 2^k: let B_j(v) be the elements of the block of 2^j chunks in which chunk
v lies, S_j(v) those of the block beside it (v xor 2^j).  Rank number v inside sends S_{k-1}, ...,
S_0 and then B_0, ..., B_{k-1}: the first add up to n - c_v, every chunk but its own.  A rank with
a guest sends n more, a guest n and nothing else.  Messages: one for each that is not empty.
Rounds: 2k + 2 [x > 0] (0 if n = 0).  Over all ranks (2 (P - 1) + 2x) n elements.
In seconds 2 lg N alpha + 2(N-1)/N n beta + (N-1)/N n gamma for a power of two: Rabenseifner (2004),
Optimization of collective reduction operations; Thakur, Rabenseifner and Gropp (2005),
section 4.4.  The ring's bytes with the logarithm of its rounds.
Numbers: every chunk is summed on one rank and then copied: equal bits on all ranks.
Left out: nothing; any N, any length.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives.fold import folded, power_below
from shardproof.impls.reference.collectives.schedule import (
    Reduce,
    Replace,
    Round,
    Send,
    cut,
)


def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
    """Sum over ranks, on every rank."""
    count = 2 * (power_below(size).bit_length() - 1)
    return folded(halving_doubling, count, rank, size, length)


def halving_doubling(rank: int, size: int, length: int) -> Iterator[Round]:
    """The schedule if ``size`` is a power of two."""
    chunks = cut(range(length), size)

    def block(chunk: int, count: int) -> range:
        """The elements of the block of ``count`` chunks that contains ``chunk``."""
        first = chunk - chunk % count
        return range(chunks[first].start, chunks[first + count - 1].stop)

    distances = [2**level for level in range(size.bit_length() - 1)]
    for distance in reversed(distances):
        partner = rank ^ distance
        yield [Send(partner, block(partner, distance)), Reduce(partner, block(rank, distance))]
    for distance in distances:
        partner = rank ^ distance
        yield [Send(partner, block(rank, distance)), Replace(partner, block(partner, distance))]
