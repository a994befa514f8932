"""What ranks left in a folder becomes a run folder like that of ``shardproof run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_case import made_case

from shardproof.cluster.judge import judge, main
from shardproof.cluster.launchers import foreign_records
from shardproof.cluster.launchers.foreign_records import (
    Host,
    RankEnd,
    case_folder,
    write_end,
    write_plan,
)
from shardproof.errors import SelectionError
from shardproof.launch.outcome import RankOutcome
from shardproof.runs import machine
from shardproof.runs.bundle.packing import pack
from shardproof.runs.records import Manifest
from shardproof.runs.run_folder import read
from shardproof.verdicts import BAD_INPUT, BROKEN, HELD, NOT_DECIDED

CASES = [
    made_case("reference/naive_ddp", {"replicate": 2}, backend="gloo", id=name)
    for name in ("one", "two")
]


def leave(records: Path, ends: bool) -> None:
    """What both cases leave: ranks that ended well, or that were killed."""
    write_plan(records, CASES, 2, [Host("alpha", [0]), Host("beta", [1])])
    for number in range(len(CASES)):
        folder = case_folder(records, number)
        folder.mkdir(exist_ok=True)
        for rank in range(2):
            (folder / f"rank{rank}.began").touch()
            if ends:
                write_end(folder, RankEnd(RankOutcome(rank, "ok"), {"step0/loss": "f64 [] 0"}))


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """Two launches of the same cases, with the same digests."""
    pair = tmp_path / "nodes", tmp_path / "local"
    for records in pair:
        leave(records, ends=True)
    return pair


@pytest.fixture
def no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_records, "results_of", lambda *_: iter(()))


def test_a_run_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"commit": "c0ffee", "source": "ab"}
    (tmp_path / "image.json").write_text(json.dumps(told | {"other": ""}))
    monkeypatch.setattr(machine, "_IMAGE", tmp_path / "image.json")
    records, results = tmp_path / "run" / "records", tmp_path / "run"
    leave(records, ends=False)
    command = [str(records), "--results", str(results), "--against", str(records)]
    assert main(command) == BROKEN
    said = capsys.readouterr().out
    assert "2 judged (2 crash)" in said and "alpha: ranks 0\nbeta: ranks 1\n" in said

    run = read(results)
    assert [case.verdict for case in run.cases] == ["crash", "crash"]
    last = run.header.last
    nodes = [{"name": "alpha", "ranks": [0]}, {"name": "beta", "ranks": [1]}]
    assert last.cluster == {"nodes": nodes, "image": told} and last.commit == "c0ffee"
    assert last.hardware.endswith(" cores, as 2 nodes")
    assert last.command == ["python", "-m", "shardproof.cluster.judge", *command]
    reports = {"report.html", "report.md", "junit.xml", "digests.json"}
    sealed = {file for file, _ in Manifest(results).read()}
    assert reports <= sealed and all((results / file).exists() for file in reports)
    packed = pack(results, tmp_path / "bundle.tar.gz").listing
    assert reports <= {member.name for member in packed.members}
    assert all(name.startswith("records/") for name in packed.left_out)


@pytest.mark.usefixtures("no_case")
def test_each_judging_has_a_folder_of_its_own(both: tuple[Path, Path]) -> None:
    for _ in range(2):
        judge(both[0])
    first, second = sorted(path.parent for path in both[0].parent.glob("*/run.json"))
    assert first != second and both[0] not in (first, second)
    assert [len(read(path).header.invocations) for path in (first, second)] == [1, 1]


@pytest.mark.usefixtures("no_case")
def test_a_comparison_that_the_clock_cut_is_not_decided(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, local = both
    assert judge(nodes, against=local) == NOT_DECIDED  # none was judged
    monkeypatch.setattr("shardproof.verdicts.exit_code", lambda _: HELD)
    assert judge(nodes, against=local) == HELD
    (local / foreign_records.OUT_OF_TIME).touch()
    for path in case_folder(local, 1).glob("*.end"):
        path.unlink()
    assert judge(nodes, against=local) == NOT_DECIDED


def test_nothing_to_compare_with_is_told_before_the_judging(both: tuple[Path, Path]) -> None:
    nodes, local = both
    (local / "plan.json").unlink()
    with pytest.raises(SelectionError, match="no records"):
        judge(nodes, nodes / "run", local)
    assert not (nodes / "run").exists()


def test_a_folder_that_cannot_be_written_is_told(
    both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (both[0].parent / "file").touch()
    assert main([str(both[0]), "--results", str(both[0].parent / "file" / "run")]) == BAD_INPUT
    assert "results cannot be written" in capsys.readouterr().err
