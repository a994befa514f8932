"""Evidence that somebody changed and sealed again: what one part of it says of another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic as made

from shardproof import verdicts
from shardproof.case import Case
from shardproof.cases.kills import pair
from shardproof.commands.execution import Execution
from shardproof.commands.verify import Verified, verify
from shardproof.evidence.account import Account
from shardproof.registry import load_mutant
from shardproof.runs import bindings, records, run_folder
from shardproof.runs.durations import Durations
from shardproof.runs.run_folder import RunFolder, read
from shardproof.scenarios.budget import CaseSchedule

Line = dict[str, Any]


def _run(path: Path, *cases: Case) -> int:
    with RunFolder(path, ["test"]) as folder:
        plan, durations = CaseSchedule([*cases], [], 0.0), Durations(path.parent / "none.json")
        return Execution(folder, plan, 1, durations).run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a clean case and of a failing one, and beside it another run of the clean one."""
    place = tmp_path_factory.mktemp("results")
    planted = pair(load_mutant("ddp_never_reduces"))
    assert _run(place / "run", planted.parent, planted.case) == 1
    assert _run(place / "other", planted.parent) == 0
    assert verify(place / "run").problems == verify(place / "other").problems == []
    return place


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def _seal(run: Path) -> None:
    """A manifest of all that is there: whoever can change a run can make one."""
    (run / "manifest.jsonl").unlink()
    manifest = records.Manifest(run)
    for number, line in enumerate((run / "cases.jsonl").read_bytes().splitlines(), 1):
        manifest.seal("cases.jsonl", records.hashlib.sha256(line).hexdigest(), number)
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        if path.name not in ("cases.jsonl", "manifest.jsonl"):
            manifest.seal(path.relative_to(run).as_posix(), records.digest(path))


def _lines(run: Path, change: Callable[[Line], Line | None]) -> None:
    lines = map(json.loads, (run / "cases.jsonl").read_text().splitlines())
    changed = (json.dumps(new) + "\n" for line in lines if (new := change(line)) is not None)
    (run / "cases.jsonl").write_text("".join(changed))


def _failing(line: Line) -> bool:
    return bool(line["verdict"] == "fail")


def _forged(run: Path, change: Callable[[Line], None], told: str = "pass") -> None:
    """Change the account of the failing case in line, record and plan, and judge it again."""
    from shardproof.cases.verdict import decide_case

    def forge(line: Line) -> Line:
        if not _failing(line):
            return line
        account = records.read(run / line["record"])
        change(account)
        (run / line["record"]).unlink()
        records.write(run, account)
        again = decide_case(Account.from_dict(account)).to_dict()
        kept = {key: line[key] for key in ("kind", "record", "data", "rerun", "seconds")}
        assert again["verdict"] == told
        return json.loads(json.dumps(again | kept))

    _lines(run, forge)
    cases = {case.id: case for case in (one.case for one in run_folder.read(run).cases)}
    plan = "".join(json.dumps(case.to_dict()) + "\n" for case in cases.values())
    (run / "planned.jsonl").write_text(plan)
    header = json.loads((run / "run.json").read_text())
    for one in header["invocations"]:
        one["exit_code"] = 1 if told == "fail" else 0
        one["key"]["scenarios"] = run_folder.comparison_key([*cases.values()]).scenarios
    (run / "run.json").write_text(json.dumps(header))
    _seal(run)


def test_a_run_that_was_sealed_again_as_it_is_is_whole(place: Path) -> None:
    _seal(place / "run")
    assert verify(place / "run").problems == []


def test_a_record_of_another_run_is_none_of_this(place: Path) -> None:
    """The line and the record of the same case, which passed there."""
    [other] = (place / "other" / "cases.jsonl").read_text().splitlines()
    record = json.loads(other)["record"]
    shutil.copy(place / "other" / record, place / "run" / record)
    _lines(place / "run", lambda line: line if _failing(line) else json.loads(other))
    _seal(place / "run")
    [problem] = [p for p in verify(place / "run").problems if "no invocation of this run" in p]
    assert json.loads(other)["id"] in problem


def test_a_record_of_another_run_under_the_line_of_this(place: Path) -> None:
    [other] = map(json.loads, (place / "other" / "cases.jsonl").read_text().splitlines())
    shutil.copy(place / "other" / other["record"], place / "run" / other["record"])
    _seal(place / "run")
    assert any("is the record of" in text for text in verify(place / "run").problems)


def _drops_checks(account: Line) -> None:
    compared = account["figures"]["compared"]
    account["case"]["checks"] = ["memory"]
    account["figures"]["compared"] = {"memory": compared["memory"]}


def _expects(account: Line) -> None:
    account["case"]["xfail"] = "known"


@pytest.mark.parametrize(
    ("change", "told", "says"),
    [
        (_drops_checks, "pass", "no invocation of this run"),
        (_expects, "xfail", "no invocation of this run"),
    ],
)
def test_what_is_asked_is_part_of_the_seal(
    place: Path, change: Callable[[Line], None], told: str, says: str
) -> None:
    _forged(place / "run", change, told)
    assert any(says in problem for problem in verify(place / "run").problems)


@pytest.mark.parametrize(("claim", "told"), [(_expects, "xfail"), (_drops_checks, "pass")])
def test_a_case_that_was_sealed_anew_is_not_what_its_ranks_were_given(
    place: Path, claim: Callable[[Line], None], told: str, command: Any
) -> None:
    nonce = json.loads((place / "run" / "run.json").read_text())["invocations"][0]["nonce"]
    base = str(place / "base.json")
    assert command("compare", str(place / "other"), "--save", base)[0] == 0

    def change(account: Line) -> None:
        claim(account)
        account["case"]["seal"] = Case.from_dict(account["case"]).seal_of(nonce)

    _forged(place / "run", change, told)
    problems = verify(place / "run").problems
    assert any("was given another case" in problem for problem in problems), problems
    code, out, _ = command("gate", str(place / "run"), "--against", base, "--verify")
    assert code == 1 and "was given another case" in out, out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.figures.records[0].steps.pop(), "made 1 steps of 2"),
        (lambda a: a.figures.records.pop(), "its records are of ranks"),
        (
            lambda a: a.figures.compared.pop("memory"),
            "the checks of its case and of its records differ: memory",
        ),
        (lambda a: a.case.mesh.update(replicate=1), "its records are of ranks"),
        (lambda a: a.case.options.update(bucket=1), "other options than its case has"),
    ],
)
def test_figures_say_what_was_run(place: Path, change: Any, says: str) -> None:
    clean = next(result for result in read(place / "run").cases if result.verdict == "pass")
    account = Account.from_dict(records.read(place / "run" / str(clean.record)))
    assert bindings.contradiction(account) == ""
    change(account)
    assert says in bindings.contradiction(account)


def test_failures_are_no_planted_faults_by_a_word(place: Path) -> None:
    _lines(place / "run", lambda o: o | {"kind": "mutant case"} if _failing(o) else o)
    _seal(place / "run")
    assert any("stored as a planted fault" in text for text in verify(place / "run").problems)


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_code_is_that_of_the_results(place: Path, code: int) -> None:
    header = json.loads((place / "run" / "run.json").read_text())
    header["invocations"][0]["exit_code"] = code
    (place / "run" / "run.json").write_text(json.dumps(header))
    _seal(place / "run")
    [problem] = verify(place / "run").problems
    assert f"exit code {code}, but a case is fail" in problem


def test_a_plan_is_that_of_what_was_run(place: Path) -> None:
    run = place / "run"
    plan = [json.loads(line) for line in (run / "planned.jsonl").read_text().splitlines()]
    plan[0]["steps"] = 7
    (run / "planned.jsonl").write_text("".join(json.dumps(case) + "\n" for case in plan))
    _seal(run)
    problems = verify(run).problems
    assert any(f"{plan[0]['id']}: was run differently than planned" in text for text in problems)


# ------------------------------------------------------------------------------------------ flaky


def _rerun(run: Path, verdict: str) -> None:
    """Another invocation in which the failing case has that verdict."""
    [failing] = [one for one in run_folder.read_as_written(run).cases if _failing(vars(one))]
    with RunFolder(run, ["test", "--rerun-failed"]) as folder:
        [case] = folder.bind([failing.case])
        folder.plan([case])
        folder.add(made.case_line(case, verdict, "", []))
        folder.close(0)


def test_a_failure_stays_when_the_case_passes_again(place: Path, command: Any) -> None:
    run = place / "run"
    assert command("compare", str(place / "other"), "--save", str(place / "base.json"))[0] == 0
    _rerun(run, "pass")
    [flaky] = [result for result in read(run).cases if result.verdict == verdicts.FLAKY]
    assert flaky.reason.startswith("fail before, then pass, by the same code: equivalence: ")
    assert verify(run).flaky == 1
    told = Verified(3, 0, 0, [], flaky=1).sentence()
    assert told.endswith("; 1 of 3 cases are flaky: they failed before")
    code, out, _ = command("report", str(run))
    assert code == 0 and "1 flaky" in out and "fail before, then pass" in out
    code, out, _ = command("report", str(run), "--format", "html")
    assert "It held" not in out and "Not decided: 1 of 2 cases are not decided." in out
    policy = place / "policy.yaml"
    policy.write_text("verdicts: {flaky: report}\n")
    words = ("gate", str(run), "--against", str(place / "base.json"))
    code, out, _ = command(*words)
    assert code == 1 and f"breaks    verdict: {flaky.id}: flaky" in out, out
    code, out, _ = command(*words, "--policy", str(policy))
    assert code == 0, out


def test_other_code_may_be_mended(place: Path) -> None:
    _rerun(place / "run", "pass")
    header = json.loads((place / "run" / "run.json").read_text())
    header["invocations"][0]["commit"] = "another"
    (place / "run" / "run.json").write_text(json.dumps(header))
    assert {result.verdict for result in read(place / "run").cases} == {"pass"}


def test_a_failure_that_was_left_out_of_the_lines_is_missed(place: Path) -> None:
    _rerun(place / "run", "pass")
    _lines(place / "run", lambda line: None if _failing(line) else line)
    _seal(place / "run")
    assert any("its result of" in text for text in verify(place / "run").problems)
