"""The suite can fail: planted faults are killed, and a survivor is reported as one.

Here one fault a file and a killer is planted; ``make mutants`` plants all of them.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof import registry
from shardproof.case import Case
from shardproof.cases import kills as kill_matrix
from shardproof.cases.kills import (
    VERDICT_KILLERS,
    judge_kill,
    kinds,
    pair,
    run_mutants,
    why_not_killed,
)
from shardproof.cases.runner import Course
from shardproof.checks import COSTLY, GENERAL, OF_UNTRAINED, Outcome, Worst
from shardproof.checks.results import CaseResult, Kill
from shardproof.commands.execution import Planting
from shardproof.commands.verify import verify
from shardproof.runs.run_folder import RunFolder, read

#: Other kernels than those that torch and MKL choose for a machine.
KERNELS = (
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
)


@functools.cache
def representatives() -> list[kill_matrix.PlantedPair]:
    """Faults of each file of faults and of each check or verdict that kills, few and small.

    Of equal use are rather those whose parent's case is judged already.  Memory is weighed where a
    kill may need it, as by ``make bench``; ``make mutants`` weighs all.
    """
    faults = {name: registry.load_mutant(name) for name in registry.mutant_names()}
    shown = {n: {fault.implementation.__module__, *fault.killed_by} for n, fault in faults.items()}
    pairs = {name: pair(fault, weigh_all=False) for name, fault in faults.items()}
    wanted, judged = set[str]().union(*shown.values()), set[str]()
    chosen: list[kill_matrix.PlantedPair] = []
    while wanted:
        best = max(
            faults,
            key=lambda name: (
                len(shown[name] & wanted),
                pairs[name].parent.id in judged,
                -pairs[name].case.world * pairs[name].case.steps,
            ),
        )
        wanted -= shown[best]
        judged.add(pairs[best].parent.id)
        chosen.append(pairs[best])
    return chosen


@pytest.mark.timeout(600)
def test_planted_faults_are_killed_beside_passing_parents() -> None:
    kills = run_mutants(representatives(), 1, lambda result: None)
    assert len(kills) >= 20
    assert not {kill.name: kill.why_not for kill in kills if not kill.killed}
    # No sentence names another cause than the fault that was planted.
    assert not {kill.name: kill.reason for kill in kills if kill.told == "wrong"}
    assert sum(kill.told == "exact" for kill in kills) >= 0.85 * len(kills)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [{}, *KERNELS], ids=lambda told: "-".join(told.values()))
def test_faults_of_layout_and_last_bits_die_whatever_the_cpu(
    tmp_path: Path, kernels: dict[str, str]
) -> None:
    command = ["mutants", "-j", "2", "--results", str(tmp_path / "run")]
    for fault in ("zero1_makes_contiguous", "zero1_averages_then_multiplies"):
        command += ["--impl", fault]
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", *command],
        env={**os.environ, **kernels},
        capture_output=True,
        text=True,
    )
    assert "2 faults judged (2 killed, 0 survive)" in done.stdout, done.stdout + done.stderr


def test_at_depth_family_any_failing_check_kills_and_a_share_may_survive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [
        registry.load_mutant(name)
        for name in ("ddp_divides_by_world", "ddp_never_reduces", "zero1_all_reduces")
    ]
    for fault in faults:
        here, there = pair(fault), pair(fault, depth="family")
        assert there.case.depth == there.parent.depth == "family"
        assert {here.case.id, here.parent.id}.isdisjoint({there.case.id, there.parent.id})
    with RunFolder(tmp_path / "run", ["test"]) as folder:
        # An all-reduce in place of a reduce-scatter sends what many sound ZeRO-1 send.
        assert Planting(folder, faults, 2, None, True, "family").run() == 1
    out = capsys.readouterr().out
    assert "3 faults judged (2 killed, 1 survive)" in out
    assert "33.3% survive at depth family, at most 15%" in out
    kills = read(tmp_path / "run").kills
    assert {kill.depth for kill in kills} == {"family"}
    assert verify(tmp_path / "run").problems == []
    with RunFolder(tmp_path / "late", ["test"]) as folder:
        folder.add(replace(kills[0], killed=False, verdict="left out"), "kill")
    told = verify(tmp_path / "late").sentence()
    assert told == "verified: 0 cases judged again, 1 left out"


def test_a_kill_is_judged_again_by_its_line_alone() -> None:
    """As `verify` does of a run whose faults are held to what they declare."""
    item = pair(registry.load_mutant("ddp_never_reduces"))
    names = item.mutant.killed_by
    own, parent = (
        CaseResult(case.id, case, word, word, [Outcome(name, word) for name in names])
        for case, word in ((item.case, "fail"), (item.parent, "pass"))
    )
    kill = judge_kill(item, own, parent)
    assert kill.killed
    again = kill_matrix.PlantedPair(kill, item.case, item.parent)
    assert why_not_killed(again, own, parent) == ""
    own.checks = []
    assert "survives" in why_not_killed(again, own, parent)


def test_every_check_that_faces_faults_kills_one() -> None:
    killers = {name for chosen in representatives() for name in chosen.mutant.killed_by}
    more = {"relations", "checkpoint", "faults", "membership"}
    assert killers == {*GENERAL, *COSTLY, *OF_UNTRAINED, *VERDICT_KILLERS, *more}


def test_there_are_enough_faults_and_each_names_its_trigger_and_killer() -> None:
    mutants = [registry.load_mutant(name) for name in registry.mutant_names()]
    assert len(mutants) >= 150
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.killed_by and mutant.summary, mutant.name
        assert mutant.parent in registry.names(), mutant.name
        assert mutant.says, mutant.name
        re.compile(mutant.says)
        assert bool(mutant.crash_says) == ("crash" in mutant.killed_by), mutant.name


def _result(verdict: str = "pass", **statuses: Any) -> CaseResult:
    case = pair(registry.load_mutant("ddp_divides_by_world")).case
    worst = Worst("w", 0, "gradients_final", "rank 0", error=2.0, bound=0.5)
    checks = [Outcome(name, status, worst=worst) for name, status in statuses.items()]
    return CaseResult(case.id, case, verdict, "because", checks, seconds=1.0)


def _judge(own: CaseResult | None, parent: CaseResult | None) -> Kill:
    mutant = registry.load_mutant("ddp_divides_by_world")
    assert mutant.killed_by == ("equivalence",)
    return judge_kill(pair(mutant), own, parent)


def test_a_kill_needs_the_named_check_and_a_passing_parent() -> None:
    clean = _result(equivalence="pass", replicas="pass")
    killed = _judge(_result("fail", equivalence="fail", replicas="pass"), clean)
    assert killed.killed and killed.margin == 4.0 and killed.failing == ("equivalence",)


@pytest.mark.parametrize(
    ("own", "parent", "says"),
    [
        (_result(equivalence="pass"), _result(equivalence="pass"), "survives equivalence"),
        (
            _result("fail", replicas="fail", equivalence="pass"),
            _result(replicas="pass", equivalence="pass"),
            "survives equivalence; failing: replicas",
        ),
        (_result("crash"), _result(equivalence="pass"), "survives equivalence"),
        (
            _result("fail", equivalence="fail"),
            _result("fail", equivalence="fail"),
            "its parent is fail",
        ),
        (
            _result("fail", equivalence="fail"),
            _result(equivalence="skip", replicas="pass"),
            "does not judge the parent here",
        ),
        (None, _result(equivalence="pass"), "left out"),
        (_result("fail", equivalence="fail"), None, "left out"),
    ],
)
def test_what_is_no_kill(own: Any, parent: Any, says: str) -> None:
    kill = _judge(own, parent)
    assert not kill.killed and says in kill.why_not


def test_a_crash_counts_only_with_the_words_that_the_mutant_expects() -> None:
    chosen = pair(registry.load_mutant("hybrid_reduces_after_every_window"))
    clean, own = _result(equivalence="pass"), _result("crash")
    own.reason = "rank 0 raised RuntimeError: 'a' received a second gradient in one micro-batch"
    killed = judge_kill(chosen, own, clean)
    assert killed.killed and killed.crash_says in own.reason
    own.reason = "rank 0 raised AttributeError: no 'given'"
    other = judge_kill(chosen, own, clean)
    assert not other.killed
    assert (
        "does not say 'received a second gradient" in other.why_not
        and "no 'given'" in other.why_not
    )


def test_where_time_may_run_out_every_pair_of_check_and_class_comes_first(monkeypatch: Any) -> None:
    orders: list[list[str]] = []

    def run(cases: list[Case], *rest: Any) -> tuple[list[Any], list[Case]]:
        orders.append([case.implementation for case in cases])
        return [], cases

    monkeypatch.setattr(kill_matrix, "run_cases", run)
    mutants = [registry.load_mutant(name) for name in registry.mutant_names()]
    every = set().union(*map(kinds, mutants))
    for stop_after in (None, 60.0):
        kills = run_mutants(
            [pair(m) for m in mutants], 1, lambda result: None, course=Course(stop_after)
        )
        assert [kill.name for kill in kills] == [mutant.name for mutant in mutants]
    whole, hurried = ([name for name in order if name.startswith("mutants/")] for order in orders)
    assert whole == [f"mutants/{mutant.name}" for mutant in mutants] != hurried
    first = [registry.load_mutant(name) for name in hurried[: len(every)]]
    assert set().union(*map(kinds, first)) == every and len(every) > 40
    assert sorted(hurried) == sorted(whole)


def test_memory_is_weighed_only_where_a_kill_may_need_it() -> None:
    killers = {name: registry.load_mutant(name).killed_by for name in registry.mutant_names()}
    light = {name: pair(registry.load_mutant(name), weigh_all=False) for name in killers}
    weighed = {name for name, both in light.items() if "memory" in both.case.checks}
    assert weighed < set(killers)
    untrained = {n for n, both in light.items() if set(both.case.checks) <= {*OF_UNTRAINED}}
    assert untrained and not untrained & weighed  # nothing is trained that has a memory
    for name, both in light.items():
        if name in untrained:
            continue
        whole = pair(registry.load_mutant(name))
        assert both.case.checks == both.parent.checks
        assert {*both.case.checks, "memory"} == {*whole.case.checks}
        needs = {"memory", "schedule", "relations", "undecidable", "judge error"}.intersection(
            killers[name]
        )
        assert (bool(needs) or both.mutant.weighed) == (name in weighed), name


def test_mutants_of_one_trigger_share_their_parents_case() -> None:
    names = ("ddp_waits_after_each_launch", "ddp_reduces_after_backward")
    first, second = (pair(registry.load_mutant(name)) for name in names)
    if first.case.workload == second.case.workload and first.case.options == second.case.options:
        assert first.parent.id == second.parent.id
    assert first.case.id != second.case.id
    assert first.parent.implementation == "reference/ddp"
