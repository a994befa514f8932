"""What ranks left in a folder becomes a run folder like that of ``shardproof run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_case import made_case

from shardproof.cluster.judge import judge, main
from shardproof.cluster.launchers import foreign_records
from shardproof.cluster.launchers.foreign_records import Host, case_folder, write_plan
from shardproof.launch.outcome import RankOutcome
from shardproof.runs import machine
from shardproof.runs.bundle.packing import pack
from shardproof.runs.records import Manifest
from shardproof.runs.run_folder import read
from shardproof.verdicts import BAD_INPUT, BROKEN

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
                RankOutcome(rank, "ok").store(folder / f"rank{rank}.end")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A launch whose ranks ended well."""
    leave(tmp_path / "records", ends=True)
    return tmp_path / "records"


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
    command = [str(records), "--results", str(results)]
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
    reports = {"report.html", "report.md", "junit.xml"}
    sealed = {file for file, _ in Manifest(results).read()}
    assert reports <= sealed and all((results / file).exists() for file in reports)
    packed = pack(results, tmp_path / "bundle.tar.gz").listing
    assert reports <= {member.name for member in packed.members}
    assert all(name.startswith("records/") for name in packed.left_out)


@pytest.mark.usefixtures("no_case")
def test_each_judging_has_a_folder_of_its_own(records: Path) -> None:
    for _ in range(2):
        judge(records)
    first, second = sorted(path.parent for path in records.parent.glob("*/run.json"))
    assert first != second and records not in (first, second)
    assert [len(read(path).header.invocations) for path in (first, second)] == [1, 1]


def test_a_folder_that_cannot_be_written_is_told(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (records.parent / "file").touch()
    assert main([str(records), "--results", str(records.parent / "file" / "run")]) == BAD_INPUT
    assert "results cannot be written" in capsys.readouterr().err
