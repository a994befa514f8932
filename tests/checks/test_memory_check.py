"""The checks of a sharded system's cost fail on every fault planted in records made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_case import made_case
from test_costs import plan

from shardproof import checks, strategies
from shardproof.case import WorkloadSpec
from shardproof.cases import leader
from shardproof.cases.runner import run_cases
from shardproof.checks import Outcome, active, memory, overlap, traffic
from shardproof.checks.memory import growth
from shardproof.checks.results import CaseResult
from shardproof.costs import CostModel, NoCostModel, cost_model_class
from shardproof.costs.expression import CaseFacts
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import RankRecord, StepRecord, WorkloadFacts
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.memory.summary import MemoryRow, summary
from shardproof.ledgers.traffic import LoggedCall
from shardproof.registry.declaration import Declaration
from shardproof.report.memory import MEASURED, with_figures

STEPS = 3
POINTS = ("gradients_final", "after_update")


def weigh(cost_model: CostModel, rank: int) -> list[MemoryRow]:
    """The rows of a rank that holds what is promised."""
    rows = []
    for step in range(STEPS):
        for point in POINTS:
            updated = step if point == "after_update" else step - 1
            for kind, size in cost_model.resident(rank, step, updated).items():
                rows.append(row("mark", step, point, kind, size))
        for phase in ("forward", "backward"):
            for kind, bound in cost_model.peaks(rank, phase, step).items():
                rows.append(row("peak", step, phase, kind, bound.low))
    return rows


def row(moment: str, step: int, where: str, kind: str, size: int) -> MemoryRow:
    return MemoryRow(moment, step, where, "cpu", kind, size)


def change(rows: list[MemoryRow], one: MemoryRow, **fields: Any) -> MemoryRow:
    """``one`` of ``rows`` with other ``fields``."""
    rows[rows.index(one)] = changed = replace(one, **fields)
    return changed


def calls(cost_model: CostModel, world: int) -> list[list[LoggedCall]]:
    """Calls of one step on each rank as promised: gathers fly while their unit begins."""
    ranks: list[list[LoggedCall]] = [[] for _ in range(world)]
    gathers = [int(cost_model.strategy == "fsdp")] * world  # its root is gathered once
    for flow in cost_model.flows():
        assert isinstance(flow.calls, int)
        for rank in range(world):
            for _ in range(flow.calls // world):
                share = flow.bytes / flow.calls
                phase, issued, waited = "backward", 1, 900
                if flow.operation == "all_gather":
                    unit, way = divmod(gathers[rank], 2)
                    gathers[rank] += 1
                    begins = 100 * (way + 1) + 10 * unit
                    issued = begins - 1 if unit else begins + 1  # the root has nothing before it
                    phase, waited = ("forward", "backward")[way], issued + 2
                ranks[rank].append(
                    LoggedCall(
                        sequence=0,
                        operation=flow.operation,
                        group=tuple(range(world)),
                        axis="world",
                        dtype="float32",
                        payload_bytes=0,
                        logical_bytes=share,
                        phase=phase,
                        inside_backward=True,
                        units_before=0,
                        issued=issued,
                        waited=waited,
                    )
                )
    return ranks


class MadeFigures(SimpleNamespace):
    """What checks ask, made by hand; how deep is told as of any figures."""

    own_costs = None
    updated_before = -1
    depth, cost_model, family = Figures.depth, Figures.cost_model, Figures.family
    ranks = Figures.ranks


def figures(strategy: str = "zero3", world: int = 2, **more: Any) -> Any:
    cost_model = cost_model_class(strategy)(
        plan(strategy, world, steps=STEPS, micro_batches=(1,) * world, **more)
    )
    units = [
        (100 * way + 10 * number, phase, unit)
        for way, phase in enumerate(("forward", "backward"), 1)
        for number, unit in enumerate(("", *cost_model.facts.units))
    ]
    declaration = Declaration(
        strategy=strategy, backends=("in_memory",), features=strategies.of(strategy).profile
    )
    records = []
    for rank, sent in enumerate(calls(cost_model, world)):
        local = cost_model.local(rank)
        held = {
            "gradients_final": {"gradients": dict(local.gradients)},
            "after_update": {
                "parameters": dict(local.parameters),
                "optimizer": dict(local.optimizer),
            },
        }
        step = StepRecord(
            0,
            rank,
            0.0,
            None,
            observed={point: {} for point in POINTS},
            held=held,
            calls=(0, len(sent)),
            events=(0, 1000),
        )
        records.append(
            RankRecord(
                rank,
                2,
                declaration,
                memory=weigh(cost_model, rank),
                traffic=sent,
                events=units,
                steps=[replace(step) for _ in range(STEPS)],
            )
        )
    case = SimpleNamespace(
        ledgers=True,
        backend="in_memory",
        checks=("memory",),
        changes_members=False,
        expect={},
        precision={},
        options={},
        depth="",
        dtype="float32",
        mesh=cost_model.facts.axes,
        world=world,
    )
    names = [t.name for t in cost_model.facts.parameters]
    return MadeFigures(
        case=case,
        declaration=declaration,
        facts=CaseFacts({}, cost_model.facts),
        model_facts=cost_model.facts,
        steps=range(STEPS),
        records=records,
        compared={},
        workload=WorkloadFacts({}, names, names, unused_possible=False, traits=[]),
        tensors=[SimpleNamespace(point="initial", kind="parameters", name=name) for name in names],
    )


Check = Callable[[Any], Outcome]
CHECKS: list[Check] = [memory.decide, traffic.decide, active.decide, overlap.decide]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_promised_passes(strategy: str, world: int) -> None:
    for decide in CHECKS:
        outcome = decide(figures(strategy, world))
        assert outcome.status in ("pass", "skip"), outcome.message
    assert memory.decide(figures(strategy, world)).status == "pass"
    assert traffic.decide(figures(strategy, world)).status == "pass"


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer_state", "masters"])
@pytest.mark.parametrize("amount", [1, -1])
def test_one_byte_more_or_less_of_any_class_fails(kind: str, amount: int) -> None:
    policy = {"precision": {"parameters": "bfloat16"}}
    found = figures("zero1", options=policy)
    rows = found.records[1].memory
    wrong = next(
        r for r in rows if r.kind == kind and r.moment == "mark" and r.step == 2 and r.bytes
    )
    wrong = change(rows, wrong, bytes=wrong.bytes + amount)
    outcome = memory.decide(found)
    assert outcome.status == "fail"
    for told in (f"rank 1, step 2, {wrong.where}: {kind}", f"{wrong.bytes:,} bytes held"):
        assert told in outcome.message
    assert f"{wrong.bytes - amount:,} promised (zero1, A16)" in outcome.message


def test_bytes_of_a_host_tier_do_not_count_on_the_device() -> None:
    found = figures("zero1")
    rows = found.records[0].memory
    rows[:] = [replace(r, device="file") if r.kind == "optimizer_state" else r for r in rows]
    outcome = memory.decide(found)
    assert outcome.status == "fail"
    assert "optimizer_state: 0 bytes held" in outcome.message


@pytest.mark.parametrize(("amount", "bad"), [(0, False), (-1, True), (10**6, True)])
def test_peaks_are_bounded_on_both_sides(amount: int, bad: bool) -> None:
    found = figures("zero3")
    peak = next(
        r
        for r in found.records[0].memory
        if (r.moment, r.where, r.kind) == ("peak", "backward", "parameters")
    )
    change(found.records[0].memory, peak, bytes=peak.bytes + amount)
    outcome = memory.decide(found)
    assert (outcome.status == "fail") == bad
    if bad:
        assert "backward: parameters" in outcome.message
        assert "at the peak" in outcome.message


def test_memory_says_why_it_does_not_judge() -> None:
    found = figures()
    found.case.backend = "gloo"
    assert "in_memory" in checks.decide("memory", found).message
    found.declaration = replace(found.declaration, backends=("gloo",))
    assert checks.decide("memory", found).status == "pass"
    found.declaration = replace(found.declaration, strategy="of_its_own")
    assert checks.decide("memory", found).status == "skip"


def test_a_skipped_update_makes_no_state() -> None:
    found = figures("zero1")
    for record in found.records:
        record.steps[0].metrics = {"skipped": 1.0}
    assert "step 0, after_update: optimizer_state" in memory.decide(found).message
    for record in found.records:
        for one in [row for row in record.memory if row.kind == "optimizer_state"]:
            if one.step == 0 or (one.step, one.where) == (1, "gradients_final"):
                change(record.memory, one, bytes=0)
    assert memory.decide(found).status == "pass"


def test_accounting_and_ratios_are_among_the_figures() -> None:
    told = memory.decide(figures("zero1")).figures
    assert told["accounting"] == "A32"
    assert told["ratio_limit"] == "2"
    assert told["ratio_theory"] == "4/3"
    assert told["ratio_measured"] == told["ratio_promised"]
    assert Fraction(told["bytes_whole"], told["bytes_held"]) == Fraction(told["ratio_measured"])


def test_held_and_promised_bytes_stand_side_by_side() -> None:
    found = figures("zero3")
    told = memory.decide(found).figures
    for rank, tiers in told["promised"].items():
        held = told["resident"][rank]["device"]
        assert tiers["device"] == {kind: held[kind] for kind in tiers["device"]} != {}
    moved = traffic.decide(found).figures
    assert {row["operation"]: row["bytes"] for row in moved["sent"]} == {
        operation: str(sum(int(r["bytes"]) for r in moved["flows"] if r["operation"] == operation))
        for operation in {row["operation"] for row in moved["flows"]}
    }


def test_a_table_tells_no_ratio_where_nothing_is_held() -> None:
    told = memory.decide(figures("zero1")).figures
    whole = {"bytes_held": 0, "ratio_measured": str(told["bytes_whole"])}
    case = made_case("x", {"shard": 2})
    results = [
        CaseResult("c", case, "pass", checks=[Outcome("memory", "pass", figures=told | changed)])
        for changed in ({}, whole)
    ]
    cells = sorted(row[MEASURED] for row, _ in with_figures(results))
    assert cells[1] == "nothing held" and cells[0].endswith("x")


def test_traffic_names_the_axis_and_the_call() -> None:
    found = figures("zero3")
    lost = found.records[0].traffic.pop()
    for step in found.records[0].steps:
        step.calls = (0, len(found.records[0].traffic))
    outcome = traffic.decide(found)
    assert outcome.status == "fail"
    assert f"axis shard, {lost.operation}" in outcome.message


def test_there_is_no_ratio_where_the_textbook_promises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(_: Any) -> Any:
        raise NoCostModel("not here")

    found = figures("zero3")
    monkeypatch.setattr(cost_model_class("zero3"), "textbook", "zero1")
    assert traffic.decide(found).figures["textbook"] == "zero1"
    monkeypatch.setattr(cost_model_class("zero1"), "payload", silent)
    outcome = traffic.decide(found)
    assert outcome.status == "pass" and "textbook" not in outcome.figures


def test_the_same_bytes_in_more_calls_fail() -> None:
    found = figures("zero3")
    for record in found.records:
        first = record.traffic[0]
        first.logical_bytes /= 2
        record.traffic.append(replace(first))
        for step in record.steps:
            step.calls = (0, len(record.traffic))
    outcome = traffic.decide(found)
    assert outcome.status == "fail"
    assert "calls over all ranks, zero3 promises" in outcome.message


def test_axes_are_told_from_ranks() -> None:
    mesh = {"replicate": 2, "shard": 4}
    assert traffic.axis_of([0, 1, 2, 3], mesh) == "shard"
    assert traffic.axis_of([4, 5], mesh) == "shard"
    assert traffic.axis_of([1, 5], mesh) == "replicate"
    assert traffic.axis_of(range(8), mesh) == "replicate+shard"
    assert traffic.axis_of([3], mesh) == ""


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
def test_a_whole_where_a_shard_is_promised_fails(kind: str) -> None:
    found = figures("zero3")
    point = "gradients_final" if kind == "gradients" else "after_update"
    step = found.records[1].steps[-1]
    kinds = step.held[point]
    step.held = step.held | {point: kinds | {kind: kinds[kind] | {"head.w": 7}}}
    outcome = active.decide(found)
    assert outcome.status == "fail"
    assert f"7 elements of the {kind} of 'head.w', zero3 promises" in outcome.message


def test_no_prefetch_fails() -> None:
    found = figures("zero3")
    assert overlap.decide(found).status == "pass", overlap.decide(found).message
    for record in found.records:
        for call in record.traffic:
            if call.operation == "all_gather":
                call.waited = call.issued + 1
    outcome = overlap.decide(found)
    assert outcome.status == "fail"
    assert "0 gathers are issued while another unit computes, 4 promised" in outcome.message


@pytest.mark.parametrize(
    ("ranks", "status"), [([], "fail"), ([1], "pass"), ([0, 1], "precondition")]
)
def test_a_rank_that_computes_for_the_first_time_has_no_order(
    ranks: list[int], status: str
) -> None:
    """Where shares rotate that may be after the steps that are left out for all."""
    found = figures("zero3")
    for call in found.records[1].traffic:
        if (call.operation, call.phase) == ("all_gather", "forward"):
            call.waited = call.issued + 1
    for rank in ranks:
        for step in found.records[rank].steps[: overlap.SETTLING]:
            step.events = (1000, 1000)
    outcome = overlap.decide(found)
    assert outcome.status == status, outcome.message


def test_another_depth_of_prefetch_fails() -> None:
    found = figures("zero3")
    for call in found.records[1].traffic:
        if (call.operation, call.phase) == ("all_gather", "forward"):
            call.issued = 101
    outcome = overlap.decide(found)
    assert outcome.status == "fail"
    told = (
        "rank 1, step 2: when a unit's forward begins at most 2 gathers are under way, 1 promised"
    )
    assert told in outcome.message


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp"])
def test_whole_gradients_beside_those_in_flight_fail(strategy: str) -> None:
    found = figures(strategy)
    cost_model = cost_model_class(strategy)(found.facts.model_facts)
    peak = next(
        r
        for r in found.records[0].memory
        if (r.moment, r.where, r.kind) == ("peak", "backward", "communication")
    )
    most = cost_model.peaks(0, "backward", 0)["communication"].high
    peak = change(found.records[0].memory, peak, bytes=most)
    assert memory.decide(found).status == "pass"
    change(found.records[0].memory, peak, bytes=most + 1)
    assert "backward: communication" in memory.decide(found).message


def test_a_ledger_leaves_rows_at_marks_and_peaks() -> None:
    phase = ["setup"]
    with MemoryLedger(lambda: phase[0]) as ledger:
        module = torch.nn.Linear(4, 4, bias=False)
        ledger.step, phase[0] = 0, "forward"
        big = torch.zeros(100)
        del big
        phase[0] = "observe"
        ledger.classify(modules=[module])
        ledger.mark("gradients_final")
    rows = summary(ledger.log)
    marks = {(r.where, r.kind): r.bytes for r in rows if r.moment == "mark"}
    peaks = {(r.where, r.kind): r.bytes for r in rows if r.moment == "peak"}
    assert marks["gradients_final", "parameters"] == 64
    assert peaks["forward", "all"] == 64 + 400
    assert peaks["forward", "temporary"] == 400
    assert ledger.log.peak("forward", 0).bytes == 464


def test_what_rests_beside_state_does_not_grow_with_the_world(tmp_path: Path) -> None:
    """The mesh is the suite's: four bytes a rank, which ZeRO-3 at 52 ranks failed by."""
    resting = {}
    for world in (2, 5):
        own = made_case("reference/zero3", {"shard": world}, checks=("memory",), steps=1)
        folder = tmp_path / str(world)
        folder.mkdir()
        account, result = leader.judge_case(own, folder, tmp_path / "oracles")
        assert result.verdict == "pass", result.reason
        assert account.figures is not None
        resting[world] = {
            (row.where, row.kind, row.bytes)
            for record in account.figures.records
            for row in record.memory
            if row.moment == "mark" and row.kind in ("activations", "temporary")
        }
    assert resting[2] and resting[2] == resting[5]


def test_sums_of_a_round_arrive_beside_totals_on_their_way_to_the_host() -> None:
    """Where blocks are small and the root is large, most lies there between two rounds."""
    case = made_case(
        "reference/zero3",
        {"shard": 5},
        workload=WorkloadSpec("digits_cnn", global_batch=12, micro_batches=3, windows=2),
        options={"recompute_every": 2, "offload": "parameters"},
        dtype="float64",
        lane="fp64",
        checks=("memory",),
    )
    (result,), _ = run_cases([case], 1, lambda result: None)
    assert [outcome.status for outcome in result.checks] == ["pass"], result.reason


@pytest.mark.parametrize("trait", ["conditional_early_step", "conditional_late_step"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_bucket_of_one_parameter_that_some_steps_leave_out(strategy: str, trait: str) -> None:
    sizes = {"width": 32, "heads": 4, "seq": 8, "layers": 1}
    case = made_case(
        f"reference/{strategy}",
        {"shard": 2},
        workload=WorkloadSpec("charnames_gpt", (trait,), global_batch=4, params=sizes),
        options={"bucket_bytes": 4096},
        checks=("memory",),
    )
    (result,), _ = run_cases([case], 1, lambda result: None)
    assert [outcome.status for outcome in result.checks] == ["pass"], result.reason


def test_a_single_unit_has_nothing_to_overlap_with() -> None:
    """Reductions of one round can leave before another unit's backward only if there is one."""
    usual = WorkloadSpec("charnames_gpt", global_batch=12, params={"layers": 1, "width": 16})
    options = {"sharding_strategy": "HYBRID_SHARD", "accumulate_without_communication": True}
    case = made_case(
        "reference/fsdp",
        {"replicate": 2, "shard": 2},
        workload=usual,
        options=options,
        checks=("overlap",),
    )
    (result,), _ = run_cases([case], 1, lambda result: None)
    assert [outcome.status for outcome in result.checks] == ["pass"], result.reason


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_reductions_that_all_leave_in_the_last_unit_fail(strategy: str) -> None:
    """Unless it is the only one: a head that is tied to the other end leaves nothing before it."""
    found = figures(strategy)
    found.declaration = replace(found.declaration, features=frozenset(["overlap"]))
    for record in found.records:
        last = max(number for number, phase, _ in record.events if phase == "backward")
        reductions = [c for c in record.traffic if c.operation in overlap.REDUCTIONS]
        more = [replace(call) for call in reductions * 3]
        record.traffic += more
        for call in (*reductions, *more):
            call.issued, call.waited, call.phase = last + 1, last + 50, "backward"
        record.steps = [replace(s, calls=(0, len(record.traffic))) for s in record.steps]
    outcome = overlap.decide(found)
    assert outcome.status == "fail"
    told = "reductions starts before the last unit begins its backward"
    assert told in outcome.message
    for record in found.records:
        units = [event for event in record.events if event[1] == "backward" and event[2]]
        record.events = [event for event in record.events if event not in units[:-1]]
    assert told not in overlap.decide(found).message


@pytest.mark.parametrize(
    ("gradients", "kept", "leaks"),
    [
        ((9_000, 9_000, 9_000), (0, 2_000, 4_000), True),
        # A parameter that is used in the first steps only: its part of the bucket is unclaimed.
        ((9_000, 7_000, 5_000), (0, 2_000, 4_000), False),
        ((9_000, 8_500, 8_500), (0, 2_000, 4_000), True),
        ((5_000, 7_000, 9_000), (0, 2_000, 4_000), True),
        ((9_000, 9_000, 9_000), (0, 2_000, 2_000), False),
    ],
)
def test_memory_that_only_changes_its_class_does_not_grow(
    gradients: tuple[int, ...], kept: tuple[int, ...], leaks: bool
) -> None:
    rows = [
        SimpleNamespace(step=step, moment="mark", where="after_update", kind=kind, bytes=size)
        for kind, sizes in (("gradients", gradients), ("temporary", kept))
        for step, size in enumerate(sizes)
    ]
    record: Any = SimpleNamespace(rank=0, memory=rows, steps=[SimpleNamespace(windows=(1,))] * 3)
    evidence: Any = SimpleNamespace(
        steps=range(3),
        workload=SimpleNamespace(parameter_names=("w",)),
        case=SimpleNamespace(world=2),
    )
    said = growth.problem(evidence, record)
    assert bool(said) == leaks
