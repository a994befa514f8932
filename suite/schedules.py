"""Pipeline schedules as pure data, and what can be said of one without running it.

A schedule is, for each rank of the pipe axis, the list of its actions in order.  Stages are
numbered in forward order; each lies on one rank, a rank may have several (*chunks*).  In text
``F3@1`` is the forward of micro-batch 3 on stage 1.

    F    forward of a micro-batch through a stage
    B    its gradient with respect to the stage's input
    W    its gradient with respect to the stage's weights
    BW   both at once
    SF   send what F gave to the next stage's rank     RF   post the receive of F's input
    SB   send what B gave to the rank of the stage     RB   post the receive of B's (or BW's)
         before                                             incoming gradient

Nothing but F, B and BW ever waits, each for its own message: sends and receives are posted.
Between two ranks messages arrive in the order in which they are sent.  Neighbouring stages on one
rank need no message.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

COMPUTE = ("F", "B", "W", "BW")
MESSAGES = ("SF", "RF", "SB", "RB")
#: Faults of one kind that are named one by one.
_MOST = 4


class Action(NamedTuple):
    """``op`` on ``stage`` for micro-batch ``micro``, both from 0."""

    op: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.op}{self.micro}@{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str`` gave; raises ``ValueError``."""
        match = re.fullmatch(r"([A-Z]+)(\d+)@(\d+)", text.strip())
        if match is None or match[1] not in (*COMPUTE, *MESSAGES):
            raise ValueError(
                f"{text!r} is not an action: write e.g. F0@1 (forward of micro-batch 0, stage 1); "
                f"valid actions: {', '.join((*COMPUTE, *MESSAGES))}"
            )
        return cls(match[1], int(match[3]), int(match[2]))


@dataclass(frozen=True)
class Schedule:
    """``place[stage]`` is the rank of a stage along the pipe axis, ``orders[rank]`` its actions."""

    name: str
    micro_batches: int
    place: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.place)

    @property
    def ranks(self) -> int:
        """Number of ranks along the pipe axis."""
        return len(self.orders)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in forward order."""
        held: list[list[int]] = [[] for _ in self.orders]
        for stage, rank in enumerate(self.place):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @property
    def ascends(self) -> bool:
        """Whether every stage takes its micro-batches in ascending order, as one process does."""
        turns: dict[tuple[int, str], int] = {}
        for order in self.orders:
            for op, stage, micro in order:
                for part in ("B", "W") if op == "BW" else (op,):
                    if turns.get((stage, part), -1) > micro and op in COMPUTE:
                        return False
                    turns[stage, part] = micro
        return True

    def computed(self, rank: int) -> tuple[Action, ...]:
        """The actions of ``rank`` without its messages."""
        return tuple(action for action in self.orders[rank] if action.op in COMPUTE)

    def peak(self, rank: int) -> int:
        """Most micro-batches that ``rank`` holds activations of at once."""
        return most_in_flight(action.op for action in self.orders[rank])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, actions as text; :meth:`from_dict` is its inverse."""
        return {
            "name": self.name,
            "micro_batches": self.micro_batches,
            "place": list(self.place),
            "orders": [" ".join(map(str, order)) for order in self.orders],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that :meth:`to_dict` described."""
        orders = tuple(tuple(map(Action.parse, text.split())) for text in data["orders"])
        return cls(data["name"], data["micro_batches"], tuple(data["place"]), orders)


def most_in_flight(ops: Iterable[str]) -> int:
    """Most micro-batches that a rank holds activations of at once, if it does ``ops`` in turn.

    Summed over its chunks; a micro-batch is held from its F to its W (or BW).
    """
    counts = itertools.accumulate((op == "F") - (op in ("W", "BW")) for op in ops)
    return max(counts, default=0)


def with_messages(schedule: Schedule) -> Schedule:
    """``schedule``, which only computes, with the messages that it needs.

    What is computed for another rank is sent at once; a receive is posted right before the
    computation that waits for it, behind those of earlier messages between the same two ranks.
    """
    place, last = schedule.place, schedule.stages - 1
    sent: list[list[Action]] = []
    queues: dict[tuple[int, int], list[Action]] = defaultdict(list)  # receives as they are due
    for rank, order in enumerate(schedule.orders):
        full: list[Action] = []
        for action in order:
            full.append(action)
            op, stage, micro = action
            if op == "F" and stage < last and place[stage + 1] != rank:
                full.append(Action("SF", stage, micro))
                queues[rank, place[stage + 1]].append(Action("RF", stage + 1, micro))
            elif op in ("B", "BW") and stage and place[stage - 1] != rank:
                full.append(Action("SB", stage, micro))
                queues[rank, place[stage - 1]].append(Action("RB", stage - 1, micro))
        sent.append(full)
    turn = {receive: number for queue in queues.values() for number, receive in enumerate(queue)}
    posted: dict[tuple[int, int], int] = defaultdict(int)
    orders: list[tuple[Action, ...]] = []
    for rank, actions in enumerate(sent):
        posts: list[Action] = []
        for action in actions:
            receive = received(schedule, rank, action)
            if receive in turn:
                source = place[receive.stage + (-1 if receive.op == "RF" else 1)], rank
                posts += queues[source][posted[source] : turn[receive] + 1]
                posted[source] = max(posted[source], turn[receive] + 1)
            posts.append(action)
        orders.append(tuple(posts))
    return replace(schedule, orders=tuple(orders))


def received(schedule: Schedule, rank: int, action: Action) -> Action | None:
    """The receive of what ``action`` of ``rank`` waits for; ``None``: it needs no message."""
    op, stage, micro = action
    place = schedule.place
    if op == "F":
        return Action("RF", stage, micro) if stage and place[stage - 1] != rank else None
    if op in ("B", "BW") and stage < schedule.stages - 1 and place[stage + 1] != rank:
        return Action("RB", stage, micro)
    return None


# ------------------------------------------------------------------------------- without running it


class ScheduleDeadlock(RuntimeError):
    """Ranks that wait for each other for ever; the message tells the cycle in words."""


@dataclass(frozen=True)
class Timeline:
    """When every computation begins and ends; ``spans[rank]`` from its first to its last one."""

    begins: Mapping[Action, float]
    ends: Mapping[Action, float]
    busy: tuple[float, ...]
    spans: tuple[float, ...]
    makespan: float


def simulate(
    schedule: Schedule,
    forward: float = 1.0,
    input_backward: float = 1.0,
    weight_backward: float = 1.0,
    message: float = 0.0,
    took: Mapping[Action, float] | None = None,
    waits: bool = False,
) -> Timeline:
    """Play ``schedule`` with these times of a *rank's* work on one micro-batch.

    A stage takes the share of a rank that its chunks leave it (half of it where a rank has two);
    ``message`` is the time from send to arrival; ``took`` has a time for each computation instead.
    With ``waits`` a receive stands where its rank waits for it, which may be long before what needs
    it.  Raises :class:`ScheduleDeadlock`.
    """
    share = schedule.ranks / schedule.stages
    times = {"F": forward, "B": input_backward, "W": weight_backward}
    times["BW"] = input_backward + weight_backward
    times = {op: share * time for op, time in times.items()}
    orders = schedule.orders
    begins: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    at, clock = [0] * schedule.ranks, [0.0] * schedule.ranks
    arrived: dict[Action, float] = {}  # by its receive
    sleeping: dict[Action, int] = {}  # the same -> the rank that waits
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        order, now, index = orders[rank], clock[rank], at[rank]
        while index < len(order):
            action = order[index]
            op, stage, micro = action
            if op == "SF" or op == "SB":
                goal = Action("R" + op[1], stage + 1 if op == "SF" else stage - 1, micro)
                arrived[goal] = now + message
                if goal in sleeping:
                    ready.append(sleeping.pop(goal))
            elif op in times or waits:
                wants = action if op in MESSAGES else received(schedule, rank, action)
                if wants is not None:
                    if wants not in arrived:
                        sleeping[wants] = rank
                        break
                    now = max(now, arrived[wants])
                if op in times:
                    begins[action] = now
                    now += times[op] if took is None else took[action]
                    ends[action] = now
            index += 1
        at[rank], clock[rank] = index, now
    if any(index < len(order) for index, order in zip(at, orders, strict=True)):
        raise ScheduleDeadlock(_cycle(schedule, at))
    spans, busy = [], []
    for order in orders:
        computed = [action for action in order if action.op in times]
        spans.append(ends[computed[-1]] - begins[computed[0]] if computed else 0.0)
        busy.append(sum(times[a.op] if took is None else took[a] for a in computed))
    return Timeline(begins, ends, tuple(busy), tuple(spans), max(clock, default=0.0))


def _cycle(schedule: Schedule, at: Sequence[int]) -> str:
    """Why the ranks at ``at`` wait for each other, and which orders would end it."""
    stuck = [rank for rank in range(schedule.ranks) if at[rank] < len(schedule.orders[rank])]
    rank, path = stuck[0], list[int]()
    while rank not in path and at[rank] < len(schedule.orders[rank]):
        path.append(rank)
        action = schedule.orders[rank][at[rank]]
        rank = schedule.place[action.stage + (-1 if "F" in action.op else 1)]
    waits, ways = [], []
    for waiting in path[path.index(rank) if rank in path else 0 :]:
        action = schedule.orders[waiting][at[waiting]]
        other = action.stage + (-1 if "F" in action.op else 1)
        sender = schedule.place[other]
        needed = Action("SF" if "F" in action.op else "SB", other, action.micro)
        left = schedule.orders[sender][at[sender] :]
        why = f"behind {left[0]}" if left else "never"
        waits.append(
            f"rank {waiting} waits in {action} for {needed}, which rank {sender} does {why}"
        )
        if left:
            made = [a for a in left[1:] if a.op in _BEFORE[needed.op] and a[1:] == needed[1:]]
            ways.append(f"{[*made, needed][0]} before {left[0]} on rank {sender}")
    remedy = f"; to resolve it, do {' or '.join(ways)}" if ways else ""
    return f"deadlock: {'; '.join(waits)}{remedy}"


def problems(schedule: Schedule) -> list[str]:
    """The fault of ``schedule``, in words; empty if nothing is.

    Everything is done once and on the right rank; F before B before W, receives before what waits
    for them, sends after what they send; between two ranks the n-th receive gets the n-th message;
    and it ends.
    """
    for find in (_shape, _census, _local_order, _channels):
        if found := find(schedule):
            return found
    try:
        simulate(schedule)
    except ScheduleDeadlock as error:
        return [str(error)]
    return []


def _shape(schedule: Schedule) -> list[str]:
    faults = []
    for stage, rank in enumerate(schedule.place):
        if not 0 <= rank < schedule.ranks:
            faults.append(f"stage {stage} is on rank {rank}, but there are {schedule.ranks} ranks")
    for rank, stages in enumerate(schedule.chunks if not faults else ()):
        if not stages:
            faults.append(f"rank {rank} has no stage")
    return faults


def _census(schedule: Schedule) -> list[str]:
    faults: dict[bool, list[str]] = {False: [], True: []}  # by whether it is about a message
    needed = _needed(schedule)
    for rank, order in enumerate(schedule.orders):
        have, want = Counter(order), needed[rank]
        twice = sorted(action for action, times in have.items() if times > 1)
        told = [(action, f"rank {rank} does {action} {have[action]} times") for action in twice]
        told += [(a, f"rank {rank} never does {a}") for a in sorted(want - have.keys())]
        told += [(a, _foreign(schedule, rank, a)) for a in sorted(have.keys() - want)]
        for action, fault in told:
            faults[action.op in MESSAGES].append(fault)
    return _first(faults[False] or faults[True])  # messages follow from what is computed


def _first(faults: list[str]) -> list[str]:
    """As many of ``faults`` as are named one by one."""
    more = [f"and {len(faults) - _MOST} more"] if len(faults) > _MOST else []
    return [*faults[:_MOST], *more]


def _needed(schedule: Schedule) -> list[set[Action]]:
    """The actions of each rank: BW where a stage does both at once anywhere, else B and W."""
    place = schedule.place
    needed: list[set[Action]] = [set() for _ in schedule.orders]
    every = [action for order in schedule.orders for action in order]
    at_once = {(stage, micro) for op, stage, micro in every if op == "BW"}
    apart = {(stage, micro) for op, stage, micro in every if op in ("B", "W")} - at_once
    fused = {stage for stage, _ in at_once}
    micros = range(schedule.micro_batches)
    for stage, rank in enumerate(place):
        mine = needed[rank]
        for micro in micros:
            together = stage in fused and (stage, micro) not in apart
            mine.update(
                Action(op, stage, micro) for op in (("F", "BW") if together else ("F", "B", "W"))
            )
        if stage and place[stage - 1] != rank:
            mine.update(Action(op, stage, micro) for op in ("RF", "SB") for micro in micros)
            before = needed[place[stage - 1]]
            before.update(Action(op, stage - 1, micro) for op in ("SF", "RB") for micro in micros)
    return needed


def _foreign(schedule: Schedule, rank: int, action: Action) -> str:
    op, stage, micro = action
    if stage >= schedule.stages or micro >= schedule.micro_batches:
        size = f"{schedule.stages} stages and {schedule.micro_batches} micro-batches"
        return f"rank {rank} does {action}, but there are {size}"
    if schedule.place[stage] != rank:
        return f"rank {rank} does {action}, but stage {stage} is on rank {schedule.place[stage]}"
    if op in MESSAGES:
        return f"rank {rank} does {action}, a message that no rank needs"
    return f"rank {rank} does {action} besides BW{micro}@{stage}"


#: What must have been done before on the same rank and stage, for the same micro-batch.
_BEFORE = {
    "B": ("F", "RB"),
    "BW": ("F", "RB"),
    "W": ("B",),
    "F": ("RF",),
    "SF": ("F",),
    "SB": ("B", "BW"),
}


def _local_order(schedule: Schedule) -> list[str]:
    faults = []
    for rank, order in enumerate(schedule.orders):
        held, done = set(order), set[Action]()
        for action in order:
            op, stage, micro = action
            for before in _BEFORE.get(op, ()):
                earlier = Action(before, stage, micro)
                if earlier not in done and earlier in held:
                    faults.append(f"rank {rank} does {action} before {earlier}")
            if op in ("F", "B", "BW"):
                faults += _neighbour(schedule, rank, action, done)
            done.add(action)
    return _first(faults)


def _neighbour(schedule: Schedule, rank: int, action: Action, done: set[Action]) -> list[str]:
    """A stage next to it on the same rank must have computed before."""
    op, stage, micro = action
    other, kinds = (stage - 1, ("F",)) if op == "F" else (stage + 1, ("B", "BW"))
    if not 0 <= other < schedule.stages or schedule.place[other] != rank:
        return []
    if done.intersection(Action(kind, other, micro) for kind in kinds):
        return []
    return [f"rank {rank} does {action} before {kinds[0]}{micro}@{other}"]


def _channels(schedule: Schedule) -> list[str]:
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    awaited: dict[tuple[int, int], list[Action]] = defaultdict(list)
    place = schedule.place
    for rank, order in enumerate(schedule.orders):
        for op, stage, micro in order:
            neighbour = stage + (1 if op in ("SF", "RB") else -1)
            if op in ("SF", "SB"):
                sent[rank, place[neighbour]].append(Action("R" + op[1], neighbour, micro))
            elif op in ("RF", "RB"):
                awaited[place[neighbour], rank].append(Action(op, stage, micro))
    faults = []
    for (source, goal), messages in sent.items():
        receives = awaited[source, goal]
        for number, (one, other) in enumerate(zip(messages, receives, strict=True)):
            if one != other:
                faults.append(
                    f"message {number} from rank {source} to rank {goal} is for {one}, but the "
                    f"receiver's turn is {other}"
                )
                break
    return faults
