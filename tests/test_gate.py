"""The gate: each rule breaks what it should and holds what it should."""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import synthetic_runs as made
import typer.main
import yaml

from suite import cli, verdicts
from suite.comparison import baseline, policy, told
from suite.comparison.compare import compare
from suite.comparison.gate import Gate, judge
from suite.errors import InputError

ROOT = Path(__file__).parents[1]
CI = ROOT / "deploy" / "ci"
TODAY = datetime.date(2026, 11, 22)
FIRST = made.case(0).id


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., Gate]:
    """Judges ``new`` beside ``old`` by a policy in YAML."""

    def run(
        old: list[made.Line], new: list[made.Line], text: str = "", on: str = "", **more: Any
    ) -> Gate:
        before = baseline.load(str(made.write(tmp_path / "old", old)))
        after = baseline.load(str(made.write(tmp_path / "new", new, **more)))
        path = None
        if text:
            path = tmp_path / "policy.yaml"
            path.write_text(text)
        rules = policy.read(path)
        policy.check(rules, before, after)
        today = datetime.date.fromisoformat(on) if on else TODAY
        return judge(compare(before, after), rules, today)

    return run


Judge = Callable[..., Gate]


def states(found: Gate) -> list[tuple[str, str]]:
    return [(finding.state, finding.rule) for finding in found.findings]


def test_what_has_not_changed_holds(gate: Judge) -> None:
    lines = [*made.results(9), made.bench("zero1"), made.scaling("ddp"), made.kill("x")]
    found = gate(lines, lines)
    assert found.exit_code == 0 and found.findings == []
    assert found.sentence().startswith("held: 0 break")


# ------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        ("pass", "fail", [("breaks", "verdict")]),
        ("fail", "fail", [("breaks", "verdict")]),  # a known failure is no excuse: xfails are
        ("pass", "crash(rank 1)", [("breaks", "verdict")]),
        ("pass", "hang(rank 1)", [("breaks", "verdict")]),
        ("pass", "refused", [("breaks", "verdict")]),
        ("pass", "skip", [("breaks", "verdict")]),
        ("skip", "skip", []),
        ("pass", "precondition", [("breaks", "verdict")]),
        ("inconclusive", "inconclusive", []),
        ("pass", "pass (native only)", [("breaks", "verdict")]),
        ("pass", "xfail", [("breaks", "verdict")]),
        ("xfail", "xfail", []),
        ("xfail", "xpass", [("reported", "too good")]),
        ("fail", "pass", [("reported", "too good")]),
        ("skip", "pass", [("reported", "too good")]),
    ],
)
def test_verdicts_break_or_hold_by_default(
    gate: Judge, was: str, now: str, expected: list[tuple[str, str]]
) -> None:
    others = [made.result(made.case(1), 1)]  # skipped cases alone hold nothing
    old, new = (made.result(made.case(0), 0, verdict) for verdict in (was, now))
    found = gate([old, *others], [new, *others])
    assert states(found) == expected
    assert found.exit_code == (1 if expected and expected[0][0] == "breaks" else 0)


@pytest.mark.parametrize(
    ("rule", "verdict", "expected"),
    [
        ("{fail: report}", "fail", [("reported", "verdict")]),
        ("{fail: ignore}", "fail", []),
        ("{fail: new}", "fail", [("breaks", "verdict")]),
        ("{xpass: break}", "xpass", [("breaks", "verdict")]),
        ("{xpass: ignore}", "xpass", []),
        ("{skip: break}", "skip", [("breaks", "verdict")]),
        ("{skip: report}", "skip", [("reported", "verdict")]),
        ("{pass (native only): ignore}", "pass (native only)", []),
    ],
)
def test_the_policy_says_which_verdicts_break(
    gate: Judge, rule: str, verdict: str, expected: list[tuple[str, str]]
) -> None:
    new = [made.result(made.case(0), 0, verdict)]
    assert states(gate([made.result(made.case(0))], new, f"verdicts: {rule}")) == expected


def test_new_breaks_only_what_was_better(gate: Judge) -> None:
    failing = [made.result(made.case(0), 0, "fail")]
    assert gate(failing, failing, "verdicts: {fail: new}").exit_code == 0


def test_a_new_case_that_fails_breaks(gate: Judge) -> None:
    new = [made.result(made.case(0)), made.result(made.case(1), 1, "fail")]
    assert states(gate([made.result(made.case(0))], new)) == [
        ("breaks", "verdict"),
        ("reported", "new"),
    ]


# ---------------------------------------------------------------------------------------- xfails

EXPECTED = """\
xfails:
  - {cases: "ddp-gpt0::*", reason: the bug is known, until: 2026-11-30}
"""


@pytest.mark.parametrize("verdict", ["fail", "xfail", "crash(rank 0)"])
def test_an_expected_failure_is_excused_until_its_day(gate: Judge, verdict: str) -> None:
    old, new = [made.result(made.case(0))], [made.result(made.case(0), 0, verdict)]
    for day in ("2026-11-22", "2026-11-30"):
        found = gate(old, new, EXPECTED, on=day)
        assert states(found) == [("excused", "verdict")] and found.exit_code == 0


@pytest.mark.parametrize("verdict", ["fail", "xfail", "crash(rank 0)"])
def test_an_expired_one_breaks_at_its_own_line(gate: Judge, verdict: str) -> None:
    """Also where the scenario itself still says xfail, and whatever the baseline has."""
    both = [made.result(made.case(0), 0, verdict)]
    found = gate(both, both, EXPECTED, on="2026-12-01")
    assert states(found) == [("breaks", "expired"), ("breaks", "expired")]
    assert found.exit_code == 1
    assert [finding.line for finding in found.findings] == [7, 2]
    assert found.findings[1].file.endswith("policy.yaml")


def test_one_that_nothing_needs_is_told(gate: Judge) -> None:
    lines = [made.result(made.case(0))]
    for day in ("2026-11-22", "2026-12-01"):
        found = gate(lines, lines, EXPECTED, on=day)
        assert states(found) == [("reported", "not needed")] and found.exit_code == 0


def test_it_excuses_its_cases_only(gate: Judge) -> None:
    old = made.results(2)
    new = [made.result(made.case(0), 0, "fail"), made.result(made.case(1), 1, "fail")]
    assert sorted(states(gate(old, new, EXPECTED))) == [
        ("breaks", "verdict"),
        ("excused", "verdict"),
    ]


# --------------------------------------------------------------------------------- exact figures


def moved(check: str, key: str, value: Any) -> tuple[list[made.Line], list[made.Line]]:
    old = made.results(2)
    return old, made.changed(old, 0, made.figure(check, key, value))


MORE = ("traffic", "bytes_sent", "1001")
FEWER = ("traffic", "bytes_sent", "999")
OTHER = ("traffic", "formula", "else.payload_bytes")


@pytest.mark.parametrize(
    ("change", "text", "expected"),
    [
        (MORE, "", [("breaks", "figure")]),
        (MORE, "figures: {worse: report}", [("reported", "figure")]),
        (MORE, "figures: {worse: ignore}", []),
        (FEWER, "", [("reported", "too good")]),
        (FEWER, "figures: {better: break}", [("breaks", "too good")]),
        (FEWER, "figures: {better: ignore}", []),
        (OTHER, "", [("breaks", "figure")]),
        (OTHER, "figures: {changed: report}", [("reported", "figure")]),
    ],
)
def test_figures_break_by_their_direction(
    gate: Judge, change: tuple[str, str, Any], text: str, expected: list[tuple[str, str]]
) -> None:
    assert states(gate(*moved(*change), text)) == expected


ALLOW = """\
figures:
  allow:
    - cases: "ddp-gpt0::*"
      figures: [traffic.*]
      reason: a bucket more
      until: 2026-11-30
"""


def test_a_difference_may_be_allowed_until_a_day(gate: Judge) -> None:
    assert states(gate(*moved(*MORE), ALLOW)) == [("excused", "figure")]
    assert states(gate(*moved(*MORE), ALLOW, on="2026-12-01")) == [("breaks", "expired")]
    other = moved("memory", "bytes_held", 70000)
    assert states(gate(*other, ALLOW)) == [("breaks", "figure")]
    text = ALLOW.replace("      until: 2026-11-30\n", "")
    assert states(gate(*moved(*MORE), text, on="2099-01-01")) == [("excused", "figure")]


def test_figures_of_what_broke_say_nothing(gate: Judge) -> None:
    old, new = moved(*MORE)
    new[0]["verdict"] = "fail"
    assert states(gate(old, new)) == [("breaks", "verdict")]


def test_peaks_of_another_build_of_torch_do_not_break(gate: Judge) -> None:
    old, new = moved("memory", "peaks", {"0": {"update": {"all": 9}}})
    assert {state for state, _ in states(gate(old, new, torch="2.13.0+cu130"))} == {"reported"}
    assert ("breaks", "figure") in states(gate(old, new))


# ----------------------------------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("mean", "text", "expected"),
    [
        (0.0, "", []),
        (0.04, "", []),
        (0.12, "", [("breaks", "time")]),
        (0.12, "times: {slowdown: 0.2}", []),
        (0.3, "times: {slowdown: 0.2}", [("breaks", "time")]),
        (0.12, "times: {slower: report}", [("reported", "time")]),
        (-0.12, "", [("reported", "too good")]),
        (-0.12, "times: {faster: break}", [("breaks", "too good")]),
        (-0.12, "times: {faster: ignore}", []),
    ],
)
def test_slowdowns_break_beyond_what_is_allowed(
    gate: Judge, mean: float, text: str, expected: list[tuple[str, str]]
) -> None:
    old, new = [made.bench("zero1", 0.0, 0.02)], [made.bench("zero1", mean, 0.02)]
    assert states(gate(old, new, text)) == expected


SLOWER = """\
times:
  allow:
    - {pairs: "bench::zero1::*", slowdown: 0.2, reason: being rewritten, until: 2026-11-30}
"""


def test_a_pair_may_have_an_allowance_of_its_own(gate: Judge) -> None:
    old = [made.bench(name, 0.0, 0.02) for name in ("zero1", "zero2")]
    new = [made.bench(name, 0.12, 0.02) for name in ("zero1", "zero2")]
    found = gate(old, new, SLOWER)
    assert [(f.state, f.id.split("::")[1]) for f in found.findings] == [("breaks", "zero2")]
    found = gate(old, new, SLOWER, on="2026-12-01")
    assert states(found) == [("breaks", "expired"), ("breaks", "time")]


def test_noise_is_no_slowdown_but_can_be_told(gate: Judge) -> None:
    old, new = [made.bench("zero1", 0.0, 0.5)], [made.bench("zero1", 0.12, 0.5)]
    assert gate(old, new).findings == []
    assert states(gate(old, new, "times: {inconclusive: break}")) == [("breaks", "time")]


def test_a_lost_efficiency_breaks(gate: Judge) -> None:
    old, new = [made.scaling("ddp", -0.05)], [made.scaling("ddp", -0.4)]
    new[0]["wrapping"] = old[0]["wrapping"]
    assert states(gate(old, new)) == [("breaks", "time"), ("breaks", "time")]
    assert {state for state, _ in states(gate(new, old))} == {"reported"}


def test_a_comparison_that_broke_breaks(gate: Judge) -> None:
    old, new = [made.bench("zero1")], [made.bench("zero1", verdict="crash", reason="gone")]
    assert ("breaks", "verdict") in states(gate(old, new))


def test_a_ratio_that_was_not_measured_again_is_missed(gate: Judge) -> None:
    """A comparison that got no two blocks within its budget has no slowdown to show."""
    new = made.bench("zero1", verdict="inconclusive", reason="1 whole blocks: an interval needs 2")
    del new["log"]
    found = gate([*made.results(1), made.bench("zero1")], [*made.results(1), new])
    assert states(found) == [("breaks", "missing")]
    assert found.findings[0].message.endswith("an interval needs 2")
    refused = made.scaling("ddp", verdict="oversubscribed", efficiency=None, wrapping=None)
    found = gate([made.scaling("ddp", verdict="holds")], [refused])
    assert states(found) == [
        ("reported", "verdict"),
        *[("reported", "not comparable")] * 3,
    ]
    assert found.exit_code == 0


# ------------------------------------------------------------------------ what only one run has


def test_missing_cases_break_and_left_out_ones_are_told(gate: Judge) -> None:
    lines = made.results(3)
    assert states(gate(lines, lines[:2])) == [("breaks", "missing")]
    assert states(gate(lines, lines[:2], "cases: {missing: report}")) == [("reported", "missing")]
    left_out = {"kind": "left out", "id": lines[2]["id"], "reason": "no room"}
    found = gate(lines, [*lines[:2], left_out])
    assert states(found) == [("reported", "left out")] and found.exit_code == 0
    found = gate(lines, [*lines[:2], left_out], "cases: {left_out: break}")
    assert found.exit_code == 1


def test_what_another_command_times_is_not_missed_one_by_one(gate: Judge) -> None:
    """A run of cases has no comparisons: that is told once; one comparison too few breaks."""
    old = [*made.results(2), made.bench("zero1"), made.bench("zero2"), made.scaling("ddp")]
    found = gate(old, old[:2])
    assert [(f.state, f.rule, f.id) for f in found.findings] == [
        ("reported", "missing", "bench::*"),
        ("reported", "missing", "scaling::*"),
    ]
    assert gate(old, old[:2], "cases: {missing: ignore}").findings == []
    assert ("breaks", "missing") in states(gate(old, old[:3]))
    assert gate(old, old[2:]).findings[0].id == "cases"


def test_only_what_is_in_scope_is_missed(gate: Judge) -> None:
    lines = made.results(3)
    text = 'cases: {scope: ["ddp-*", "zero1-*"]}'
    assert gate(lines, lines[:2], text).findings == []
    assert states(gate(lines, lines[:1], text)) == [("breaks", "missing")]


def test_new_cases_are_told(gate: Judge) -> None:
    lines = made.results(3)
    assert states(gate(lines[:2], lines)) == [("reported", "new")]
    assert states(gate(lines[:2], lines, "cases: {new: break}")) == [("breaks", "new")]
    assert gate(lines[:2], lines, "cases: {new: ignore}").findings == []


def test_what_is_not_comparable_is_told(gate: Judge) -> None:
    old = made.results(2)

    def steps(line: made.Line) -> None:
        line["case"]["steps"] = 9

    new = made.changed(old, 0, steps)
    assert states(gate(old, new)) == [("reported", "not comparable")]
    assert states(gate(old, new, "cases: {incomparable: break}")) == [("breaks", "not comparable")]


def test_where_nothing_is_comparable_nothing_holds(gate: Judge) -> None:
    lines = made.results(2)
    assert gate(lines, lines, torch="2.14.0").exit_code == verdicts.NOT_DECIDED
    failing = [made.result(made.case(0), 0, "fail")]
    assert gate(lines, failing, torch="2.14.0").exit_code == verdicts.BROKEN


def test_a_run_that_decides_nothing_does_not_hold(gate: Judge) -> None:
    """Its budget had no room for what is judged, and what is skipped is skipped as before."""
    skipped = made.result(made.case(0), 0, "skip")
    whole = made.result(made.case(1), 1)
    late = {"kind": "left out", "id": whole["id"], "reason": "no room"}
    found = gate([skipped, whole], [skipped, late])
    assert states(found) == [("reported", "left out")]
    assert found.exit_code == verdicts.NOT_DECIDED
    assert found.sentence().startswith("nothing was decided: ")
    assert found.sentence().endswith("1 left out")


def test_a_fault_that_survives_breaks(gate: Judge) -> None:
    old, new = [*made.results(1), made.kill("x")], [*made.results(1), made.kill("x", False)]
    assert states(gate(old, new)) == [("breaks", "fault")]
    assert states(gate(old, new, "cases: {faults: report}")) == [("reported", "fault")]
    assert gate(new, old).exit_code == 0


def test_a_fault_that_was_not_planted_is_missed(gate: Judge) -> None:
    old = [*made.results(1), made.kill("x"), made.kill("y")]
    assert states(gate(old, old[:2])) == [("breaks", "missing")]
    assert gate(old, old[:2], 'cases: {scope: ["*::*"]}').findings == []
    late = {**made.kill("y", False), "verdict": "left out", "why_not": "left out: no budget"}
    assert states(gate(old, [*old[:2], late])) == [("reported", "left out")]
    [finding] = gate(old, old[:1]).findings  # a run of cases plants none: told once
    assert (finding.state, finding.rule, finding.id) == ("reported", "missing", "mutants/*")


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("about: x\nverdict: {fail: break}\n", 2, "did you mean verdicts?"),
        ("verdicts:\n  fial: break\n", 2, "did you mean fail?"),
        ("verdicts:\n  fail: brake\n", 2, "did you mean break?"),
        ("figures:\n  worse: new\n", 2, "unknown value"),
        ("times:\n  slowdown: fast\n", 2, "slowdown"),
        ("times:\n  slowdown: -1\n", 2, "greater than or equal to 0"),
        ("xfails:\n  - cases: 'ddp*'\n    reason: bug\n", 2, "missing key xfails[0].until"),
        ("xfails:\n  - cases: 'ddp*'\n    reason: bug\n    until: soon\n", 4, "YYYY-MM-DD"),
        ("xfails:\n  - cases: 'ddp*'\n    reason: bug\n    until: 2027-02-30\n", 4, "no such day"),
        ("xfails:\n  - cases: 'ddp*'\n    reason: bug\n    until: 20270101\n", 4, "not a date"),
        ("xfails:\n  - cases: 'ddp*'\n    reason: ''\n    until: 2027-02-01\n", 3, "reason"),
        (
            "figures:\n  allow:\n    - cases: 'ddp*'\n      reason: why\n      until: never\n",
            5,
            "date",
        ),
        ("xfails:\n  - {cases: 'fdsp*', reason: bug, until: 2027-01-01}\n", 2, "none of the ids"),
        ("cases:\n  scope:\n    - 'ddp*'\n    - 'nothing*'\n", 4, "none of the ids"),
        ("times:\n  allow:\n    - {pairs: 'x*', slowdown: 0.1, reason: why}\n", 3, "none of the"),
        (
            "figures:\n  allow:\n    - cases: 'ddp*'\n      figures:\n        - trafic.bytes_sent\n"
            "      reason: why\n",
            5,
            "did you mean traffic.bytes_sent?",
        ),
        ("- a list\n", 1, "not a mapping"),
    ],
)
def test_a_faulty_policy_is_refused_with_its_line(
    gate: Judge, text: str, line: int, what: str
) -> None:
    lines = made.results(2)
    with pytest.raises(InputError) as caught:
        gate(lines, lines, text)
    [problem] = caught.value.problems
    assert problem.file.endswith("policy.yaml") and problem.line == line
    assert what in str(problem)


# ----------------------------------------------------------------------------------------- forms


@pytest.fixture
def broken(gate: Judge) -> Gate:
    old = [*made.results(9), made.bench("zero1", 0.0, 0.02)]
    new = made.changed(old, 0, made.figure("traffic", "bytes_sent", "77777"))
    new = made.changed(new, 1, lambda line: line.update(verdict="fail", reason="50% of a|b\nmore"))
    new[-1] = made.bench("zero1", 0.3, 0.02)
    return gate(old, new, "xfails:\n  - {cases: 'zero1*', reason: bug, until: 2020-01-01}\n")


def test_the_summary_is_markdown_that_names_what_broke(broken: Gate) -> None:
    text = told.summary(broken)
    assert text.startswith("## Shardproof gate: broken: 4 break, 0 reported, 0 excused")
    rows = [line for line in text.splitlines() if line.startswith("| breaks")]
    assert len(rows) == 4
    unescaped = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(unescaped) == {6}  # a bar in a message does not open a column
    assert "77,777" in text and "slower" in text


def test_junit_has_a_test_for_every_result(broken: Gate) -> None:
    suite = ElementTree.fromstring(told.document(broken))[0]
    assert suite.get("tests") == "11" and suite.get("failures") == "4"
    assert suite.get("skipped") == "0" and suite.get("errors") == "0"
    failing = [test for test in suite if test.find("failure") is not None]
    assert len(failing) == 4
    assert any("77,777" in str(test.find("failure").text) for test in failing)  # type: ignore[union-attr]


def test_annotations_point_at_scenarios_and_policy(broken: Gate) -> None:
    lines = list(told.github(broken))
    assert all(re.match(r"::(error|warning|notice) [^:]*title=[^:]*::[^\n]+$", x) for x in lines)
    assert any("file=scenarios/conformance/ddp-gpt0.yaml,line=7," in line for line in lines)
    assert any("policy.yaml,line=2," in line for line in lines)
    assert any("50%25 of a|b" in line for line in lines)
    assert {line.split(" ")[0] for line in lines} == {"::error"}


def test_annotations_are_few(gate: Judge) -> None:
    """Cases of one line share one: a code host shows ten of a job."""
    new = [made.result(made.case(n), n, "fail") for n in range(0, 720, 72)]
    for line in new:
        line["case"]["source"] = "scenarios/x.yaml:3"
    found = gate(made.results(721), new, "cases: {missing: ignore}")
    [line] = told.github(found)
    assert "and 7 more" in line


# --------------------------------------------------------------------------------------- command


def test_the_command_writes_what_it_was_asked_for(tmp_path: Path, command: Any) -> None:
    lines = made.results(3)
    old, new = str(made.write(tmp_path / "old", lines)), str(made.write(tmp_path / "new", lines))
    summary, junit = tmp_path / "out" / "summary.md", tmp_path / "out" / "gate.xml"
    more = ("--summary", str(summary), "--junit", str(junit), "--annotations", "github")
    code, out, _ = command("gate", new, "--against", old, *more)
    assert code == 0 and out.startswith("held: ")
    once = summary.read_text()
    assert command("gate", new, "--against", old, *more, "--append")[0] == 0
    assert summary.read_text() == once * 2
    ElementTree.parse(junit)
    code, _, err = command("gate", new, "--against", old, "--append")
    assert code == 2 and "--summary" in err
    code, _, err = command("gate", new, "--against", old, "--on", "tomorrow")
    assert code == 2 and "YYYY-MM-DD" in err
    code, _, err = command("gate", new, "--against", old, "--policy", str(tmp_path / "none.yaml"))
    assert code == 2 and "no such file" in err
    assert command("gate", "nothing", "--against", old)[0] == 2


def test_the_day_decides(tmp_path: Path, command: Any) -> None:
    failing = [made.result(made.case(0), 0, "fail")]
    run = str(made.write(tmp_path / "run", failing))
    path = tmp_path / "policy.yaml"
    path.write_text(EXPECTED)
    arguments = ("gate", run, "--against", run, "--policy", str(path), "--on")
    assert command(*arguments, "2026-11-30")[0] == 0
    code, out, _ = command(*arguments, "2026-12-01")
    assert code == 1 and "policy.yaml:2" in out


# ------------------------------------------------------------------------------ the example files


def test_the_example_policy_is_the_default() -> None:
    read = policy.read(CI / "policy.yaml").policy
    default = policy.Policy.model_validate({})
    assert read.figures == default.figures and read.times == default.times
    assert read.cases == default.cases and read.xfails == []
    for verdict in verdicts.VERDICTS:
        assert read.level(verdict) == default.level(verdict)


def test_the_examples_in_the_example_policy_are_valid(tmp_path: Path) -> None:
    text = (CI / "policy.yaml").read_text()
    text = re.sub(r"^( *)# (?=(  |- |allow|xfails|figures|reason|until))", r"\1", text, flags=re.M)
    (tmp_path / "policy.yaml").write_text(text)
    read = policy.read(tmp_path / "policy.yaml").policy
    assert len(read.figures.allow) == len(read.times.allow) == len(read.xfails) == 1


def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CI / "github-workflow.yaml").read_text())
    return loaded


def steps() -> list[dict[str, Any]]:
    [job] = workflow()["jobs"].values()
    return list(job["steps"])


def test_actions_are_pinned_by_commit() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    for name in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", name), name
    assert workflow()["permissions"] == {"contents": "read"}


def test_the_workflow_s_commands_exist_with_these_options() -> None:
    group = typer.main.get_command(cli.app)
    found = []
    for step in steps():
        for line in str(step.get("run", "")).splitlines():
            words = shlex.split(line.split("||")[0])
            if words[:1] != ["shardproof"]:
                continue
            name = words[1]
            known = {option for p in group.commands[name].params for option in p.opts}  # type: ignore[attr-defined]
            given = {word for word in words[2:] if word.startswith("-")}
            assert given <= known, f"{name} has no {given - known}"
            found.append(name)
    assert found == ["run", "gate"]
    for path in (CI / "policy.yaml", ROOT / "Makefile"):
        assert path.is_file()
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize(("verdict", "expected"), [("pass", 0), ("fail", 1)])
def test_the_workflow_s_gate_runs_as_it_stands(tmp_path: Path, verdict: str, expected: int) -> None:
    """The step's own text, by a shell, in a folder that looks like a checkout."""
    [gate_step] = [step["run"] for step in steps() if step.get("name") == "Gate"]
    against = Path(shlex.split(gate_step)[shlex.split(gate_step).index("--against") + 1])
    lines = made.results(4)
    told_ = baseline.load(str(made.write(tmp_path / "other", lines)))
    baseline.save(told_, tmp_path / against)
    lines[2] = made.result(made.case(2), 2, verdict)
    made.write(tmp_path / "results" / "pull-request", lines)
    rules = tmp_path / "deploy" / "ci" / "policy.yaml"
    rules.parent.mkdir(parents=True)
    rules.write_text((CI / "policy.yaml").read_text())
    tools = tmp_path / "bin"
    tools.mkdir()
    tool = tools / "shardproof"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m suite "$@"\n')
    tool.chmod(0o755)
    summary = tmp_path / "step summary.md"
    summary.write_text("before\n")
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", gate_step],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    assert summary.read_text().startswith("before\n## Shardproof gate: ")
    assert ElementTree.parse(tmp_path / "gate.xml").getroot()[0].get("tests") == "4"
    assert ("::error file=scenarios/" in done.stdout) == (expected == 1)


def test_the_baseline_that_the_workflow_names_is_committed() -> None:
    [text] = [step["run"] for step in steps() if step.get("name") == "Gate"]
    words = shlex.split(text)
    path = ROOT / words[words.index("--against") + 1]
    assert json.loads(path.read_text())["kind"] == baseline.KIND
