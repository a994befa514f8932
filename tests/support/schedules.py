"""Schedules of collectives without communication: counted, proved sound, played on values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardproof.impls.reference.collectives.schedule import (
    Reduce,
    Replace,
    Round,
    Schedule,
    Send,
    made,
)

T = TypeVar("T")
#: By rank: its rounds.
Plans = list[list[Round]]


def plans(schedule: Schedule, ranks: int, length: int) -> Plans:
    """What every rank does, transfers of no elements left out."""
    return [list(made(schedule(rank, ranks, length))) for rank in range(ranks)]


@dataclass
class Count:
    """Rounds in which anybody sends; messages and elements that each rank sends."""

    rounds: int
    messages: list[int]
    elements: list[int]


def count(schedule: Schedule, ranks: int, length: int) -> Count:
    """The brute-force count: every send of every rank."""
    found, busy = Count(0, [0] * ranks, [0] * ranks), set[int]()
    for rank in range(ranks):
        for number, transfers in enumerate(schedule(rank, ranks, length)):
            for one in transfers:
                # Millions of them: no list is made.
                if type(one) is Send and (size := len(one.elements)):
                    found.messages[rank] += 1
                    found.elements[rank] += size
                    busy.add(number)
    found.rounds = len(busy)
    return found


def problems(schedule: Schedule, ranks: int, length: int) -> list[str]:
    """What breaks the rules of schedule.py; empty: nothing."""
    everyone = plans(schedule, ranks, length)
    wrong = []
    if len({len(own) for own in everyone}) > 1:
        wrong.append(f"ranks have different numbers of rounds: {[len(own) for own in everyone]}")
    for number, step in enumerate(zip(*everyone, strict=False)):
        sent = sorted(
            (rank, one.peer, *_span(one.elements))
            for rank, own in enumerate(step)
            for one in own
            if isinstance(one, Send)
        )
        received = sorted(
            (one.peer, rank, *_span(one.elements))
            for rank, own in enumerate(step)
            for one in own
            if not isinstance(one, Send)
        )
        if sent != received:
            wrong.append(f"round {number}: sent {sent}, received {received}")
        for rank, own in enumerate(step):
            wrong += [f"round {number}, rank {rank}: {text}" for text in _clashes(own, length)]
            if any(one.peer == rank for one in own):
                wrong.append(f"round {number}: rank {rank} sends to itself")
    return wrong


def _clashes(own: Round, length: int) -> list[str]:
    """Elements that a round receives into while another transfer uses them."""
    found = [f"{one} is out of bounds" for one in own if not _inside(one.elements, length)]
    for place, one in enumerate(own):
        for other in own[place + 1 :]:
            shared = max(one.elements.start, other.elements.start) < min(
                one.elements.stop, other.elements.stop
            )
            kinds = {type(one), type(other)}
            swap = kinds == {Send, Reduce} and one.elements == other.elements
            # Children of one parent are combined one after the other.
            harmless = kinds in ({Send}, {Reduce}) or swap
            if shared and not harmless:
                found.append(f"{one} and {other}")
    return found


def _span(elements: range) -> tuple[int, int]:
    return elements.start, elements.stop


def _inside(elements: range, length: int) -> bool:
    return 0 <= elements.start <= elements.stop <= length


def play(
    schedule: Schedule, values: Sequence[list[T]], combine: Callable[[T, T], T]
) -> list[list[T]]:
    """What each rank's vector is in the end; all messages of a round are sent before any arrives.

    The lower rank's operand comes first, as in the executor.
    """
    ranks, length = len(values), len(values[0])
    state = [list(own) for own in values]
    for step in zip(*plans(schedule, ranks, length), strict=True):
        before = [list(own) for own in state]
        for rank, own in enumerate(step):
            for one in own:
                for at in one.elements if not isinstance(one, Send) else ():
                    came = before[one.peer][at]
                    if isinstance(one, Replace):
                        state[rank][at] = came
                    else:
                        pair = (came, state[rank][at])
                        state[rank][at] = combine(*(pair if one.peer < rank else pair[::-1]))
    return state
