"""Schedules as data: the six are sound, cost what is published, and every planted fault is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from shardproof.checks.schedule.announced import bubbles
from shardproof.contract import Refused
from shardproof.costs.schedules import FORMS, Setting
from shardproof.impls.reference.pipeline.schedules import (
    SCHEDULES,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from shardproof.schedules import (
    Action,
    Schedule,
    ScheduleDeadlock,
    problems,
    simulate,
    with_messages,
)

#: Times of F, B and W: equal, like a transformer's, and two that are far from both.
TIMES = [
    tuple(map(Fraction, times))
    for times in (("1", "1", "1"), ("1", "6/5", "4/5"), ("3", "4", "1"), ("2", "1", "1/2"))
]
RANKS, MICRO_BATCHES = range(1, 7), range(1, 14)


def every(name: str) -> Iterator[Schedule]:
    """The schedule ``name`` for all ranks, micro-batches and chunks that it takes."""
    for ranks in RANKS:
        for micro_batches in MICRO_BATCHES:
            if name != "interleaved":
                yield SCHEDULES[name](ranks, micro_batches)
            elif micro_batches % ranks == 0:
                yield from (interleaved(ranks, micro_batches, chunks) for chunks in (1, 2, 3))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_sound(name: str) -> None:
    seen = 0
    for schedule in every(name):
        assert problems(schedule) == [], (schedule.ranks, schedule.micro_batches)
        seen += 1
    assert seen >= 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_add_up_in_one_order(name: str) -> None:
    """In F, B and W alike each stage takes its micro-batches in ascending order."""
    for schedule in every(name):
        for rank, stages in enumerate(schedule.chunks):
            for stage in stages:
                for ops in (("F",), ("B", "BW"), ("W", "BW")):
                    order = [
                        a.micro for a in schedule.computed(rank) if a.stage == stage and a.op in ops
                    ]
                    assert order == list(range(schedule.micro_batches))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("times", TIMES, ids=lambda times: "-".join(map(str, times)))
def test_bubbles_are_those_published(name: str, times: tuple[Fraction, ...]) -> None:
    compared = {"span": 0, "makespan": 0}
    for schedule in every(name):
        chunks = schedule.stages // schedule.ranks
        setting = Setting(schedule.ranks, schedule.micro_batches, chunks, *times)
        found = bubbles(schedule, setting)
        for kind, form in (("span", FORMS[name].span), ("makespan", FORMS[name].makespan)):
            wanted = form(setting)
            if wanted is not None:
                assert getattr(found, kind) == pytest.approx(float(wanted), abs=1e-9), setting
                compared[kind] += 1
    assert min(compared.values()) >= 6 or (name == "zb_v" and len(set(times)) > 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_in_flight_are_those_published(name: str) -> None:
    compared = 0
    for schedule in every(name):
        setting = Setting(schedule.ranks, schedule.micro_batches, schedule.stages // schedule.ranks)
        for rank in range(schedule.ranks):
            most = FORMS[name].held(setting, rank)
            if most is not None:
                assert schedule.peak(rank) == most, (setting, rank)
                compared += 1
    assert compared >= 60


#: Hand-made numbers for 4 ranks and 8 micro-batches at equal times: span and makespan bubble, and
#: micro-batches held (chunks count each).
FOUR_BY_EIGHT = {
    "gpipe": (9, 9, [8, 8, 8, 8]),
    "1f1b": (9, 9, [4, 3, 2, 1]),
    "interleaved": (4.5, 4.5, [11, 9, 7, 5]),
    "zb_h1": (3, 3, [4, 4, 4, 4]),
    "zb_h2": (0, 3, [7, 7, 7, 7]),
    "zb_v": (0, 1.5, [8, 8, 8, 8]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_four_ranks_and_eight_micro_batches(name: str) -> None:
    schedule = SCHEDULES[name](4, 8)
    found = bubbles(schedule, Setting(4, 8, schedule.stages // 4))
    span, makespan, held = FOUR_BY_EIGHT[name]
    assert tuple(found) == (pytest.approx(span), pytest.approx(makespan))
    assert [schedule.peak(rank) for rank in range(4)] == held


@pytest.mark.parametrize(("ranks", "bubble"), [(4, 1.2), (8, 2.8)])
def test_zb_v_with_unequal_times(ranks: int, bubble: float) -> None:
    times = (Fraction(1), Fraction(6, 5), Fraction(4, 5))
    found = bubbles(zb_v(ranks, 4 * ranks), Setting(ranks, 4 * ranks, 2, *times))
    assert found.span == pytest.approx(bubble)


def test_messages_take_time() -> None:
    """Two ranks and one micro-batch: forward, message, forward and backward, message, backward."""
    timeline = simulate(one_f_one_b(2, 1), 1.0, 1.0, 1.0, message=10.0)
    assert timeline.makespan == 2 * 3 + 2 * 10
    assert timeline.begins[Action("F", 1, 0)] == 11.0
    assert timeline.busy == (3.0, 3.0)


def test_every_computation_may_take_its_own_time() -> None:
    schedule = SCHEDULES["1f1b"](2, 2)
    took = {action: 1.0 for rank in (0, 1) for action in schedule.computed(rank)}
    took[Action("BW", 1, 0)] = 4.0
    played = simulate(schedule, took=took)
    # F0 F1 on rank 0, then it waits; rank 1: F0 1-2, BW0 2-6, F1 6-7, BW1 7-8.
    assert played.ends[Action("BW", 0, 0)] == 7
    assert (played.makespan, played.busy, played.spans) == (9, (4, 7), (9, 7))


def test_neighbouring_stages_on_one_rank_send_nothing() -> None:
    """ZB-V turns round on the last rank: its two stages are neighbours."""
    sent = [str(a) for a in zb_v(2, 1).orders[1] if a.op in ("SF", "RF", "SB", "RB")]
    assert sent == ["RF0@1", "SF0@2", "RB0@2", "SB0@1"]


def test_interleaving_takes_whole_groups_only() -> None:
    with pytest.raises(Refused, match=r"must be a multiple of 4.* not 6"):
        interleaved(4, 6)


def test_a_schedule_is_plain_data() -> None:
    schedule = zb_h1(3, 4)
    assert Schedule.from_dict(schedule.to_dict()) == schedule
    assert Action.parse("BW3@1") == Action("BW", 1, 3)
    with pytest.raises(ValueError, match="'X0@1' is not an action"):
        Action.parse("X0@1")


# ----------------------------------------------------------------------------- faults as data

Orders = list[list[Action]]


def spoilt(schedule: Schedule, change: Callable[[Orders], None]) -> list[str]:
    """The problems of ``schedule`` after ``change`` of its orders."""
    orders = [list(order) for order in schedule.orders]
    change(orders)
    return problems(replace(schedule, orders=tuple(map(tuple, orders))))


def swap(order: list[Action], one: str, other: str) -> None:
    """Let two actions change places."""
    i, j = order.index(Action.parse(one)), order.index(Action.parse(other))
    order[i], order[j] = order[j], order[i]


def drop(order: list[Action], *names: str) -> None:
    for name in names:
        order.remove(Action.parse(name))


PLAIN, SPLIT = one_f_one_b(3, 4), zb_h1(3, 4)

#: What is planted -> (schedule, change, what must be told).
FAULTS: dict[str, tuple[Schedule, Callable[[Orders], None], str]] = {
    "dropped forward": (PLAIN, lambda o: drop(o[1], "F2@1"), "rank 1 never does F2@1"),
    "dropped weight gradient": (SPLIT, lambda o: drop(o[1], "W2@1"), "rank 1 never does W2@1"),
    "doubled": (
        PLAIN,
        lambda o: o[2].append(Action("BW", 2, 3)),
        "rank 2 does BW3@2 2 times",
    ),
    "wrong rank": (
        PLAIN,
        lambda o: o[0].append(Action("BW", 1, 0)),
        "rank 0 does BW0@1, but stage 1 is on rank 1",
    ),
    "too many micro-batches": (
        PLAIN,
        lambda o: o[0].append(Action("F", 0, 4)),
        "rank 0 does F4@0, but there are 3 stages and 4 micro-batches",
    ),
    "backward before forward": (
        PLAIN,
        lambda o: swap(o[2], "F1@2", "BW1@2"),
        "rank 2 does BW1@2 before F1@2",
    ),
    "weights before input": (
        SPLIT,
        lambda o: swap(o[0], "B1@0", "W1@0"),
        "rank 0 does W1@0 before B1@0",
    ),
    "both at once and apart": (
        PLAIN,
        lambda o: o[2].append(Action("W", 2, 3)),
        "rank 2 does W3@2 besides BW3@2",
    ),
    "swapped sends": (
        PLAIN,
        lambda o: swap(o[0], "SF1@0", "SF0@0"),
        "rank 0 does SF1@0 before F1@0",
    ),
    "late send": (
        PLAIN,
        lambda o: (
            drop(o[0], "SF0@0"),
            o[0].insert(o[0].index(Action("SF", 0, 1)) + 1, Action("SF", 0, 0)),
        ),
        "message 0 from rank 0 to rank 1 is for RF1@1, but the receiver's turn is RF0@1",
    ),
    "receive order": (
        PLAIN,
        lambda o: (drop(o[1], "RF1@1"), o[1].insert(0, Action("RF", 1, 1))),
        "message 0 from rank 0 to rank 1 is for RF0@1, but the receiver's turn is RF1@1",
    ),
    "receive after its use": (
        PLAIN,
        lambda o: swap(o[1], "RB0@1", "BW0@1"),
        "rank 1 does BW0@1 before RB0@1",
    ),
    "missing send": (PLAIN, lambda o: drop(o[0], "SF2@0"), "rank 0 never does SF2@0"),
    "missing receive": (PLAIN, lambda o: drop(o[0], "RB2@0"), "rank 0 never does RB2@0"),
    "missing message": (
        PLAIN,
        lambda o: (drop(o[1], "SB0@1"), drop(o[0], "RB0@0")),
        "rank 0 never does RB0@0",
    ),
    "needless message": (
        zb_v(2, 2),
        lambda o: o[1].append(Action("SF", 1, 0)),
        "rank 1 does SF0@1, a message that no rank needs",
    ),
    "other stage of one rank": (
        zb_v(2, 2),
        lambda o: swap(o[1], "F0@1", "F0@2"),
        "rank 1 does F0@2 before F0@1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_told(fault: str) -> None:
    schedule, change, wanted = FAULTS[fault]
    assert problems(schedule) == []
    assert wanted in spoilt(schedule, change)


def test_orders_that_descend_are_known() -> None:
    for made in (PLAIN, SPLIT, interleaved(2, 4), zb_v(2, 5)):
        assert made.ascends
    for text, ascends in (
        (["F0@0", "F1@0", "BW0@0", "B1@0", "W1@0"], True),
        (["F1@0", "F0@0", "BW0@0", "BW1@0"], False),
        (["F0@0", "F1@0", "B0@0", "BW1@0", "W0@0"], False),
    ):
        order = tuple(map(Action.parse, text))
        made = Schedule("own", 2, (0,), (order,))
        assert problems(made) == [] and made.ascends is ascends


def test_a_deadlock_is_told_as_a_cycle() -> None:
    """Rank 0 waits for a gradient before it goes on, rank 1 begins with the second micro-batch."""
    text = (["F0@0", "BW0@0", "F1@0", "BW1@0"], ["F1@1", "BW1@1", "F0@1", "BW0@1"])
    orders = tuple(tuple(map(Action.parse, order)) for order in text)
    schedule = with_messages(Schedule("own", 2, (0, 1), orders))
    (told,) = problems(schedule)
    assert told == (
        "deadlock: rank 0 waits in BW0@0 for SB0@1, which rank 1 does behind F1@1; "
        "rank 1 waits in F1@1 for SF1@0, which rank 0 does behind BW0@0; "
        "to resolve it, do BW0@1 before F1@1 on rank 1 or F1@0 before BW0@0 on rank 0"
    )
    with pytest.raises(ScheduleDeadlock, match="rank 1 waits in F1@1"):
        simulate(schedule)


def test_a_cycle_over_three_ranks_leaves_out_who_only_waits() -> None:
    text = (
        ["F0@0", "F1@0", "BW0@0", "BW1@0"],
        ["F0@1", "BW0@1", "F1@1", "BW1@1"],
        ["F1@2", "BW1@2", "F0@2", "BW0@2"],
    )
    orders = tuple(tuple(map(Action.parse, order)) for order in text)
    (told,) = problems(with_messages(Schedule("own", 2, (0, 1, 2), orders)))
    assert "rank 0 waits" not in told
    assert "rank 1 waits in BW0@1 for SB0@2, which rank 2 does behind F1@2" in told
    assert "rank 2 waits in F1@2 for SF1@1, which rank 1 does behind BW0@1" in told


@pytest.mark.parametrize(
    ("place", "told"),
    [((0, 2), "stage 1 is on rank 2, but there are 2 ranks"), ((0, 0), "rank 1 has no stage")],
)
def test_stages_lie_on_ranks_that_exist(place: tuple[int, ...], told: str) -> None:
    orders = tuple((Action("F", stage, 0), Action("BW", stage, 0)) for stage in (0, 1))
    assert told in problems(Schedule("own", 1, place, orders))


def test_of_many_faults_some_are_told_and_the_others_counted() -> None:
    found = spoilt(PLAIN, lambda o: o[1].clear())
    assert len(found) == 5
    assert found[-1] == f"and {3 * 4 - 4} more"  # F, B and W; their messages go without saying
