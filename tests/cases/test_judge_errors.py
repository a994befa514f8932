"""What ends the judge is not the system's fault: once more, and then ``judge error``."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
from kept_fork_server import KeptForkServer
from made_case import made_case

from shardproof import verdicts
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult

HERE = Path(__file__).parents[1] / "support"


def _run(name: str, patch: pytest.MonkeyPatch, folder: Path, *beside: str) -> list[CaseResult]:
    """The results of a system of ``faulty_ranks``, and of those beside it."""
    patch.syspath_prepend(str(HERE))
    patch.setenv("PYTHONPATH", str(HERE))
    patch.setenv("FAULTY_RANKS_FLAG", str(folder / "flag"))
    cases = [
        made_case(
            implementation,
            {"replicate": 2},
            id=implementation,
            backend="gloo",
            checks=("equivalence", "replicas"),
            steps=2,
        )
        for implementation in (f"faulty_ranks:{name}", *beside)
    ]
    seen: list[CaseResult] = []
    results, left_out = run_cases(cases, 2, seen.append)
    assert results == seen and not left_out and len(results) == len(cases)
    return results


@pytest.mark.parametrize("name", ["KillsTheJudgeOnce", "KillsTheForkServerOnce"])
def test_a_killed_judge_tries_once_more(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The case beside it, lost with the fork server, is run again as well."""
    results = _run(name, monkeypatch, tmp_path, "reference/naive_ddp")
    assert [result.verdict for result in results] == ["pass", "pass"], [r.reason for r in results]
    assert (tmp_path / "flag").exists()


@pytest.fixture
def without_a_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaders import the class, which then breaks them from inside."""
    monkeypatch.setitem(
        KeptForkServer.changed, "shardproof.registry.stand_ins:needed", operator.not_
    )


@pytest.mark.usefixtures("without_a_wall")
@pytest.mark.parametrize("name", ["CheckHasNoMemory", "CheckHasNoTensor", "CheckHasNoDescriptor"])
def test_a_check_that_has_no_memory_left_is_made_once_more(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (result,) = _run(name, monkeypatch, tmp_path)
    assert result.verdict == "pass", result.reason
    assert (tmp_path / "flag").exists()


@pytest.mark.usefixtures("without_a_wall")
def test_a_check_with_a_bug_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (result,) = _run("CheckIsWrong", monkeypatch, tmp_path)
    assert result.verdict == "judge error" and "a bug of the check" in result.reason


@pytest.mark.usefixtures("without_a_wall")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("KillsTheJudge", "the judging process died of SIGKILL"),
        ("LeavesNoDescriptors", "Too many open files"),
    ],
)
def test_a_judge_that_cannot_judge_says_so(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (result,) = _run(name, monkeypatch, tmp_path)
    assert result.verdict == "judge error" and says in result.reason, result.reason
    assert verdicts.exit_code(verdicts.count([result])) == verdicts.NOT_DECIDED
