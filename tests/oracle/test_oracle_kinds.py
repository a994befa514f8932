"""Oracles for systems that are not plain training: emulated losses, replayed histories."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.contract import Event, OptimizerSpec
from shardproof.oracle.replay import replay, truth
from shardproof.workloads import make

SMALL = WorkloadSpec("charnames_gpt", global_batch=8, params={"layers": 1, "width": 16, "seq": 8})


def case(system: str, world: int, **values: object) -> Case:
    return made_case(
        system,
        {"replicate": world},
        id=f"{system}::{world}::{sorted(values)}",
        workload=SMALL,
        checks=("equivalence", "replicas"),
        **values,
    )


def test_losses_are_judged_by_their_emulation() -> None:
    cases = [
        case("tests.support.oracle_systems:HalfDDP", 3),
        case("tests.support.oracle_systems:ForgetfulHalfDDP", 3),
        case("tests.support.oracle_systems:HonestPlainHalfDDP", 3),
    ]
    results, _ = run_cases(cases, 2, lambda result: None)
    verdicts = {r.case.implementation.split(":")[1]: r for r in results}
    assert verdicts["HalfDDP"].verdict == "pass", verdicts["HalfDDP"].reason
    forgetful = verdicts["ForgetfulHalfDDP"]
    assert forgetful.verdict == "fail"
    assert "step 1" in forgetful.reason  # step 0 has nothing to forget yet
    plain = verdicts["HonestPlainHalfDDP"]
    assert plain.verdict == "fail"
    assert "step 0" in plain.reason


def test_what_one_device_cannot_compute_is_no_fault_of_the_judge() -> None:
    """A system may leave norms out of a policy that casts weights."""
    normed = {
        "lane": "working_precision",
        "dtype": "float32",
        "workload": WorkloadSpec("digits_cnn"),
    }
    cases = [
        replace(case("reference/naive_ddp", 2, precision=policy), id=f"torn {policy}", **normed)
        for policy in ({"parameters": "bfloat16"}, {"reduce": "float32"})
    ]
    (first, second), _ = run_cases(cases, 1, lambda result: None)
    assert first.verdict == "precondition"
    assert "set precision.buffers = bfloat16" in first.reason
    assert second.verdict == "pass (working precision only)", second.reason


def events() -> list[Event]:
    """Two workers, two steps; the second worker is always one update behind."""
    return [Event(0, 0, 0, 0), Event(1, 1, 0, 0), Event(2, 0, 1, 1), Event(3, 1, 1, 2)]


def test_a_replay_depends_on_order_and_versions() -> None:
    item, spec = make(SMALL), OptimizerSpec(momentum=0.0)
    versions = replay(item, spec, 2, events())
    assert len(versions) == 5
    fresh = [Event(e.order, e.worker, e.step, e.order) for e in events()]
    other = replay(item, spec, 2, fresh)[-1]
    gap = max(float((other[n] - value).abs().max()) for n, value in versions[-1].items())
    assert gap > 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        [Event(1, 0, 0, 0)],
        [Event(0, 0, 0, 1)],
        [Event(0, 2, 0, 0)],
        [Event(0, 0, 0, 0), Event(1, 0, 0, 0)],
    ],
    ids=["gap", "future", "worker", "twice"],
)
def test_events_that_are_no_history_are_named(wrong: list[Event]) -> None:
    with pytest.raises(ValueError, match="is impossible"):
        replay(make(SMALL), OptimizerSpec(), 2, wrong)


def test_a_history_with_holes_is_a_problem() -> None:
    found = truth(make(SMALL), OptimizerSpec(), [2, 2], events()[:3])
    assert found.problem == "the system reported 3 updates, expected 4"
