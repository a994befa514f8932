"""Random histories of checkpoints: each that is drawn can be run, and drawn again."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardproof import registry, verdicts, workloads
from shardproof.campaign import histories
from shardproof.case import Case
from shardproof.cases.verdict import decide_case
from shardproof.checks.checkpoint import is_same, who_loads
from shardproof.errors import SelectionError
from shardproof.evidence.account import Account
from shardproof.registry.declaration import Declaration
from shardproof.runs.run_folder import read
from tests.support.commands import study as run_study


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return histories.first_cases(400, 11)


def test_who_saves_and_who_loads_can_train_the_case(drawn: list[Case]) -> None:
    for case in drawn:
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
        for one in (case, who_loads(case)):
            declared = Declaration.of(registry.load(one.implementation), one.options)
            assert not declared.problem() and not declared.excludes_case(one, ""), case.id


def test_who_loads_recomputes_no_more_units_than_there_are() -> None:
    """Of 300 histories of seed 36 one loaded a model of one unit to recompute two at a time."""
    for case in histories.first_cases(300, 36, ["reference/hybrid"]):
        loads = who_loads(case)
        if every := loads.options.get("recompute_every", 0):
            workload = workloads.make(loads.workload, loads.dtype, loads.lane)
            assert every <= len(workload.units), case.id


def test_plans_leave_a_step_after_the_last_save(drawn: list[Case]) -> None:
    for case in drawn:
        plan = case.checkpoint
        assert plan is not None and 1 <= plan.saves <= plan.save_at < case.steps, case.id
        assert case.options["checkpoint"]["keep"] >= 1


def test_every_kind_of_history_is_drawn(drawn: list[Case]) -> None:
    loads = {case.id: who_loads(case) for case in drawn}
    formats = Counter(case.options["checkpoint"]["format"] for case in drawn)
    savers = Counter(case.implementation for case in drawn)
    assert set(formats) == {"full", "sharded", "asynchronous"} and min(formats.values()) > 60
    assert set(savers) == {system.name for system in histories.systems()}
    assert {case.optimizer.name for case in drawn} == {"sgd", "adamw"}
    kinds = {
        "same": [case for case in drawn if is_same(case, loads[case.id])],
        "smaller": [case for case in drawn if loads[case.id].world < case.world],
        "larger": [case for case in drawn if loads[case.id].world > case.world],
        "another": [c for c in drawn if loads[c.id].implementation != c.implementation],
        "precision": [c for c in drawn if dict(loads[c.id].precision) != dict(c.precision)],
        "several": [c for c in drawn if c.checkpoint is not None and c.checkpoint.saves > 1],
    }
    assert all(kinds.values()), {kind: len(cases) for kind, cases in kinds.items()}


def test_a_case_is_drawn_again_from_its_id(drawn: list[Case]) -> None:
    assert histories.by_id(drawn[7].id) == drawn[7]
    assert histories.first_cases(3, 11, ["*/zero*"])[0] in drawn
    assert histories.by_id("campaign-1::0000::plain") is None
    with pytest.raises(SelectionError, match="cannot generate the random case"):
        histories.by_id(f"{drawn[7].id}-other")
    with pytest.raises(SelectionError, match="matches nothing that saves"):
        histories.first_cases(1, 0, ["plain"])


def test_the_command_that_a_failing_case_prints_runs_that_case(
    command: Any, drawn: list[Case]
) -> None:
    rerun = decide_case(Account(drawn[3], fault="anything")).rerun
    words = ["run", "--case", drawn[3].id]
    assert rerun == f"shardproof {' '.join(words[:-1])} '{drawn[3].id}'"
    code, out, _ = command(*words, "--dry-run")
    assert (code, out.splitlines()) == (0, [drawn[3].id])
    code, _, errors = command("run", "--case", "nothing")
    assert code == 2 and "not the id of a random case (nothing)" in errors


@pytest.mark.launches
@pytest.mark.timeout(600)
def test_clean_histories_pass(tmp_path: Path) -> None:
    """The first of a seed; a fault in one of them is found."""
    folder = tmp_path / "run"
    words = ["--seed", "3", "-j", "2", "--impl", "reference/zero*", "--results", str(folder)]
    done = run_study("checkpoints", "4", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    results = read(folder).cases
    assert all(r.verdict in verdicts.GREEN for r in results) and len(results) == 4
    for result in results:
        assert {c.check: c.status for c in result.checks}["checkpoint"] == "pass"


def test_generators_of_another_mesh_are_no_false_alarm() -> None:
    """A history of seed 16 that failed: three stages go on with the generators of none of two."""
    from shardproof.checks.checkpoint import _has_other_numbers

    case = histories.first_cases(1, 16)[0]
    spec = dataclasses.replace(case.workload, name="charnames_gpt", traits=("dropout_stateful",))
    case = dataclasses.replace(case, workload=spec, mesh={"pipe": 2})
    plain = Declaration(strategy="pipeline")

    def loads(case: Case) -> Any:
        return SimpleNamespace(case=case, declaration=plain)

    assert _has_other_numbers(case, loads(dataclasses.replace(case, mesh={"pipe": 3})))
    assert not _has_other_numbers(case, loads(case))
