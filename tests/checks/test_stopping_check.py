"""The check of stopping: the sound pass under any rule and world, and every fault is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from local_ranks import succeed

from shardproof import registry
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kills import pair
from shardproof.cases.kinds.votes import check as stopping
from shardproof.cases.kinds.votes import workload as votes
from shardproof.cases.kinds.votes.rank_program import VotingProgram
from shardproof.cases.runner import run_cases
from shardproof.checks import Outcome
from shardproof.contract import OptimizerSpec, StopRule
from shardproof.errors import ScenarioError
from shardproof.evidence.records import RankRecord, Voted
from shardproof.scenarios.load import find, load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from shardproof.workloads import WorkloadError

pytestmark = pytest.mark.usefixtures("one_thread")


def case(world: int, **knobs: Any) -> Case:
    return Case(
        id=f"stopping::{world}",
        scenario="stopping",
        implementation="reference/stopping",
        backend="in_memory",
        mesh={"replicate": world},
        workload=WorkloadSpec("votes", params=knobs),
        optimizer=OptimizerSpec(),
        lane="bitwise",
        checks=("stopping",),
        steps=0,
    )


def judged(of: Case, spoil: Callable[[list[RankRecord]], None] = lambda records: None) -> Outcome:
    told = succeed(lambda rank, world: VotingProgram(of)(rank, world), of.world)
    records = [RankRecord.from_dict(record) for record in told]
    spoil(records)
    evidence: Any = SimpleNamespace(case=of, records=records, compared={})
    evidence.compared["stopping"] = stopping.measure(evidence)
    return stopping.decide(evidence)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "knobs",
    [
        {"patience": 3, "min_delta": 2, "not_finite": "count", "asks": True},
        {"patience": 0, "target": 8, "budget": 7, "best": "highest", "not_finite": "stop"},
        {"without_data": True, "not_finite": "count", "seed": 3},
    ],
)
def test_the_reference_passes(world: int, knobs: dict[str, Any]) -> None:
    seed = {key: value for key, value in knobs.items() if key == "seed"}
    of = case(world, **{key: value for key, value in knobs.items() if key != "seed"}, scripts=9)
    outcome = judged(replace(of, workload=replace(of.workload, **seed)))
    assert outcome.status == "pass", outcome.message


FAULTS = [name for name in registry.mutant_names() if "/stopping_" in name]


def test_there_are_faults_of_every_part() -> None:
    assert len(FAULTS) >= 12


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_and_its_parent_passes(name: str) -> None:
    fault = registry.load_mutant(name)
    both = pair(fault)
    outcome = judged(both.case)
    assert outcome.status == "fail" and re.search(fault.says, outcome.message), outcome.message
    assert parents_pass(both.parent)


@cache
def _passes(knobs: str) -> bool:
    """Whether the reference passes a case of three ranks; several faults share one."""
    return judged(case(3, **json.loads(knobs))).status == "pass"


def parents_pass(of: Case) -> bool:
    assert (of.implementation, of.world) == ("reference/stopping", 3)
    return _passes(json.dumps(dict(of.workload.params)))


def test_ranks_that_all_do_the_same_wrong_thing_are_compared_with_the_rule() -> None:
    def all_go_on(records: list[RankRecord]) -> None:
        for record in records:
            record.voted = [replace(voted, ends=False) for voted in record.voted]

    outcome = judged(case(2, scripts=3), all_go_on)
    assert outcome.status == "fail"
    assert re.match(r"script 0: all ranks continue after vote \d+", outcome.message)


def test_a_wrong_metric_that_all_are_told_is_compared_with_all_data() -> None:
    def spoil(records: list[RankRecord]) -> None:
        for record in records:
            record.voted = [replace(voted, metric=voted.metric + 0.25) for voted in record.voted]

    outcome = judged(case(2, scripts=3), spoil)
    assert outcome.status == "fail"
    what = r"script 0: all ranks receive the metric [\d.]+ at vote 0, over all data it is [\d.]+"
    assert re.match(what, outcome.message), outcome.message


def test_scripts_that_tell_nothing_decide_nothing() -> None:
    """One vote is the best one, whoever decides."""
    outcome = judged(case(2, scripts=3, votes=1, patience=2))
    assert outcome.status == "undecidable"
    assert outcome.figures["not_tested"] == ["script 0", "script 1", "script 2"]


def test_nobody_voted() -> None:
    def forget(records: list[RankRecord]) -> None:
        for record in records:
            record.voted = []

    assert judged(case(1, scripts=1), forget).status == "skip"


def test_the_rule_by_hand() -> None:
    numbers = [3.0, 2.0, 2.0, 2.5, 1.0]
    script = [[votes.Cast(number, 1.0)] for number in numbers]
    told = [(r.ends, r.best) for r in stopping.rulings(StopRule(patience=2), script)]
    assert told == [(False, 0), (False, 1), (False, 1), (True, 1)]
    told = [(r.ends, r.best) for r in stopping.rulings(StopRule(target=1.0), script)]
    assert told[-1] == (True, 4) and len(told) == 5


def test_knobs_that_end_nothing_are_refused() -> None:
    with pytest.raises(WorkloadError, match="nothing ends training; set one of these keys"):
        votes.resolve(WorkloadSpec("votes", params={"patience": 0}))
    with pytest.raises(WorkloadError, match="must be one of 'none', 'count', 'stop'"):
        votes.resolve(WorkloadSpec("votes", params={"not_finite": "ignore"}))


SCENARIO = """
name: mine
about: stops
sees: what stops
workload: {{name: votes}}
matrix:
  implementation: reference/stopping
  backend: in_memory
  mesh: {{replicate: 2}}
  lane: bitwise
checks: {checks}
"""


def test_a_rank_that_dies_in_a_vote_ends_the_case_in_the_sentence_that_names_it() -> None:
    plans = [case for file in find(["faults-stopping"]) for case in expand(file, installed())]
    dies = ("raise", "kill")
    quick = [c for c in plans if c.tier == "quick" and c.fault and c.fault.kind in dies]
    results, _ = run_cases(quick, 1, lambda result: None)
    assert {(r.case.backend, r.case.fault and r.case.fault.kind, r.verdict) for r in results} == {
        ("in_memory", "raise", "pass"),
        ("gloo", "kill", "pass"),
    }


def test_faults_may_be_planned_beside_votes_and_no_other_check() -> None:
    def cases(checks: str, more: str = "") -> Any:
        return expand(load_text(SCENARIO.format(checks=checks) + more, "mine.yaml"), installed())

    plan = """
faults:
  - {kind: raise, rank: 1, step: 1, phase: forward, expect: {verdict: crash, rank: 1}}
"""
    (planned,) = cases("[stopping, faults]", plan)
    assert planned.fault is not None and planned.steps == 0
    with pytest.raises(ScenarioError, match="belong together"):
        cases("[stopping, replicas]")
    assert Voted.from_dict(Voted(0, 1, True, None, 2.5).to_dict()) == Voted(0, 1, True, None, 2.5)
