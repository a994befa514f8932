"""Words of before keep working until 1.0, and say once what they are called now."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic as made

from shardproof import old_words, prove, verdicts
from shardproof.case import Case
from shardproof.compare import baseline, policy
from shardproof.compare.compare import compare
from shardproof.compare.gate import judge
from shardproof.errors import InputError, SelectionError
from shardproof.runs import resume, run_folder
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.select import compile_expression
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "baselines" / "cpu-2-cores.json"
CELL = "reference/ddp+small_buckets::in_memory::replicate3::adamw::clip"
OLD, NEW = (f"ddp-native::{CELL}::{lane}::quick" for lane in ("native", "working_precision"))
TODAY = datetime.date(2026, 11, 22)
SCENARIO = """\
name: of-before
about: words of before
sees: [nothing]
workload: {name: charnames_gpt}
matrix:
  implementation: reference/ddp
  backend: in_memory
  mesh: {replicate: 2}
  optimizer: sgd
  lane: [fp64, native]
include:
  - {reason: more ranks, mesh: {replicate: 3}, lane: native}
quick:
  - lane: native
checks: [equivalence, engagement]
"""


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a process of its own to the warnings."""
    monkeypatch.setattr(old_words, "_warned", set())
    yield


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_scenario_may_say_the_old_words(capsys: pytest.CaptureFixture[str]) -> None:
    found = expand(load_text(SCENARIO, "f.yaml"), installed())
    words = SCENARIO.replace("native", "working_precision").replace("engagement", "active")
    assert warnings(capsys) == [
        "warning: f.yaml:10: old name of a lane (native) - write working_precision; "
        "the old word works until 1.0",
        "warning: f.yaml:15: old name of a check (engagement) - write active; "
        "the old word works until 1.0",
    ]
    assert found == expand(load_text(words, "f.yaml"), installed())
    assert {case.lane for case in found} == {"fp64", "working_precision"}
    assert warnings(capsys) == []


def test_names_of_scenarios_and_other_values_are_no_old_words() -> None:
    text = SCENARIO.replace("of-before", "native").replace("words of before", "native")
    found = load_text(text, "f.yaml").scenario
    assert (found.name, found.about) == ("native", "native")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OLD, NEW),
        ("a[b]::c::gloo::shard2::sgd::noclip::native-bf16-fp32::full", None),
        ("prove::native::native::shard2::gpt::sgd::noclip::native", None),
        ("native::native::native::shard2::sgd::noclip::fp64::full", ""),
        ("engagement.status", "active.status"),
        ("equivalence.status", ""),
    ],
)
def test_names_are_renamed_where_a_lane_or_a_check_stands(old: str, new: str | None) -> None:
    if new is None:
        head, _, tail = old.rpartition("::native")
        new = f"{head}::working_precision{tail}"
    assert old_words.renamed_name(old) == (new or old)


def test_whole_ids_select_their_case(capsys: pytest.CaptureFixture[str]) -> None:
    for selection in (Selection([OLD]), Selection(expression=OLD, tier="full")):
        assert [case.id for case in selection.cases(installed())] == [NEW]
    [warning] = warnings(capsys)
    assert "write working_precision for native" in warning
    planned = Selection(["ddp-native"], tier="full").cases(installed())
    for selection in (Selection([OLD]), Selection(expression=OLD)):
        assert [case.id for case in selection.within(planned)] == [NEW]


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("native and fp64", False),
        ("ddp-native", True),
        ("clip::native::quick", True),
        ("not clip::NATIVE", False),
        ("working_precision", True),
        (OLD[-30:], True),
    ],
)
def test_expressions_match_ids_of_before(
    expression: str, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_expression(expression)(NEW) is holds
    is_old = "::native" in expression.lower()
    assert [("working_precision" in line) for line in warnings(capsys)] == [True] * is_old


def test_python_may_say_the_old_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"lane.*native2"):
        prove("reference/ddp", lanes=("native", "native2"), checks=("engagement",))  # type: ignore[arg-type]
    lane, check = warnings(capsys)
    assert "old name of a lane (native) - write working_precision" in lane
    assert "old name of a check (engagement) - write active" in check


def test_a_baseline_in_old_words_is_the_committed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committed, text = baseline.load(str(COMMITTED)), COMMITTED.read_text()
    assert warnings(capsys) == []
    assert committed.cases[NEW].verdict == "pass (working precision only)"
    assert committed.cases[NEW].figures["active.status"] == "pass"
    old_texts = {
        "::working_precision": "::native",
        "(working precision": "(native",
        '"active.': '"engagement.',
    }
    for new, old in old_texts.items():
        assert new in text
        text = text.replace(new, old)
    assert OLD in text
    (tmp_path / COMMITTED.name).write_text(text)
    assert baseline.load(str(tmp_path / COMMITTED.name)).cases == committed.cases
    [warning] = warnings(capsys)
    assert "cpu-2-cores.json: old word" in warning


def stored(tmp_path: Path, words: dict[str, str]) -> Path:
    """A run with one result in working precision, in ``words``."""
    case = made.case(0, id=NEW, lane="working_precision", checks=("equivalence", "active"))
    line = made.result(case, 0, "pass (working precision only)")
    line["checks"][0]["check"] = "active"
    text = json.dumps(line)
    for new, old in words.items():
        text = text.replace(new, old)
    folder = made.write(tmp_path / ("old" if words else "new"), [json.loads(text)])
    planned = json.loads(text)["case"]
    (folder / "planned.jsonl").write_text(json.dumps(planned) + "\n")
    header = json.loads((folder / "run.json").read_text())
    header["invocations"][0]["planned"] = [planned["id"]]
    (folder / "run.json").write_text(json.dumps(header))
    return folder


WORDS_OF_BEFORE = {
    "pass (working precision only)": "pass (native only)",
    "working_precision": "native",
    '"active"': '"engagement"',
}


def test_a_run_of_before_is_read_in_the_words_of_now(tmp_path: Path) -> None:
    old, new = stored(tmp_path, WORDS_OF_BEFORE), stored(tmp_path, {})
    assert "native" in (old / "cases.jsonl").read_text().replace("ddp-native", "")
    [before], [now] = (run_folder.read(folder).cases for folder in (old, new))
    assert replace(before, record=now.record, rerun=now.rerun) == now
    assert run_folder.read(old).header.invocations[0].planned == [NEW]
    assert resume.planned(old) == resume.planned(new)
    found = compare(baseline.load(str(old)), baseline.load(str(new)))
    assert found.unchanged and found.comparable == 1


def test_a_case_of_before_is_a_case_of_now() -> None:
    now = made.case(0, id=NEW, lane="working_precision", checks=("active",))
    before = now.to_dict() | {"id": OLD, "lane": "native", "checks": ("engagement",)}
    assert Case.from_dict(before) == now


POLICY = f"""\
verdicts: {{pass (native only): report}}
figures:
  allow:
    - {{cases: "*::native::*", figures: ["engagement.*"], reason: of before}}
cases: {{scope: ["*::clip::native::*"]}}
xfails:
  - {{cases: "{OLD}", reason: of before, until: 2026-12-01}}
"""


def test_a_policy_may_say_the_old_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    before, after = (baseline.load(str(stored(tmp_path, {}))) for _ in range(2))
    rules = policy.read(tmp_path / "policy.yaml")
    assert rules.policy.level("pass (working precision only)") == "report"
    policy.check(rules, before, after, TODAY)
    told = warnings(capsys)
    assert "policy.yaml:1: old name of a verdict (pass (native only))" in told[0]
    assert any("write working_precision for native" in line for line in told)
    assert any("write active for engagement" in line for line in told)
    failed = made.result(made.case(0, id=NEW, lane="working_precision"), 0, "fail")
    after = baseline.load(str(made.write(tmp_path / "failed", [failed])))
    states = [finding.state for finding in judge(compare(before, after), rules, TODAY).findings]
    assert "excused" in states and "breaks" not in states


def test_both_names_of_one_verdict_are_refused(tmp_path: Path) -> None:
    both = "{pass (native only): report, pass (working precision only): ignore}"
    (tmp_path / "policy.yaml").write_text(f"verdicts: {both}\n")
    with pytest.raises(InputError, match=r"unknown key verdicts.*pass \(native only\)"):
        policy.read(tmp_path / "policy.yaml")


def test_a_word_that_never_was_is_refused() -> None:
    with pytest.raises(SelectionError):
        Selection([OLD.replace("::native", "::natural")]).cases(installed())


def test_the_glossary_names_old_words_in_order_and_files_that_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = [line.split("|") for line in text.split("## Verdicts")[0].splitlines()]
    words = [row[1].strip().replace("`", "").lower() for row in rows if len(row) > 5][2:]
    assert words == sorted(words) and len(words) == len(set(words))
    for word in (word for table in old_words.OLD_WORDS.values() for word in table):
        assert word in text
    for name in set(re.findall(r"`((?:suite|impls)/[^`]*)`", text)):
        assert (ROOT / name).exists(), name
    for verdict in verdicts.VERDICTS:
        assert f"| `{verdict}` |" in text
