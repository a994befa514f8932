"""Any number of ranks for algorithms that need a power of two: the extra ranks fold into others.

N = P + x ranks, P the largest power of two that fits.  Of the first 2x ranks each even one gives
its vector to the odd one at its right, and sits out until the result comes back:

    7 ranks = 4 + 3

    fold        0 -> 1    2 -> 3    4 -> 5    6         whole vectors, added
    inside           0         1         2    3         4 ranks, numbered in the same order
    unfold      0 <- 1    2 <- 3    4 <- 5    6         whole results, copied

Cost beside what happens inside: 2 rounds, x messages of n elements each way.  (Thakur, Rabenseifner
and Gropp 2005, section 4.4.)  Where N is a power of two nothing is added.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives.schedule import (
    Reduce,
    Replace,
    Round,
    Schedule,
    Send,
)


def folded(inside: Schedule, count: int, rank: int, size: int, length: int) -> Iterator[Round]:
    """``inside(rank, power, length)``, with ``count`` rounds for a power of two, extended to any
    size.

    Ranks keep their order inside.
    """
    extra, whole = size - power_below(size), range(length)
    if rank < 2 * extra and rank % 2 == 0:
        yield [Send(rank + 1, whole)]
        yield from ([] for _ in range(count))
        yield [Replace(rank + 1, whole)]
        return
    has_guest = rank < 2 * extra
    if extra:
        yield [Reduce(rank - 1, whole)] if has_guest else []
    number = rank // 2 if has_guest else rank - extra
    for transfers in inside(number, size - extra, length):
        yield [type(one)(seat(one.peer, extra), one.elements) for one in transfers]
    if extra:
        yield [Send(rank - 1, whole)] if has_guest else []


def power_below(size: int) -> int:
    """The largest power of two not larger than ``size``."""
    return 1 << (size.bit_length() - 1)


def seat(number: int, extra: int) -> int:
    """The rank with ``number`` inside the power of two."""
    return 2 * number + 1 if number < extra else number + extra
