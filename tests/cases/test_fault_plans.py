"""Faults that a scenario plans: bad plans end with one line each, good ones come to their verdict.

Every plan of ``scenarios/faults/`` is one of the suite's cases; here are the judge of them, some
plans on the backends that are cheap, and random ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardproof.backends.errors import CollectiveMismatch, RankFailed
from shardproof.backends.mpi import found as mpi_found
from shardproof.campaign import draws
from shardproof.case import OF_NODES, Case, Fault
from shardproof.cases import verdict
from shardproof.cases.runner import run_cases
from shardproof.checks import faults
from shardproof.checks.results import CaseResult
from shardproof.evidence.account import Account
from shardproof.launch.nodes import without_node_faults
from shardproof.launch.outcome import RankOutcome
from shardproof.runs import run_folder
from shardproof.scenarios.load import SHIPPED, find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from tests.support.commands import assert_refused, here
from tools.studies import autopsies

PLAN = """\
name: planned
about: a fault in one rank
sees: [nothing]
workload: {name: charnames_gpt, global_batch: 6, micro_batches: 1, params: {layers: 1, width: 16}}
matrix:
  implementation: reference/naive_ddp
  backend: gloo
  mesh: {replicate: [2, 3]}
  optimizer: sgd
checks: [equivalence, faults]
steps: 2
faults:
  - {kind: raise, rank: 1, step: 1, phase: backward, expect: {verdict: crash, rank: 1}}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("rank: 1, step", "rank: 2, step", 13, "no such rank in replicate2 (2) - valid: 0 to 1"),
        ("rank: 1}}", "rank: 3}}", 13, "no such rank in replicate2 (3) - valid: 0 to 1"),
        ("kind: raise", "kind: rise", 13, "unknown value (rise) - "),
        ("phase: backward", "phase: forwards", 13, "unknown value (forwards) - did you mean"),
        (
            "step: 1",
            "step: 2",
            13,
            "phase backward does not occur in this step (2) - valid: 0 to 1",
        ),
        (", expect: {verdict: crash, rank: 1}", "", 13, "missing key faults[0].expect - add"),
        ("verdict: crash, ", "", 13, "missing key faults[0].expect.verdict - add"),
        ("verdict: crash", "verdict: broken", 13, "unknown value (broken)"),
        (", faults]", "]", 10, "fault plans and the check `faults` belong together"),
        (
            "rank: 1}}\n",
            "rank: 1}}\n  - {kind: raise, rank: 0, phase: update, expect: {verdict: crash}}\n",
            14,
            "fault plan named twice (raise) - give it a label",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_one_line_and_exit_code_2(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    assert old in PLAN
    assert_refused(tmp_path / "planned.yaml", PLAN.replace(old, new, 1), line, says)


def test_plans_are_in_ids_and_rules_match_them(tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    file.write_text(f"{PLAN}quick:\n  - {{fault: raise, world: 3}}\ntier: full\n")
    cells = {case.world: case for case in expand(find([str(file)])[0], installed())}
    assert [cells[2].tier, cells[3].tier] == ["full", "quick"]
    assert cells[3].id.startswith("planned[raise]::reference/naive_ddp::gloo::replicate3::")
    assert Case.from_dict(cells[3].to_dict()) == cells[3]


def test_the_suite_plans_every_kind_on_every_backend() -> None:
    cases = [c for file in find([str(SHIPPED / "faults")]) for c in expand(file, installed())]
    kinds = {(c.fault.kind, c.backend) for c in cases if c.fault is not None}
    every = ("kill", "stop", "raise", "exit", "delay", "corrupt", "drop", "swap", "shape")
    of_ranks = {(kind, b) for kind in every for b in ("in_memory", "gloo", "mpi")}
    assert kinds - {(kind, "gloo") for kind in OF_NODES} == of_ranks
    assert {kind for kind, _ in kinds} >= {*OF_NODES}
    assert len(cases) >= 24


FAULT = Fault("drop", 1, 1, "backward", ("hang",), blames=1, says=("desync",))


def outcomes(injected: float | None = 1.0, looks: int = 200) -> list[RankOutcome]:
    spoilt = RankOutcome(1, "hung", ended=3.5, injected=injected, idle_looks=looks)
    return [RankOutcome(0, "hung", ended=4.0), spoilt]


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({}, "pass", "as expected, drop (rank 1, step 1, backward) gives hang: desync: it"),
        ({"verdict": "crash"}, "fail", "expected hang: drop"),
        ({"verdict": "pass"}, "fail", "expected hang: drop"),
        ({"blamed": 0}, "fail", "expected rank 1 as the cause, not rank 0: drop"),
        ({"blamed": None}, "fail", "expected rank 1 as the cause, not no rank: drop"),
        ({"reason": "dead peer: it"}, "fail", "expected a sentence that contains 'desync': drop"),
        ({"outcomes": outcomes(None)}, "precondition", "the fault never happened (rank 1, step 1"),
        ({"outcomes": outcomes(looks=240)}, "pass", "as expected"),
        (
            {"outcomes": outcomes(looks=241)},
            "fail",
            "expected an end within 240 looks of the watchdog, not 241 in which ranks could not",
        ),
    ],
)
def test_a_plan_is_judged_by_verdict_rank_and_words(
    changes: dict[str, object], status: str, says: str
) -> None:
    given = {"verdict": "hang", "reason": "desync: it", "blamed": 1, "outcomes": outcomes()}
    outcome = faults.judge_end(FAULT, **(given | changes), most_looks=240)  # type: ignore[arg-type]
    assert (outcome.status, outcome.message[: len(says)]) == (status, says)
    if status != "precondition":
        assert outcome.figures["ended_s_after_the_fault"] == 3.0


@pytest.mark.parametrize("told", [True, False])
def test_the_rank_that_the_sentence_names_is_the_blamed_one(told: bool) -> None:
    """An autopsy that stands in no sentence names nobody."""
    fault = dataclasses.replace(FAULT, verdicts=("crash",))
    case = dataclasses.replace(shipped(lambda c: "data[raise]" in c.id)[0], fault=fault)
    kind = CollectiveMismatch.__name__ if told else RankFailed.__name__
    raised = RankOutcome(0, "raised", kind, "it", autopsy="desync: it", culprit=1)
    account = Account(case, outcomes=[raised, RankOutcome(1, "ok", injected=1.0)])
    result = verdict._under_fault(case, account, raised)
    blamed = "as expected, drop" if told else "expected rank 1 as the cause, not rank 0"
    assert (result.verdict, result.reason[: len(blamed)]) == ("pass" if told else "fail", blamed)


def judged(cases: list[Case]) -> dict[str, CaseResult]:
    found: list[CaseResult] = []
    run_cases(cases, 2, found.append)
    return {result.id: result for result in found}


def shipped(expression: Callable[[Case], bool]) -> list[Case]:
    files = find([str(SHIPPED / "faults")])
    return [c for file in files for c in expand(file, installed()) if expression(c)]


@pytest.mark.launches
def test_quick_plans_come_to_what_they_expect_and_leave_nothing() -> None:
    cases = without_node_faults(shipped(lambda case: case.tier == "quick"))
    found = judged([case for case in cases if not case.skip])
    assert {r.id: r.reason for r in found.values() if r.verdict != "pass"} == {}
    kept = [c for c in psutil.Process().children() if "fork_server_main" in " ".join(c.cmdline())]
    assert not [child for server in kept for child in server.children(recursive=True)]


@pytest.mark.launches
def test_a_plan_that_expects_something_else_fails() -> None:
    """In place, in kind and in blame."""
    (case,) = shipped(lambda c: "data[shape]" in c.id and c.backend == "gloo")
    assert case.fault is not None
    changes = {
        "verdict": {"verdicts": ("pass",)},
        "rank": {"blames": 0},
        "words": {"says": ("a fish",)},
        "never": {"call": 99},
    }
    cases = [
        dataclasses.replace(case, id=name, fault=dataclasses.replace(case.fault, **change))  # type: ignore[arg-type]
        for name, change in changes.items()
    ]
    found = judged(cases)
    ends = {name: result.verdict for name, result in found.items()}
    assert ends == {"verdict": "fail", "rank": "fail", "words": "fail", "never": "precondition"}
    assert "the fault never happened (rank 1, step 1, backward)" in found["never"].reason


@pytest.mark.launches
def test_earlier_results_of_a_run_are_kept_and_verify_agrees(tmp_path: Path) -> None:
    (tmp_path / "planned.yaml").write_text(PLAN.replace("gloo", "in_memory"))
    run = tmp_path / "run"
    sound = "reference/naive_ddp and ddp-gpt and in_memory and replicate2 and sgd and fp64-"
    here("run", "ddp-gpt", "--tier", "full", "-k", sound.removesuffix("-"), "--results", str(run))
    before = [line.id for line in run_folder.read(run).cases]
    assert before
    done = here("run", str(tmp_path / "planned.yaml"), "-j", "1", "--results", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    cases = run_folder.read(run).cases
    assert [line.id for line in cases][: len(before)] == before and len(cases) == len(before) + 2
    assert here("verify", str(run)).returncode == 0


@pytest.mark.launches
@pytest.mark.timeout(600)
def test_autopsies_of_random_plans_are_right() -> None:
    """On every backend of this machine; more: `python -m tools.studies autopsies`."""
    cases = autopsies.planned(8, seed=1)
    wanted = {"in_memory", "gloo", *(["mpi"] if mpi_found.problem() is None else [])}
    assert {case.backend for case in cases} == wanted
    assert len({case.fault.kind for case in cases if case.fault is not None}) >= 5
    with autopsies.busy_cores():
        found = judged(cases)
    assert {r.id: r.reason for r in found.values() if r.verdict != "pass"} == {}


@pytest.mark.launches
@pytest.mark.timeout(600)
def test_clean_cases_have_no_autopsy_while_every_core_is_busy() -> None:
    with autopsies.busy_cores():
        found = judged(draws.first_cases(6, 15))
    broken = {r.id: r.reason for r in found.values() if r.verdict in ("hang", "crash", "fail")}
    assert broken == {} and len(found) == 6
