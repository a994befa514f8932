"""Messages between stages, made by hand: waits that cost time, tensors that are kept too long."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from test_schedule_check import DECLARATION, UNITS, figures

from shardproof.checks import schedule as check
from shardproof.checks.schedule import messages
from shardproof.evidence.records import RankRecord, StepRecord
from shardproof.impls.reference.pipeline.schedules import SCHEDULES
from shardproof.ledgers.program_order import Done
from shardproof.ledgers.traffic import NEVER, LoggedCall
from shardproof.schedules import MESSAGES, Action, Schedule, ScheduleDeadlock, simulate

#: Changes an order before it is logged: what stands there as a receive is waited for there.
Change = Callable[[list[Action]], None]


def logged(schedule: Schedule, rank: int, change: Change | None = None) -> RankRecord:
    """One step of ``rank``: receives are posted and waited for where they stand, and a tensor is
    let go right after its last use.
    """
    order = list(schedule.orders[rank])
    if change is not None:
        change(order)
    events: list[tuple[int, str, str]] = []
    actions: list[Done] = []
    calls: list[tuple[Action, LoggedCall]] = []
    number = 0
    per_stage = len(UNITS) // schedule.stages
    for op, stage, micro in order:
        number += 10
        if op in MESSAGES:
            other = schedule.place[stage + (1 if op in ("SF", "RB") else -1)]
            operation = "send" if op.startswith("S") else "recv"
            calls.append(
                (Action(op, stage, micro), call_to(operation, other, number, schedule.ranks))
            )
            continue
        clock = number / 1000, (number + 8) / 1000, 0.008
        actions.append(Done(0, 0, op, stage, micro, number, number + 8, *clock))
        kind = "forward" if op == "F" else "backward"
        for unit in range(per_stage) if op != "W" else ():
            events.append((number + 1, kind, UNITS[stage * per_stage + unit]))
    last_use = {(row.stage, row.micro): row.end + 1 for row in actions}
    for (op, stage, micro), call in calls:
        call.released = number + 9 if op == "SB" else last_use[stage, micro]
    events.append((number + 10, "observe", "gradients_final"))
    step = StepRecord(
        0,
        0,
        None,
        None,
        windows=(schedule.micro_batches,),
        calls=(0, len(calls)),
        events=(0, number + 20),
    )
    return RankRecord(
        rank,
        2,
        DECLARATION,
        coordinate={"pipe": rank},
        actions=actions,
        events=events,
        steps=[step],
        traffic=[call for _, call in calls],
    )


def call_to(operation: str, peer: int, number: int, ranks: int) -> LoggedCall:
    return LoggedCall(
        sequence=number,
        operation=operation,
        group=tuple(range(ranks)),
        axis="pipe",
        dtype="float64",
        payload_bytes=1024,
        logical_bytes=Fraction(0),
        phase="forward",
        inside_backward=False,
        units_before=0,
        issued=number,
        waited=number + 1,
        peer=peer,
    )


def made(name: str = "1f1b", ranks: int = 2, change: dict[int, Change] | None = None) -> Any:
    schedule = SCHEDULES[name](ranks, 4 if ranks < 3 else 6)
    records = [logged(schedule, rank, (change or {}).get(rank)) for rank in range(ranks)]
    found = figures(name, ranks, (schedule.micro_batches,), records=records, steps=range(1))
    found.case.checks = ("schedule",)  # without memory: only messages are judged below
    return found


def kept(found: Any, rank: int = 1) -> str:
    record = found.records[rank]
    rows = messages.messages_of(found, record, 0)
    assert rows is not None
    return messages.kept_too_long(rows, check.actions_of(record, 0), record.events[-1][0])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_waited_for_when_it_is_needed_and_let_go_after_it_passes(
    name: str, ranks: int
) -> None:
    found = made(name, ranks)
    assert check.decide(found).status == "pass", check.decide(found).message
    assert not messages.waits_too_long(found, 0)
    assert not any(kept(found, rank) for rank in range(ranks))


def wait_early(order: list[Action]) -> None:
    order.insert(order.index(Action("F", 0, 1)), order.pop(order.index(Action("RB", 0, 0))))


def send_late(order: list[Action]) -> None:
    order.insert(order.index(Action("F", 0, 1)) + 1, order.pop(order.index(Action("SF", 0, 0))))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (wait_early, "rank 0 waits for RB0@0 before F1@0"),
        (send_late, "a message is sent later than its contents were computed"),
    ],
)
def test_what_costs_time_and_nothing_else_is_told(change: Change, told: str) -> None:
    outcome = check.decide(made(change={0: change}))
    assert outcome.status == "fail"
    assert "step 0, window 0: with the waits that were logged the span bubble is" in outcome.message
    assert outcome.message.endswith(told)


def test_waits_of_a_system_with_stages_of_its_own_are_not_judged() -> None:
    found = made(change={0: wait_early})
    found.declaration = type(DECLARATION)(strategy="torch_pipeline", backends=("in_memory",))
    assert check.decide(found).status == "pass"


def test_calls_that_are_not_the_schedules_are_not_judged_here() -> None:
    found = made(change={0: wait_early})
    found.records[0].traffic.pop()
    assert messages.messages_of(found, found.records[0], 0) is None
    assert not messages.waits_too_long(found, 0)


@pytest.mark.parametrize("op", ["RF", "SB"])
def test_a_tensor_that_outlives_its_last_use_is_told_with_both_counts(op: str) -> None:
    found = made()
    rows = messages.messages_of(found, found.records[1], 0)
    assert rows is not None
    (row,) = (m for m in rows if m.action == Action(op, 1, 0))
    row.call.released = NEVER
    problem = kept(found)
    assert f"({op}0@1), 1,024 bytes, was not freed after its last use" in problem
    if op == "RF":
        # Beside it those that F1@1 has received, and BW0@1 has sent.
        assert problem.startswith("boundary tensors alive when F1@1 begins: 3, needed: 2; the act")
        forwards = [row.begin for row in found.records[1].actions if row.op == "F"]
        row.call.released = forwards[1]
        assert not kept(found)
        row.call.released += 1
        assert kept(found)
    else:
        assert "boundary tensors alive after the last window: 1, needed: 0; the grad" in problem
    row.call.released = None  # nobody looked
    assert not kept(found)


def test_tensors_that_are_received_are_counted() -> None:
    found = made("gpipe")
    record = found.records[1]
    rows = messages.messages_of(found, record, 0)
    assert rows is not None
    assert messages.most_alive(rows, check.actions_of(record, 0)) == 4
    record = made().records[1]
    rows = messages.messages_of(made(), record, 0)
    assert rows is not None
    assert messages.most_alive(rows, check.actions_of(record, 0)) == 1


def test_waits_in_a_circle_are_a_deadlock() -> None:
    schedule = SCHEDULES["1f1b"](2, 2)
    first, second = (list(order) for order in schedule.orders)
    first.insert(0, first.pop(first.index(Action("RB", 0, 0))))
    waits = Schedule("1f1b", 2, schedule.place, (tuple(first), tuple(second)))
    assert simulate(waits).makespan  # posted there, it costs nothing
    with pytest.raises(ScheduleDeadlock, match="rank 0 waits in RB0@0 for SB0@1"):
        simulate(waits, waits=True)
