"""Recursive doubling all-reduce: partners swap whole vectors, twice as far apart in every round.

    8 ranks; <-> : both send all they have, both add

    round 0     0 <-> 1     2 <-> 3     4 <-> 5     6 <-> 7      sums of 2 ranks
    round 1     0 <-> 2     1 <-> 3     4 <-> 6     5 <-> 7      sums of 4
    round 2     0 <-> 4     1 <-> 5     2 <-> 6     3 <-> 7      sums of 8

    round t: rank r and rank r xor 2^t.

Other numbers of ranks are folded to a power of two first and back in the end (fold.py).

Cost.  With N = P + x, P = 2^k the largest power of two in N: a rank sends n elements in each of k
messages; one with a guest k + 1 messages, a guest 1.  Rounds: k + 2 [x > 0] (0 if n = 0).  Over all
ranks (P k + 2x) n elements.  In seconds lg N (alpha + n beta + n gamma): Thakur, Rabenseifner and
Gropp (2005), section 4.4.  The fewest rounds of all, but every round carries everything: best for
short vectors.
Numbers: ranks of a block of 2^t hold the same partial sum before round t, bit for bit, and both
sides of an exchange add the same two numbers in the same order: equal bits on all ranks, NaNs and
zeros with a sign among them.
Left out: nothing; any N, any length.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives.fold import folded, power_below
from shardproof.impls.reference.collectives.schedule import Reduce, Round, Send


def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
    """Sum over ranks, on every rank."""
    count = power_below(size).bit_length() - 1
    return folded(doubling, count, rank, size, length)


def doubling(rank: int, size: int, length: int) -> Iterator[Round]:
    """The schedule if ``size`` is a power of two."""
    distance, whole = 1, range(length)
    while distance < size:
        partner = rank ^ distance
        yield [Send(partner, whole), Reduce(partner, whole)]
        distance *= 2
