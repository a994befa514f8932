"""Evidence that can be judged again: records, verify, resume, JUnit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_report import kill

from shardproof.case import Case
from shardproof.cases.kills import pair
from shardproof.commands.execution import Execution, Planting
from shardproof.commands.verify import verify
from shardproof.evidence.account import Account
from shardproof.evidence.assembled import StoredFigures
from shardproof.impls.reference.pipeline.schedules import one_f_one_b
from shardproof.registry import load_mutant
from shardproof.runs import junit, records
from shardproof.runs.durations import Durations
from shardproof.runs.records import Manifest
from shardproof.runs.resume import split
from shardproof.runs.run_folder import RunFolder, find_run, read
from shardproof.scenarios.budget import CaseSchedule, fit_cases


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a clean case, of a failing one, of one that crashes, and of one that is skipped."""
    path = tmp_path_factory.mktemp("results") / "run"
    with RunFolder(path, ["test"]) as folder:
        chosen = fit_cases(_cases(), Durations(path.parent / "durations.json"), 2, None)
        code = Execution(folder, chosen, 2, Durations(path.parent / "durations.json")).run()
    assert code == 1
    return path


def _cases() -> list[Case]:
    made = pair(load_mutant("ddp_never_reduces"))
    crashing = pair(load_mutant("ddp_swallows_exception")).case
    skipped = Case.from_dict(made.parent.to_dict() | {"id": "skipped", "skip": "not today"})
    return [made.parent, made.case, crashing, skipped]


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def test_every_verdict_comes_out_of_the_records_again(made: Path) -> None:
    found = verify(made)
    assert found.problems == []
    assert found.cases == 4
    assert [r.verdict for r in read(made).cases if r.id == "skipped"] == ["skip"]


def test_a_record_holds_figures_and_whole_tensors_of_failures_only(made: Path) -> None:
    accounts = {r.id: records.read(made / str(r.record)) for r in read(made).cases}
    clean, broken = (accounts[case.id] for case in _cases()[:2])
    rows = clean["figures"]["tensors"]
    assert {row["kind"] for row in rows} >= {"parameters", "gradients", "optimizer"}
    assert all(len(row["digest"]) == 64 and row["norm"] >= 0 for row in rows)
    assert clean["figures"]["compared"]["equivalence"]
    assert clean["figures"]["records"][0]["traffic"] and clean["figures"]["records"][0]["events"]
    assert clean["timings"]["ranks"] > 0
    assert not clean["whole"]
    assert {told["owner"] for told in broken["whole"]} >= {"oracle", "replica 0"}
    again = Account.from_dict(broken).to_dict()
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(broken))


def test_schedules_and_computations_come_back(made: Path, tmp_path: Path) -> None:
    """What a pipeline claimed and what its ranks logged; records of before have neither."""
    result = next(r for r in read(made).cases if r.verdict == "pass")
    account = records.read(made / str(result.record))
    schedule = one_f_one_b(2, 3)
    times = {"begin": 4, "end": 9, "began": 12345.678901234, "ended": 12345.7, "cpu": 0.01}
    place = {"step": 1, "window": 0, "op": "BW", "stage": 0, "micro": 2}
    account["figures"]["schedules"] = {"3": schedule.to_dict()}
    account["figures"]["records"][1]["actions"] = [place | times]
    name, _ = records.write(tmp_path, account)
    again = records.read(tmp_path / name)
    assert [r["actions"] for r in again["figures"]["records"]] == [[], [place | times]]
    assert StoredFigures.from_dict(_cases()[0], again["figures"]).schedules == {3: schedule}
    del account["figures"]["schedules"]
    assert StoredFigures.from_dict(_cases()[0], account["figures"]).schedules == {}


def test_a_changed_byte_is_found_wherever_it_is(run: Path) -> None:
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        content = bytearray(file.read_bytes())
        kept = bytes(content)
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        problems = _problems(run)
        assert problems and str(run) in "".join(problems), file
        file.write_bytes(kept)
    assert verify(run).problems == []


def _problems(run: Path) -> list[str]:
    from shardproof.errors import SelectionError

    try:
        return verify(run).problems
    except SelectionError as error:
        return [str(error)]


def test_a_missing_case_is_named(run: Path) -> None:
    lines = (run / "cases.jsonl").read_bytes().splitlines(keepends=True)
    lost = json.loads(lines[-1])["id"]
    (run / "cases.jsonl").write_bytes(b"".join(lines[:-1]))
    _seal_again(run)
    assert [p for p in verify(run).problems if lost in p and "missing" in p]


def test_a_verdict_that_the_record_does_not_give_is_named(run: Path) -> None:
    """Even with every digest made right again."""
    lines = [json.loads(line) for line in (run / "cases.jsonl").read_bytes().splitlines()]
    line = next(line for line in lines if line["verdict"] == "fail")
    line |= {"verdict": "pass", "reason": ""}
    (run / "cases.jsonl").write_text("".join(json.dumps(told) + "\n" for told in lines))
    _seal_again(run)
    [problem] = verify(run).problems
    assert line["id"] in problem and line["record"] in problem and "verdict 'fail'" in problem


def test_a_missing_record_is_named(run: Path) -> None:
    record = str(read(run).cases[0].record)
    (run / record).unlink()
    assert [p for p in verify(run).problems if record in p and "missing" in p]


def _seal_again(run: Path) -> None:
    """Forge the manifest of cases.jsonl."""
    forged = Manifest(run)
    kept = forged.read()
    (run / Manifest.NAME).unlink()
    for (file, number), digest in kept.items():
        if file not in ("cases.jsonl", "report.html", "report.md", "junit.xml"):
            forged.seal(file, digest, number)
    for number, line in enumerate((run / "cases.jsonl").read_bytes().splitlines(), 1):
        forged.seal("cases.jsonl", hashlib.sha256(line).hexdigest(), number)


def test_a_changed_entry_that_another_has_superseded_is_found(run: Path) -> None:
    entries = (run / Manifest.NAME).read_bytes().splitlines(keepends=True)
    files = [json.loads(entry)["file"] for entry in entries]
    early = next(number for number, file in enumerate(files) if file in files[number + 1 :])
    entries[early] = entries[early].replace(b'"sha256": "', b'"sha256": "0')
    (run / Manifest.NAME).write_bytes(b"".join(entries))
    assert any("does not match the line before" in problem for problem in _problems(run))


def test_resume_takes_what_is_left_and_rerun_what_did_not_hold(run: Path) -> None:
    again, kept = split(run, None, failed=True)
    assert {case.id for case in again} == {case.id for case in _cases()[1:3]}
    assert len(kept) == 2
    assert split(run, None, failed=False)[0] == []
    lines = (run / "cases.jsonl").read_bytes().splitlines(keepends=True)
    (run / "cases.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    left, kept = split(run, None, failed=False)
    assert [case.id for case in left] == [json.loads(lines[-1])["id"]]
    durations = Durations(run.parent / "durations.json")
    with RunFolder(run, ["test", "--resume"]) as folder:
        again = fit_cases(left, durations, 1, None)
        code = Execution(folder, again, 1, durations, kept=kept).run()
    assert code == 1
    assert verify(run).problems == []
    assert len(read(run).cases) == 4


@pytest.mark.parametrize("planned", [True, False])
def test_a_budget_hides_no_failure_of_before(
    run: Path, planned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither where the plan has no room for it, nor where the budget is used up on the way."""
    again, kept = split(run, None, failed=True)
    durations = Durations(run.parent / "none.json")
    chosen = CaseSchedule([], again, 0.0) if planned else CaseSchedule(again, [], 0.0)
    with RunFolder(run, ["test", "--rerun-failed"]) as folder:
        code = Execution(folder, chosen, 1, durations, 1e-9, kept).run()
    assert code == 1
    told = capsys.readouterr().out
    assert "not run again, earlier results kept (2): no time in a budget of" in told
    assert "3 judged (1 fail, 1 crash, 1 pass), 0 xfailed, 1 skipped, 0 left out" in told
    assert verify(run).problems == []


def test_a_budget_hides_no_survivor_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutant = load_mutant("ddp_never_reduces")
    with RunFolder(tmp_path / "run", ["test"]) as folder:
        folder.add(kill(mutant.name, killed=False), "kill")
        assert Planting(folder, [mutant], 1, 1e-5, False).run() == 1
    told = capsys.readouterr().out
    assert "1 fault judged (0 killed, 1 survive), 0 left out" in told
    assert [line.killed for line in read(tmp_path / "run").kills] == [False]


def test_runs_of_the_same_cells_share_a_key(made: Path, tmp_path: Path) -> None:
    key = read(made).header.invocations[0].key
    assert key is not None and key.suite and key.data and len(key.scenarios) == 64
    other: dict[str, Any] = {}
    for name in ("a", "b"):
        with RunFolder(tmp_path / name, ["test"]) as folder:
            folder.plan(_cases()[:1] if name == "a" else _cases()[1:2])
        other[name] = read(tmp_path / name).header.invocations[0].key
    assert other["a"] == other["b"], "the same cell of a mutant and of its parent"


def test_junit_tells_every_case(made: Path) -> None:
    told = ElementTree.fromstring((made / "junit.xml").read_text())[0]
    assert (told.get("tests"), told.get("skipped")) == ("4", "1")
    assert int(told.get("failures", 0)) + int(told.get("errors", 0)) == 2
    failure = told.find("testcase/failure")
    assert failure is not None and "rerun: shardproof mutants --impl ddp_never_reduces" in (
        failure.text or ""
    )
    told_of = {p.get("name"): p.get("value") for p in told.findall("properties/property")}
    assert told_of["torch"] and told_of["run"] == made.name and told_of["hardware"]
    assert told.get("timestamp") == read(made).header.invocations[0].started[:19]
    for result, test in zip(read(made).cases, told.iter("testcase"), strict=True):
        assert test.get("time") == f"{result.seconds:.3f}"
        assert [child.tag for child in test][:1] == ["properties"], "the schema has them first"
        of = {p.get("name"): p.get("value") for p in test.iter("property")}
        assert of["verdict"] == result.verdict and of["world"] == str(result.case.world)
        assert of["implementation"] == result.case.system and of["rerun"] == result.rerun
        if result.worst_error is not None:
            assert float(str(of["worst_error"])) == result.worst_error
    run = read(made)
    run.cases[0].reason = "control \x00 and \ud800"
    run.cases[0].verdict = "fail"
    ElementTree.fromstring(junit.document(run))


def test_the_newest_run_is_found(made: Path) -> None:
    assert find_run(None, made.parent) == made


@pytest.mark.parametrize("after", ["the write", "the line"])
def test_a_signal_between_a_line_and_its_note_breaks_no_chain(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(tmp_path)
    manifest.seal("a", "0" * 64)
    append = records.append_line

    def interrupted(*given: Any) -> None:
        if after == "the line":
            append(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if after == "the line":
            patch.setattr(records, "append_line", interrupted)
        else:
            patch.setattr(os, "fsync", interrupted)
        manifest.seal("b", "1" * 64)
    manifest.seal("c", "2" * 64)
    sealed = {file for file, _ in manifest.read()}
    assert sealed == ({"a", "b", "c"} if after == "the line" else {"a", "c"})
