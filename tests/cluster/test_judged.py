"""Verdicts on what ranks left, whatever their launcher ended with; ``sh`` stands in for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_case import made_case

from shardproof.cluster.judge import main
from shardproof.cluster.launchers.foreign_records import case_folder, write_plan
from shardproof.verdicts import BROKEN, HELD


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a launch leaves whose ranks were killed in its only case."""
    records = tmp_path / "left"
    case = made_case("reference/naive_ddp", {"replicate": 2}, backend="gloo")
    write_plan(records, [case], 2)
    case_folder(records, 0).mkdir()
    for rank in range(2):
        (case_folder(records, 0) / f"rank{rank}.began").touch()
    return records


def judge(results: Path, shell: str, node: int = 0) -> int:
    return main(["--node", str(node), "--results", str(results), "--", "sh", "-c", shell, "ranks"])


def test_a_launch_that_is_killed_is_judged(
    left: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "run"
    launch = f'[ "$*" = "--records {results}/records --no-judge" ] || exit 99\n'
    launch += f"mkdir -p {results}; cp -r {left} {results}/records; kill -KILL $$"
    assert judge(results, launch) == BROKEN
    said = capfd.readouterr()
    assert "the ranks ended with code 137: their records are judged" in said.err
    assert "1 judged (1 crash)" in said.out and (results / "cases.jsonl").exists()


def test_another_node_does_not_end_the_first(left: Path, tmp_path: Path) -> None:
    results = tmp_path / "run"
    copy = f"mkdir -p {results}; cp -r {left} {results}/records"
    assert judge(results, f"{copy}; exit 1", node=1) == HELD
    assert not (results / "cases.jsonl").exists()


@pytest.mark.parametrize(("node", "code"), [(0, 1), (0, 2), (1, 2)])
def test_a_launch_that_came_to_no_case_has_no_verdict(
    node: int, code: int, left: Path, tmp_path: Path
) -> None:
    """Nor has what an earlier one left there."""
    results = tmp_path / "run"
    results.mkdir()
    left.rename(results / "records")
    assert judge(results, f"exit {code}", node) == code
    assert judge(results, "exit 0", node) == BROKEN
    assert not (results / "cases.jsonl").exists()


def test_who_is_told_to_end_ends_the_ranks_and_judges_nothing(left: Path, tmp_path: Path) -> None:
    results = tmp_path / "run"
    copy = f"mkdir -p {results}; cp -r {left} {results}/records"
    with pytest.raises(SystemExit) as ended:
        judge(results, f"{copy}; kill -TERM $PPID; exec sleep 100")
    assert ended.value.code == 143 and not (results / "cases.jsonl").exists()
