"""A collective as data: the sends and receives of each rank in each round, and their elements.

Every algorithm in this folder is a function ``rounds(rank, size, length)`` that yields, round by
round, the transfers of one rank of a group of ``size``, over a vector of ``length`` elements that
each rank holds:

    Send(peer, elements)      these elements of mine go to ``peer``
    Reduce(peer, elements)    what ``peer`` sends is combined with these elements of mine
    Replace(peer, elements)   what ``peer`` sends takes the place of these elements of mine

Nothing in it communicates.  executor.py carries a schedule out; tests count it for 64 ranks, and
play it on sets to see that each rank's contribution arrives exactly once.

Rules that every schedule keeps (``problems`` of tests/support/schedules.py):

1. All ranks have the same number of rounds; one with nothing to do has an empty round.
2. A send meets a receive of the same elements, in the same round, on the other rank.
3. What a round receives into is neither sent nor received into by another transfer of that round,
   but for the exchange of recursive doubling: send and *reduce* of the same elements.
4. A transfer of no elements is left out (:func:`made`), so short vectors cost fewer messages.

Equal bits on all ranks: either an element's sum is made once and then copied, or (recursive
doubling) both sides of an exchange combine the same two numbers; executor.py puts the lower rank's
first, so that they do it in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple


class Send(NamedTuple):
    """``elements`` go to ``peer``."""

    peer: int
    elements: range


class Reduce(NamedTuple):
    """``elements`` are combined with those that ``peer`` sends."""

    peer: int
    elements: range


class Replace(NamedTuple):
    """``elements`` are overwritten with those that ``peer`` sends."""

    peer: int
    elements: range


Transfer = Send | Reduce | Replace
Round = list[Transfer]
#: ``rounds(rank, size, length)``.
Schedule = Callable[[int, int, int], Iterator[Round]]


def cut(elements: range, parts: int) -> list[range]:
    """``elements`` cut into even ``parts``; the first ``n % parts`` of them have one element
    more.
    """
    least, larger = divmod(len(elements), parts)
    edges = [elements.start + part * least + min(part, larger) for part in range(parts + 1)]
    return [range(*edge) for edge in pairwise(edges)]


#: A vector has a lane for each so many elements, up to this many lanes.
LANE, MOST_LANES = 1 << 18, 4


def lanes(length: int) -> int:
    """The number of parts in which a vector is reduced at once; each hides the latency of the
    others.
    """
    return min(MOST_LANES, max(1, length // LANE))


def made(rounds: Iterable[Round]) -> Iterator[Round]:
    """The rounds without empty transfers."""
    return ([one for one in transfers if one.elements] for transfers in rounds)


def moved(rounds: Iterable[Round], ranks: range, start: int) -> Iterator[Round]:
    """A schedule for a sub-group: its rank i is ``ranks[i]``, and its vector begins at
    ``start``.
    """
    for transfers in rounds:
        yield [
            type(one)(ranks[one.peer], range(one.elements.start + start, one.elements.stop + start))
            for one in transfers
        ]
