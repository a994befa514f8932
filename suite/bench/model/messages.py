"""How long a pipeline waits for its messages: its schedule, played with links that are busy.

    posted   a receive stands where its rank waits for it; its notice goes to the sender
    sent     data go once they are sent and the notice is there (gloo, and large messages of MPI and
             NCCL: nothing is on its way that nobody waits for)
    link     one direction between two ranks carries one thing after the other; a notice takes no
             time, but stands behind the data that its rank sends to the same one

So in 1F1B two neighbours hold each other up: the notice of the next activation waits until the
gradient before it is over, and then the activation takes its time with both ranks idle.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardproof.schedules import COMPUTE, MESSAGES, Action, Schedule, received, with_messages


@dataclass(frozen=True)
class Window:
    """The micro-batches of a step in a pipeline: their ``schedule``, and seconds of a rank's
    ``work`` on one of them, a third of which is the forward.
    """

    schedule: Schedule
    work: float

    def exposed(self, count: float, message: float) -> float:
        """Seconds that the window takes longer where a mean rank sends ``count`` messages, each of
        which takes ``message`` seconds; those that the schedule has not (of tied weights) come
        after it.
        """
        schedule = _complete(self.schedule)
        ops = [action.op for order in schedule.orders for action in order]
        others = max(0.0, count - (ops.count("SF") + ops.count("SB")) / schedule.ranks)
        longer = played(schedule, self.work, message) - played(schedule, self.work, 0.0)
        return longer + others * message


def played(schedule: Schedule, work: float, message: float) -> float:
    """Seconds from the begin of ``schedule`` to the end of its last computation."""
    return _Clock(_complete(schedule), work, message).run()


def _complete(schedule: Schedule) -> Schedule:
    has_messages = any(action.op in MESSAGES for order in schedule.orders for action in order)
    return schedule if has_messages else with_messages(schedule)


class _Clock:
    """Ranks and links, event by event in the order of time."""

    def __init__(self, schedule: Schedule, work: float, message: float) -> None:
        third = work * schedule.ranks / schedule.stages / 3
        self.seconds = {"F": third, "B": third, "W": third, "BW": 2 * third}
        self.schedule, self.message = schedule, message
        self.at = [0] * schedule.ranks
        self.asleep: dict[Action, int] = {}
        self.sent: dict[Action, tuple[int, int]] = {}  # by its receive: from whom to whom
        self.noticed: set[Action] = set()
        self.arrived: set[Action] = set()
        self.free: dict[tuple[int, int], float] = defaultdict(float)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.turns = itertools.count()

    def run(self) -> float:
        end = 0.0
        for rank in range(self.schedule.ranks):
            self.later(0.0, partial(self.go_on, rank))
        while self.events:
            now, _, event = heapq.heappop(self.events)
            event(now)
            end = max(end, now)
        return end

    def later(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.turns), event))

    def go_on(self, rank: int, now: float) -> None:
        """Do what takes no time, then compute or fall asleep."""
        order, place = self.schedule.orders[rank], self.schedule.place
        while self.at[rank] < len(order):
            action = order[self.at[rank]]
            op, stage, micro = action
            if op in COMPUTE:
                wants = received(self.schedule, rank, action)
                if wants is not None and wants not in self.arrived:
                    self.asleep[wants] = rank
                    return
                self.at[rank] += 1
                self.later(now + self.seconds[op], partial(self.go_on, rank))
                return
            self.at[rank] += 1
            other = place[stage + (1 if op in ("SF", "RB") else -1)]
            if op in ("RF", "RB"):
                when = max(now, self.free[rank, other])
                self.later(when, partial(self.notice, action))
            else:
                goal = Action("R" + op[1], stage + (1 if op == "SF" else -1), micro)
                self.sent[goal] = rank, other
                self.start(goal, now)

    def notice(self, message: Action, now: float) -> None:
        self.noticed.add(message)
        self.start(message, now)

    def start(self, message: Action, now: float) -> None:
        """Put it on its link, once both sides have come."""
        if message in self.noticed and message in self.sent:
            link = self.sent[message]
            self.free[link] = max(now, self.free[link]) + self.message
            self.later(self.free[link], partial(self.arrive, message))

    def arrive(self, message: Action, now: float) -> None:
        self.arrived.add(message)
        if message in self.asleep:
            self.go_on(self.asleep.pop(message), now)
