"""Messages between stages as they were made: whether ranks waited too early, or kept one too long.

Neither changes a number.  A wait that comes before it is needed leaves other ranks idle, so what
was logged is played again, every wait where it was made, and its bubbles are held against those of
the announced schedule, which stand for the closed forms; no clock is asked.  A boundary
tensor (what was sent to a stage, or received from one) that outlives its last use is a kilobyte
here and gigabytes elsewhere, so each is counted, by stage and micro-batch: it must be freed before
the next computation begins.  A gradient that was sent may stay until its window is over, for nobody
waits for it before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardproof.axes import cutting
from shardproof.checks.schedule.announced import CLOCK, Bubbles, bubbles, in_words, settings_of
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord
from shardproof.ledgers.program_order import Done
from shardproof.ledgers.traffic import NEVER, LoggedCall
from shardproof.schedules import MESSAGES, Action, Schedule, ScheduleDeadlock


class Message(NamedTuple):
    """A call, the message of the schedule that it carries out, and its window."""

    window: int
    action: Action
    call: LoggedCall


def messages_of(evidence: Figures, record: RankRecord, step: int) -> list[Message] | None:
    """Those of one rank and step in program order; ``None``: its calls are not the schedule's.

    Between two ranks and in one direction the n-th call is the n-th message of the schedule.
    """
    peers = _pipeline_of(evidence, record)
    rank = record.coordinate[cutting("layers")]
    due = defaultdict[tuple[str, int | None], deque[tuple[int, Action]]](deque)
    for window, size in enumerate(record.steps[step].windows):
        schedule = evidence.schedules[size]
        for action in schedule.orders[rank]:
            if action.op in MESSAGES:
                other = action.stage + (1 if action.op in ("SF", "RB") else -1)
                operation = "send" if action.op.startswith("S") else "recv"
                due[operation, peers[schedule.place[other]]].append((window, action))
    made = []
    for call in record.calls_of(step):
        queue = due.get((call.operation, call.peer))
        # By members: on a mesh of one axis its group is the world's.
        if queue and {*call.group} == {*peers.values()} and call.floating:
            made.append(Message(*queue.popleft(), call))
    return None if any(due.values()) else made


def _pipeline_of(evidence: Figures, record: RankRecord) -> dict[int, int]:
    """Place on the pipe axis -> global rank, of the ranks that share all other places."""
    along = cutting("layers")

    def others(one: RankRecord) -> dict[str, int]:
        return {axis: place for axis, place in one.coordinate.items() if axis != along}

    mine = others(record)
    return {r.coordinate[along]: r.rank for r in evidence.records if others(r) == mine}


# --------------------------------------------------------------------------------- what was held


def kept_too_long(messages: Sequence[Message], log: Sequence[Done], over: int) -> str:
    """The first boundary tensor that outlives its last use; empty: none does.

    ``log`` are the computations of the rank and step, ``over`` is the event after the last one.
    """
    #     computations    row 0      row 1      row 2     over
    #     limits          row 1      row 2      over           each must be let go by the next begin
    begins = [*(row.begin for row in log[1:]), over]
    last_use: dict[tuple[int, ...], int] = {}
    windows: dict[int, int] = {}
    for number, row in enumerate(log):
        last_use[row.window, row.stage, row.micro] = windows[row.window] = number
    limits = [
        begins[windows[window] if op == "SB" else last_use[window, stage, micro]]
        for window, (op, stage, micro), _ in messages
    ]
    for (_, action, call), limit in zip(messages, limits, strict=True):
        if call.released is None or NEVER < call.released <= limit:
            continue
        held = sum(_is_alive(m.call, limit) for m in messages)
        needed = sum(
            m.call.issued < limit < other for m, other in zip(messages, limits, strict=True)
        )
        begun = [f"when {r.op}{r.micro}@{r.stage} begins" for r in log if r.begin == limit]
        when = begun[0] if begun else "after the last window"
        tensor = f"{_in_words(action)}, {call.payload_bytes:,} bytes"
        counts = f"boundary tensors alive {when}: {held}, needed: {needed}"
        # Of others that were let go early the counts would hide this one.
        counts = counts if held > needed else f"a boundary tensor is alive {when}"
        return f"{counts}; {tensor}, was not freed after its last use"
    return ""


def most_alive(messages: Sequence[Message], log: Sequence[Done]) -> int:
    """Most tensors that a rank received and that are alive when a computation begins.

    When one that was sent is let go also depends on who receives it.
    """
    received = [m.call for m in messages if m.action.op.startswith("R")]
    return max((sum(_is_alive(call, row.begin) for call in received) for row in log), default=0)


def _is_alive(call: LoggedCall, event: int) -> bool:
    """Whether the tensor of ``call`` is there at ``event``."""
    return call.issued < event and (call.released == NEVER or (call.released or 0) > event)


def _in_words(action: Action) -> str:
    what = "activation" if action.op.endswith("F") else "gradient"
    goes = "sent" if action.op.startswith("S") else "received"
    return f"the {what} of micro-batch {action.micro} {goes} by stage {action.stage} ({action})"


# ------------------------------------------------------------------------------ how ranks waited


def waits_too_long(evidence: Figures, step: int) -> str:
    """The first window of ``step`` whose waits and sends cost more than the schedule's; empty: none
    does.
    """
    for pipeline in _pipelines(evidence):
        logged = [_logged(evidence, record, step) for record in pipeline]
        for window, size in enumerate(pipeline[0].steps[step].windows):
            plan = evidence.schedules[size]
            orders = [by_window.get(window, []) for by_window in logged]
            if any(not order for order in orders):
                continue  # its messages are not the schedule's, which the check traffic tells
            played = Schedule(plan.name, size, plan.place, tuple(map(tuple, orders)))
            if problem := _slower(played, plan):
                return f"window {window}: {problem}"
    return ""


def _pipelines(evidence: Figures) -> Iterator[list[RankRecord]]:
    by_rank = evidence.ranks
    for record in evidence.records:
        if record.coordinate[cutting("layers")] == 0:
            ranks = _pipeline_of(evidence, record)
            yield [by_rank[ranks[place]] for place in sorted(ranks)]


def _logged(evidence: Figures, record: RankRecord, step: int) -> dict[int, list[Action]]:
    """The actions of one rank in each window, in order: a receive stands at its wait."""
    if (found := messages_of(evidence, record, step)) is None:
        return {}
    events: list[tuple[int, int, Action]] = [
        (row.begin, row.window, Action(row.op, row.stage, row.micro))
        for row in record.actions
        if row.step == step
    ]
    for window, action, call in found:
        number = call.issued if action.op.startswith("S") else call.waited
        # A receive without a wait holds nothing up: it has no place in the order.
        if number is not None:
            events.append((number, window, action))
    by_window = defaultdict[int, list[Action]](list)
    for _, window, action in sorted(events):
        by_window[window].append(action)
    return by_window


def _slower(played: Schedule, plan: Schedule) -> str:
    """How the bubbles of ``played``, with its waits, exceed those of ``plan``."""
    for setting in settings_of(plan):
        try:
            found = bubbles(played, setting, waits=True)
        except ScheduleDeadlock as error:
            return f"the logged order deadlocks: {error}"
        wanted = bubbles(plan, setting)
        for kind in Bubbles._fields:
            bubble, least = getattr(found, kind), getattr(wanted, kind)
            if bubble > least + CLOCK * float(setting.ideal):
                is_now = f"the {kind} bubble is {bubble:g} at {in_words(setting)}"
                right = f"that of {plan.name} is {least:g}{_early(played)}"
                return f"with the waits that were logged {is_now}, {right}"
    return ""


def _early(played: Schedule) -> str:
    """The first wait that comes before a computation which does not need it."""
    for rank, order in enumerate(played.orders):
        for number, (op, stage, micro) in enumerate(order):
            if op not in ("RF", "RB"):
                continue
            behind = next((a for a in order[number + 1 :] if a.op not in MESSAGES), None)
            kinds = ("F",) if op == "RF" else ("B", "BW")
            if behind is not None and (behind.op not in kinds or behind[1:] != (stage, micro)):
                return f": rank {rank} waits for {Action(op, stage, micro)} before {behind}"
    return ": a message is sent later than its contents were computed"
