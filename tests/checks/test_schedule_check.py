"""The check ``schedule``: claims, logs and activations made by hand, with every fault planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_costs import plan, tensor

from shardproof import registry
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.leader import judge_case
from shardproof.cases.verdict import decide_case
from shardproof.checks import schedule as check
from shardproof.checks.results import CaseResult
from shardproof.checks.schedule import announced
from shardproof.contract import Capabilities, Implementation, OptimizerSpec, Refused
from shardproof.costs.expression import CaseFacts
from shardproof.evidence.account import Account
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import ComparisonRow, RankRecord, StepRecord
from shardproof.impls.reference.pipeline.schedules import SCHEDULES
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RankHost
from shardproof.ledgers.memory.summary import MemoryRow
from shardproof.ledgers.program_order import Done
from shardproof.ledgers.traffic import LoggedCall
from shardproof.registry.declaration import Declaration
from shardproof.schedules import Action, Schedule, with_messages

UNITS = tuple(f"b.{n}" for n in range(12))
STAGE_BYTES = {"F": 1000.0, "W": 300.0, "input": 100.0}


def pipeline_plan(ranks: int, options: Mapping[str, Any], windows: tuple[int, ...]) -> Any:
    model = tuple(tensor(f"{name}.w", 4, units=(n,)) for n, name in enumerate(UNITS))
    shapes = tuple(tuple((2, 8) for _ in range(size)) for size in windows)
    return plan(
        "pipeline",
        axes={"pipe": ranks},
        options=options,
        parameters=model,
        modules={"": "M", "b": "ModuleList"} | dict.fromkeys(UNITS, "B"),
        units=UNITS,
        steps=2,
        micro_batches=(sum(windows),),
        inputs=((shapes,),) * 2,
        hidden={"2x8": (4,) * (len(UNITS) - 1)},
    )


DECLARATION = Declaration(strategy="pipeline", backends=("in_memory",))


def log(schedules: Mapping[int, Schedule], rank: int, windows: tuple[int, ...]) -> RankRecord:
    """Two steps of ``rank`` as they would be logged: 20 numbers a computation."""
    actions, events, steps = [], [], []
    number, per_stage = 0, 0
    for step in range(2):
        first = number
        for window, size in enumerate(windows):
            schedule = schedules[size]
            per_stage = len(UNITS) // schedule.stages
            for action in schedule.computed(rank):
                clock = number / 1000, (number + 20) / 1000, 0.01
                actions.append(Done(step, window, *action, number, number + 19, *clock))
                kind = "forward" if action.op == "F" else "backward"
                for unit in range(per_stage) if action.op != "W" else ():
                    name = UNITS[action.stage * per_stage + unit]
                    events.append((number + 1 + unit, kind, name))
                number += 20
        events.append((number, "observe", "gradients_final"))
        number += 10
        steps.append(StepRecord(step, 0, None, None, windows=windows, events=(first, number)))
    logged = {"actions": actions, "events": events, "steps": steps}
    return RankRecord(rank, 2, DECLARATION, coordinate={"pipe": rank}, **logged)


def held_bytes(record: RankRecord, step: int) -> int:
    """The peak of a rank that holds exactly what its micro-batches need."""
    held = most = 0
    for row in check.actions_of(record, step):
        change = {"F": 1000, "BW": -1000, "B": -700, "W": -300}[row.op]
        held += change
        most = max(most, held)
    return most


class MadeFigures(SimpleNamespace):
    """What the check asks, made by hand."""

    ranks = Figures.ranks


def figures(
    name: str = "1f1b", ranks: int = 2, windows: tuple[int, ...] = (4,), **more: Any
) -> Any:
    options = {"schedule": name}
    schedules = {size: SCHEDULES[name](ranks, size) for size in windows}
    made = pipeline_plan(ranks, options, windows)
    records = []
    for rank in range(ranks):
        record = log(schedules, rank, windows)
        record.memory = [
            MemoryRow("peak", step, "forward", "cpu", "activations", held_bytes(record, step))
            for step in range(2)
        ]
        records.append(record)
    case = SimpleNamespace(
        mesh={"pipe": ranks},
        world=ranks,
        options=options,
        ledgers=True,
        backend="in_memory",
        checks=("schedule", "memory"),
        precision={},
        workload=WorkloadSpec("charnames_gpt"),
    )
    stages = schedules[windows[0]].stages
    compared = [
        ComparisonRow(0, phase, f"stage {stage}", "2x8", 0.0, size)
        for stage in range(stages)
        for phase, size in STAGE_BYTES.items()
    ]
    fields = {
        "case": case,
        "declaration": DECLARATION,
        "plan": made,
        "schedules": schedules,
        "steps": range(2),
        "records": records,
        "facts": CaseFacts({}, made),
        "model_facts": made,
        "compared": {"schedule": compared},
        "data_coordinate": dict.fromkeys(range(ranks), 0),
    }
    return MadeFigures(**fields | more)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_claimed_and_done_passes(name: str, ranks: int) -> None:
    outcome = check.decide(figures(name, ranks, (6, 3) if ranks == 3 else (4, 2)))
    assert outcome.status == "pass", outcome.message
    told = outcome.figures
    assert set(told) >= {"in_flight", "activations"}
    size = "window of 6" if ranks == 3 else "window of 4"
    assert told[size]["name"] == name
    assert set(told[size]["closed"]) == {"span_bubble_over_ideal", "makespan_bubble_over_ideal"}


@pytest.mark.parametrize(
    ("name", "ranks", "size", "unjudged"),
    [
        ("zb_v", 3, 4, True),
        ("zb_v", 3, 5, False),
        ("zb_v", 1, 1, False),
        ("zb_h2", 3, 1, False),
        ("interleaved", 2, 2, False),
    ],
)
def test_a_pass_says_where_no_closed_form_was_held_against_the_bubble(
    name: str, ranks: int, size: int, unjudged: bool
) -> None:
    found = check.decide(figures(name, ranks, (size,)))
    assert found.status == "pass", found.message
    assert found.message.startswith("bubble not judged: ") == unjudged == bool(found.message)
    if unjudged:
        assert f"'zb_v' is known with {size} micro-batches on {ranks} ranks" in found.message


def test_orders_of_ones_own_have_no_closed_form() -> None:
    own = replace(SCHEDULES["1f1b"](2, 4), name="mine")
    assert announced.bubble_unjudged(own) == "bubble not judged: no closed form of 'mine' is known"


def test_both_bubbles_are_told_over_both_denominators() -> None:
    told = check.decide(figures("1f1b", 2, (4,))).figures["window of 4"]
    assert told["makespan_bubble_over_ideal"] == pytest.approx(1 / 4)
    assert told["makespan_bubble_over_total"] == pytest.approx(1 / 5)
    assert told["span_bubble_over_ideal"] == pytest.approx(1 / 4)


def test_bubbles_are_measured_by_the_ranks_clocks() -> None:
    """Two ranks, two micro-batches; every forward takes 1 s, every backward 2 s.

    Thereof the first rank has a core for half of the time, the second one for all of it.
    """
    found = figures("1f1b", 2, (2,))
    clocks = ([0, 1, 4, 6], [1, 2, 4, 5])  # F0 F1 BW0 BW1 and F0 BW0 F1 BW1
    for record, begins in zip(found.records, clocks, strict=True):
        logged = [row for row in record.actions if row.step == 1]
        for row, begin in zip(logged, begins, strict=True):
            took = 1 if row.op == "F" else 2
            cpu = took / 2 if record.rank == 0 else took
            clock = replace(row, began=begin, ended=begin + took, cpu=cpu)
            record.actions[record.actions.index(row)] = clock
    told = check.decide(found).figures["measured"]
    assert told["seconds"] == {"F": 1.0, "BW": 2.0}
    assert told["span_bubble_over_ideal"] == pytest.approx((8 - 6) / 6)
    assert told["makespan_bubble_over_total"] == pytest.approx(2 / 8)
    assert told["cpu_seconds"] == {"F": 0.75, "BW": 1.5}
    assert told["simulated"]["makespan_bubble_over_ideal"] == pytest.approx(1 / 2)
    assert told["closed"] == {
        "span_bubble_over_ideal": pytest.approx(1 / 2),
        "makespan_bubble_over_ideal": pytest.approx(1 / 2),
    }
    # F0 ends at 0.5; then rank 1 is busy until 6.5; BW1 of rank 0 ends at 7.5; a rank works 4.5.
    assert told["replayed"]["makespan_bubble_over_ideal"] == pytest.approx((7.5 - 6) / 4.5)
    assert told["replayed"]["span_bubble_over_ideal"] == pytest.approx((7.5 - 3) / 4.5)


Change = Callable[[Any], None]


def rows(found: Any, rank: int = 0) -> list[Done]:
    actions: list[Done] = found.records[rank].actions
    return actions


def change_row(found: Any, number: int, **fields: Any) -> None:
    """Computation ``number`` of rank 0 with other ``fields``."""
    rows(found)[number] = replace(rows(found)[number], **fields)


def exchange(found: Any, one: int, other: int) -> None:
    """Two computations of rank 0 change places (their times stay)."""
    first, second = (
        {"op": row.op, "stage": row.stage, "micro": row.micro}
        for row in (rows(found)[one], rows(found)[other])
    )
    change_row(found, one, **second)
    change_row(found, other, **first)


def peak(found: Any, rank: int, change: int) -> None:
    memory = found.records[rank].memory
    memory[1] = replace(memory[1], bytes=memory[1].bytes + change)


# Rank 0 of 2, four micro-batches: F0 F1 BW0 F2 BW1 F3 BW2 BW3.
IN_THE_RUN: dict[str, tuple[Change, str]] = {
    "order": (
        lambda f: exchange(f, 2, 3),
        "rank 0, step 0: window 0: does F2@0 after F1@0, where 1f1b has BW0@0",
    ),
    "left out": (
        lambda f: rows(f).__delitem__(7),
        "rank 0, step 0: window 0: BW3@0 and all actions after it are never done",
    ),
    "once more": (
        lambda f: rows(f).insert(8, replace(rows(f)[7], window=1, begin=160, end=160)),
        "rank 0, step 0: does BW3@0 after the last action of the schedule",
    ),
    "other micro-batch": (
        lambda f: change_row(f, 2, micro=1),
        "rank 0, step 0: window 0: does BW1@0 after F1@0, where 1f1b has BW0@0",
    ),
    "nothing traced": (
        lambda f: rows(f, 1).clear(),
        "rank 1, step 0: claims a schedule, but traces no computation",
    ),
    "two at once": (
        lambda f: change_row(f, 2, end=65),
        "rank 0, step 0: F2@0 begins before BW0@0 has ended",
    ),
    "late": (
        lambda f: change_row(f, 7, end=165),
        "rank 0, step 0: BW3@0 is not over when gradients are reported as final",
    ),
    "empty forward": (
        lambda f: f.records[0].events.remove((22, "forward", "b.1")),
        "rank 0, step 0: F1@0 runs forward of 'b.1' 0 times, not 1",
    ),
    "empty backward": (
        lambda f: f.records[1].events.remove((21, "backward", "b.6")),
        "rank 1, step 0: BW0@1 runs backward of 'b.6' 0 times, not 1",
    ),
    "forward of the other stage": (
        lambda f: f.records[1].events.__setitem__(0, (1, "forward", "b.0")),
        "rank 1, step 0: F0@1 runs forward of 'b.6' 0 times, not 1",
    ),
    "window without a claim": (
        lambda f: setattr(f.records[0].steps[1], "windows", [5]),
        "rank 0, step 1: no schedule is claimed for its window of 5 micro-batches",
    ),
    "more activations": (
        lambda f: peak(f, 0, 1000),
        "rank 0, step 1: 3,000 bytes of activations at the peak, 2,000 to 2,392 for up to 2",
    ),
    "fewer activations": (
        lambda f: peak(f, 0, -1),
        "rank 0, step 1: 1,999 bytes of activations at the peak, 2,000 to 2,392 for up to 2",
    ),
}


def failure(change: Change) -> str:
    """What the check says once ``change`` was made."""
    found = figures()
    change(found)
    outcome = check.decide(found)
    assert outcome.status == "fail"
    return outcome.message


@pytest.mark.parametrize("fault", IN_THE_RUN)
def test_a_fault_of_the_run_is_told(fault: str) -> None:
    change, wanted = IN_THE_RUN[fault]
    assert failure(change).startswith(wanted)


def claim(found: Any, **changes: Any) -> None:
    (size,) = found.schedules
    found.schedules = {size: replace(found.schedules[size], **changes)}


def warm_up(found: Any) -> None:
    """GPipe under the name of 1F1B: sound, but it holds more."""
    found.schedules = {4: replace(SCHEDULES["gpipe"](2, 4), name="1f1b")}


def slow(found: Any) -> None:
    """1F1B without any warm-up: one micro-batch after the other."""
    orders = tuple(
        tuple(Action(op, rank, micro) for micro in range(4) for op in ("F", "BW"))
        for rank in range(2)
    )
    found.schedules = {4: with_messages(Schedule("1f1b", 4, (0, 1), orders))}


IN_THE_CLAIM: dict[str, tuple[Change, str]] = {
    "dropped": (
        lambda f: claim(f, orders=(f.schedules[4].orders[0][:-1], f.schedules[4].orders[1])),
        "window of 4: rank 0 never does",
    ),
    "other name": (lambda f: claim(f, name="gpipe"), "claims 'gpipe', asked for '1f1b'"),
    "too many in flight": (warm_up, "1f1b: rank 0 holds up to 4 micro-batches"),
    "slow": (slow, "1f1b on 2 ranks: span bubble 12 at T_F, T_B, T_W = 1, 1, 1"),
    "other axis": (
        lambda f: f.case.mesh.update(pipe=3),
        "a schedule for 2 ranks, the pipe axis has 3",
    ),
    "not the user's order": (
        lambda f: f.case.options.update(schedule={"orders": [["F0@0"], ["F0@1"]]}),
        "claims another order than that of the option 'schedule'",
    ),
}


@pytest.mark.parametrize("fault", IN_THE_CLAIM)
def test_a_fault_of_the_claim_is_told(fault: str) -> None:
    change, wanted = IN_THE_CLAIM[fault]
    assert wanted in failure(change)


def test_what_cannot_be_judged_does_not_pass() -> None:
    outcome = check.decide(figures(schedules={}))
    assert outcome.status == "skip"
    assert "no schedule is claimed" in outcome.message
    quiet = figures()
    quiet.case.ledgers = False
    assert check.decide(quiet).status == "skip"
    elsewhere = figures()
    elsewhere.case.mesh = {"replicate": 2}
    assert check.decide(elsewhere).status == "skip"


def test_messages_under_way_may_be_held_beside() -> None:
    """A message that nobody has waited for yet is memory, as long as it is under way."""
    found = figures()
    peak(found, 0, 600)
    assert check.decide(found).status == "fail"
    record = found.records[0]
    issued = record.steps[1].events[0] + 9
    share = Fraction(500)
    sent = LoggedCall(0, "send", (0, 1), "pipe", "float32", 500, share, "forward", False, 0, issued)
    record.traffic = [sent]
    record.steps[1].calls = (0, 1)
    assert check.decide(found).status == "pass"


# ------------------------------------------------------------------------------ before any rank


class Claims(Implementation):
    """Claims what a test tells it to; nothing of it is ever run."""

    strategy = "pipeline"
    claim: Callable[[int, int], Any]

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        return Capabilities(axes=("pipe",))

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Any:
        return cls.claim(ranks, micro_batches)

    def setup(self, *arguments: Any) -> None:
        raise AssertionError("set up")

    def step(self, *arguments: Any) -> Any:
        raise AssertionError("stepped")

    def local_state(self, kind: Any) -> Any:
        raise AssertionError("asked")


def judged(
    claim: Callable[[int, int], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    pipe: int = 2,
    **more: Any,
) -> CaseResult:
    """The result of a case whose ranks must not be started."""

    class Starts(RankHost):
        def run(self, launch: RankLaunch) -> Any:
            raise AssertionError("ranks were started")

    monkeypatch.setattr(Claims, "claim", staticmethod(claim), raising=False)
    monkeypatch.setattr(registry, "load", lambda name: Claims)
    case = Case(
        id="claims",
        scenario="claims",
        implementation="claims",
        backend="in_memory",
        mesh={"pipe": pipe},
        workload=WorkloadSpec("charnames_gpt", micro_batches=4),
        optimizer=OptimizerSpec(),
        lane="fp64",
        checks=("equivalence", "schedule"),
        options={"schedule": "1f1b"},
        **more,
    )
    account, result = judge_case(case, tmp_path, tmp_path, Starts())
    again = decide_case(Account.from_dict(account.to_dict()))
    assert (again.verdict, again.reason) == (result.verdict, result.reason)
    return result


def unsound(ranks: int, micro_batches: int) -> Schedule:
    sound = SCHEDULES["1f1b"](ranks, micro_batches)
    return replace(sound, orders=(sound.orders[0][:-1], *sound.orders[1:]))


def test_an_unsound_schedule_is_never_run(monkeypatch: Any, tmp_path: Path) -> None:
    result = judged(unsound, monkeypatch, tmp_path)
    assert result.verdict == "fail"
    assert result.reason == "schedule: window of 4: rank 0 never does BW3@0 (not run)"


def test_a_bad_option_is_refused_in_words(monkeypatch: Any, tmp_path: Path) -> None:
    def claim(ranks: int, micro_batches: int) -> Any:
        raise Refused("option 'schedule': rank 0 never does BW3@0")

    result = judged(claim, monkeypatch, tmp_path)
    assert (result.verdict, result.reason) == (
        "refused",
        "option 'schedule': rank 0 never does BW3@0",
    )


def test_a_mesh_that_suits_no_schedule_is_refused_in_words(
    monkeypatch: Any, tmp_path: Path
) -> None:
    def claim(ranks: int, micro_batches: int) -> Any:
        raise Refused(f"at least as many micro-batches as stages, not {micro_batches} for {ranks}")

    result = judged(claim, monkeypatch, tmp_path, pipe=3)
    told = "at least as many micro-batches as stages, not 4 for 3"
    assert (result.verdict, result.reason) == ("refused", told)
    expected = {"expect": {"refuses": "as many micro-batches"}}
    assert judged(claim, monkeypatch, tmp_path, 3, **expected).verdict == "pass"


def test_more_stages_than_units_are_refused(monkeypatch: Any, tmp_path: Path) -> None:
    result = judged(SCHEDULES["1f1b"], monkeypatch, tmp_path, pipe=4)
    assert result.verdict == "refused"
    assert "asks for 4 stages, but charnames_gpt has 3 units" in result.reason
    expected = {"expect": {"refuses": "has 3 units"}}
    assert judged(lambda r, m: None, monkeypatch, tmp_path, 4, **expected).verdict == "pass"


@pytest.mark.parametrize(
    ("claim", "verdict", "told"),
    [
        (lambda ranks, size: "1f1b", "fail", "returned a str, not a Schedule"),
        (lambda ranks, size: 1 // 0, "crash", "raised ZeroDivisionError"),
        (lambda ranks, size: SCHEDULES["1f1b"](ranks, 3), "fail", "has 3 micro-batches, not"),
    ],
)
def test_a_claim_that_is_none_is_told(
    claim: Any, verdict: str, told: str, monkeypatch: Any, tmp_path: Path
) -> None:
    result = judged(claim, monkeypatch, tmp_path)
    assert result.verdict == verdict
    assert told in result.reason
