"""The gate: each rule breaks what it should and holds what it should."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import synthetic as made
from compared import TODAY, Judge, gate_in, states

from shardproof import verdicts
from shardproof.compare import baseline, gate_output, policy
from shardproof.compare.compare import RunComparison, compare
from shardproof.compare.gate import judge
from shardproof.errors import InputError
from shardproof.scenarios import load

ROOT = Path(__file__).parents[2]
FIRST = made.case(0).id


@pytest.fixture
def gate(tmp_path: Path) -> Judge:
    return gate_in(tmp_path)


@pytest.fixture
def run_pair(tmp_path: Path) -> RunComparison:
    """A run beside itself."""
    path = made.write(tmp_path / "new", made.results(2))
    return compare(baseline.load(str(path)), baseline.load(str(path)))


def test_a_gate_with_most_cases_left_out_does_not_hold(gate: Judge) -> None:
    lines = made.results(20)
    late = [{"kind": "left out", "id": line["id"], "reason": "no room"} for line in lines[:3]]
    found = gate(lines, [*lines[3:], *late])
    assert found.exit_code == 3
    assert found.sentence().startswith("too little was decided (cases.coverage: 90%): 0 break")
    assert (
        "17 results compared with baseline 'old': 17 passed, 3 left out; 85% of the results"
        in found.sentence()
    )
    assert gate(lines, [*lines[3:], *late], "cases: {coverage: 0.85}").exit_code == 0
    assert gate(lines, [*lines[2:], *late[:2]]).exit_code == 0
    kills = [made.kill(f"fault{number}") for number in range(9)]
    unplanted = [kill | {"verdict": "left out", "killed": False} for kill in kills]
    assert gate([*lines, *kills], [*lines, *unplanted]).exit_code == 0  # a budget's main use


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
        ("pass", "pass (working precision only)", [("breaks", "verdict")]),
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
        ("{pass (working precision only): ignore}", "pass (working precision only)", []),
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
    assert states(found) == [("breaks", "expired")], "one failing case is one break"
    assert found.exit_code == 1
    [finding] = found.findings
    assert finding.id == FIRST and finding.line == 2 and finding.file.endswith("policy.yaml")
    assert 'tests="1" failures="1"' in gate_output.junit_xml(found)


@pytest.mark.parametrize("day", ["2026-11-22", "2026-12-01"])
def test_one_that_excuses_nothing_says_so(gate: Judge, day: str) -> None:
    """What is missing is no failure: an entry for it would be believed to excuse it."""
    lines = made.results(3)
    found = gate(lines, lines[1:], EXPECTED, on=day)
    assert states(found) == [("breaks", "missing"), ("reported", "not needed")]
    message = found.findings[1].message
    assert "matches only missing results (1)" in message and "cases.scope" in message
    assert ("expired on 2026-11-30" in message) == (day > "2026-11-30")
    scope = 'cases: {scope: ["zero*"]}\n'
    assert gate(lines, lines[1:], EXPECTED + scope, on=day).findings == []
    faults = EXPECTED.replace("ddp-gpt0::*", "mutants/x")
    one = [*lines, made.kill("x")]
    [finding] = gate(one, one, faults, on=day).findings
    assert finding.rule == "not needed" and "only planted faults" in finding.message


def test_one_that_expired_is_told_also_where_nothing_breaks_for_it(gate: Judge) -> None:
    both = [made.result(made.case(0), 0, "inconclusive"), made.result(made.case(1), 1)]
    assert states(gate(both, both, EXPECTED)) == []
    assert states(gate(both, both, EXPECTED, on="2026-12-01")) == [("reported", "expired")]


def test_one_that_nothing_needs_is_told(gate: Judge) -> None:
    lines = [made.result(made.case(0))]
    for day in ("2026-11-22", "2026-12-01"):
        found = gate(lines, lines, EXPECTED, on=day)
        assert states(found) == [("reported", "not needed")] and found.exit_code == 0


def test_one_that_matches_everything_says_so(gate: Judge) -> None:
    lines = [made.result(made.case(n), n, "fail") for n in range(3)]
    wide = EXPECTED.replace("ddp-gpt0::*", "*gpt0*")
    [finding] = [f for f in gate(lines, lines, wide, on="2026-11-22").findings if "wide" in f.rule]
    assert finding.message == "matches all 3 results, excuses 3: narrow it"
    assert finding.line == 2
    assert all("wide" not in f.rule for f in gate(lines, lines, EXPECTED).findings)


def test_it_excuses_its_cases_only(gate: Judge) -> None:
    old = made.results(2)
    new = [made.result(made.case(0), 0, "fail"), made.result(made.case(1), 1, "fail")]
    assert sorted(states(gate(old, new, EXPECTED))) == [
        ("breaks", "verdict"),
        ("excused", "verdict"),
    ]


STRICT = EXPECTED.replace("until: 2026-11-30", "until: 2026-11-30, strict: true")


def test_a_strict_one_breaks_where_a_case_passes(gate: Judge) -> None:
    """As pytest's: without it a fix can pass beside the entry that the target branch still has."""
    lines = [made.result(made.case(0))]
    found = gate(lines, lines, STRICT)
    assert states(found) == [("breaks", "not needed")] and found.exit_code == 1
    assert found.findings[0].line == 2
    failing = [made.result(made.case(0), 0, "fail")]
    assert states(gate(lines, failing, STRICT)) == [("excused", "verdict")]
    skipped = [made.result(made.case(0), 0, "skip"), made.result(made.case(1), 1)]
    assert gate(skipped, skipped, STRICT).findings == []


@pytest.mark.parametrize(("text", "state"), [(EXPECTED, "reported"), (STRICT, "breaks")])
def test_one_that_covers_passing_cases_is_too_wide(gate: Judge, text: str, state: str) -> None:
    old = made.results(2)
    new = [made.result(made.case(0), 0, "fail"), old[1]]
    found = gate(old, new, text.replace("ddp-gpt0::*", "*-gpt0::*"))
    assert states(found) == [("excused", "verdict"), (state, "not needed")]
    assert found.findings[1].message == "1 of 2 cases pass: narrow the pattern"


def test_an_unexpected_pass_is_not_excused(gate: Judge) -> None:
    old, new = [made.result(made.case(0), 0, "xfail")], [made.result(made.case(0), 0, "xpass")]
    assert states(gate(old, new, EXPECTED)) == [
        ("reported", "too good"),
        ("reported", "not needed"),
    ]
    found = gate(old, new, "verdicts: {xpass: break}\n" + EXPECTED)
    assert states(found) == [("breaks", "verdict"), ("reported", "not needed")]


def test_none_lasts_for_more_than_a_year(gate: Judge) -> None:
    lines = [made.result(made.case(0), 0, "fail")]
    last = TODAY + datetime.timedelta(days=policy.LONGEST)
    assert gate(lines, lines, EXPECTED.replace("2026-11-30", str(last))).exit_code == 0
    with pytest.raises(InputError, match=rf"policy\.yaml:2: .*more than a year.* write {last}"):
        gate(lines, lines, EXPECTED.replace("2026-11-30", "9999-12-31"))
    gate(lines, lines, EXPECTED.replace("2026-11-30", "9999-12-31"), on="9999-12-01")


# --------------------------------------------------------------------------------- evidence


def test_doubts_about_the_evidence_break(run_pair: RunComparison) -> None:
    rules = policy.read(None)
    assert judge(run_pair, rules, TODAY).exit_code == 0
    found = judge(run_pair, rules, TODAY, [("new", "cases.jsonl: line 1 was changed")])
    assert states(found) == [("breaks", "evidence")] and found.exit_code == 1
    assert "line 1 was changed" in gate_output.summary(found)
    assert 'failures="1"' in gate_output.junit_xml(found)


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


# ------------------------------------------------------------------------ what only one run has


def test_missing_cases_break_and_left_out_ones_are_told(gate: Judge) -> None:
    lines = made.results(3)
    assert states(gate(lines, lines[:2])) == [("breaks", "missing")]
    assert states(gate(lines, lines[:2], "cases: {missing: report}")) == [("reported", "missing")]
    left_out = {"kind": "left out", "id": lines[2]["id"], "reason": "no room"}
    found = gate(lines, [*lines[:2], left_out], "cases: {coverage: 0.6}")
    assert states(found) == [("reported", "left out")] and found.exit_code == 0
    found = gate(lines, [*lines[:2], left_out], "cases: {left_out: break}")
    assert found.exit_code == 1


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
    assert (
        "with baseline 'old': 0 passed, 1 skipped, 1 left out; 0% of the results"
        in found.sentence()
    )


def test_the_headline_tells_passed_failed_undecided_and_skipped_apart(gate: Judge) -> None:
    words = ("pass", "xfail", "fail", "crash(rank 1)", "inconclusive", "skip", "skip", "skip")
    old = [made.result(made.case(n), n, "pass" if n < 7 else "skip") for n in range(9)]
    new = [made.result(made.case(n), n, word) for n, word in enumerate(words)]
    late = {"kind": "left out", "id": old[8]["id"], "reason": "no room"}
    found = gate(old, [*new, late])
    told = found.sentence()
    counts = "1 passed, 1 xfailed, 2 failed, 1 undecided, 3 skipped, 1 left out"
    assert f"8 results compared with baseline 'old': {counts}; 57% of the results" in told, told


def test_the_share_is_of_what_the_baseline_decided_alone(gate: Judge) -> None:
    """What the baseline left open and the run decides makes up for nothing."""
    old = [made.result(made.case(n), n, "undecidable" if n < 9 else "pass") for n in range(11)]
    new = [made.result(made.case(n), n) for n in range(10)]
    late = {"kind": "left out", "id": old[10]["id"], "reason": "no room"}
    found = gate(old, [*new, late])
    told = "10 results compared with baseline 'old': 10 passed, 1 left out; 50% of the results"
    assert told in found.sentence(), found.sentence()
    assert found.exit_code == verdicts.NOT_DECIDED
    found = gate(old[:9], new[:9])
    assert found.exit_code == verdicts.HELD
    assert found.sentence().endswith("9 passed; none of them has a verdict in the baseline")


def test_what_is_missing_or_not_comparable_was_not_decided_again(gate: Judge) -> None:
    old = made.results(4)

    def other(line: made.Line) -> None:
        line["case"]["options"] = {"bucket_bytes": 9}

    edited = old
    for number in range(3):
        edited = made.changed(edited, number, other)
    found = gate(old, edited)
    assert found.exit_code == verdicts.NOT_DECIDED
    assert found.sentence().startswith("too little was decided (cases.coverage: 90%): 0 break, 3 ")
    told = "1 results compared with baseline 'old': 1 passed, 3 not comparable; 25% of the results"
    assert told in found.sentence(), found.sentence()

    found = gate(old, old[:1], "cases: {missing: report}")
    assert found.exit_code == verdicts.NOT_DECIDED
    told = "1 results compared with baseline 'old': 1 passed, 3 missing; 25% of the results"
    assert told in found.sentence(), found.sentence()
    assert gate(old, old[:1], "cases: {missing: report, coverage: 0.25}").exit_code == 0


def test_why_nothing_could_be_compared_is_said(gate: Judge) -> None:
    old = made.results(2)

    def seed(line: made.Line) -> None:
        line["case"]["workload"]["seed"] = 9

    found = gate(old, made.changed(made.changed(old, 0, seed), 1, seed))
    assert "workload.seed: 0, now 9 (2 results)" in found.sentence()


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
        ("verdicts:\n  fial: break\n", 2, "unknown key verdicts.fial (fial) - did you mean fail?"),
        ("verdicts:\n  fail: brake\n", 2, "did you mean break?"),
        ("figures:\n  worse: new\n", 2, "unknown value"),
        ("times:\n  slowdown: fast\n", 2, "slowdown"),
        ("times:\n  slowdown: -1\n", 2, "greater than or equal to 0"),
        ("xfails:\n  - cases: 'ddp*'\n    reason: bug\n", 2, "missing key xfails[0].until"),
        ("xfails:\n  - cases: 'ddp*'\n    reason: bug\n    until: soon\n", 4, "YYYY-MM-DD"),
        (
            "xfails:\n  - cases: 'ddp*'\n    reason: bug\n    until: 2027-02-30\n",
            4,
            "this day does not exist",
        ),
        ("xfails:\n  - cases: 'ddp*'\n    reason: bug\n    until: 20270101\n", 4, "not a date"),
        ("xfails:\n  - {cases: '*', reason: bug, until: 2027-01-01}\n", 2, "is too general"),
        ("xfails:\n  - {cases: '*::*', reason: bug, until: 2027-01-01}\n", 2, "is too general"),
        ("xfails:\n  - {cases: '[a-z]*', reason: bug, until: 2027-01-01}\n", 2, "is too general"),
        ("xfails:\n  - {cases: '*d*', reason: bug, until: 2027-01-01}\n", 2, "is too general"),
        (
            "xfails:\n  - {cases: '*[a-z]pt*', reason: bug, until: 2027-01-01}\n",
            2,
            "is too general",
        ),
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
        (
            "xfails:\n  - {cases: 'zzz*', reason: bug, until: 2027-01-01}\n",
            2,
            "xfails[0].cases: matches none",
        ),
        ("- a list\n", 1, "start with `about: ...`"),
        ('about: "\\u0001"\nabout: x\n', 2, "key given twice"),
        ("about: x\n---\nabout: y\n", 2, "one policy per file"),
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


def test_every_key_of_a_policy_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    for text in ("", "# all as it is\n", "about: x\n"):
        path.write_text(text)
        assert policy.read(path).policy.figures == policy.read(None).policy.figures


def test_a_policy_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="check the path of the policy") as caught:
        policy.read(tmp_path / "none.yaml")
    assert "list scenarios" not in str(caught.value)
    with pytest.raises(InputError, match="is a policy, not a scenario") as caught:
        load.load(ROOT / "deploy" / "ci" / "policy.yaml")
    assert "shardproof gate" in str(caught.value)


# ----------------------------------------------------------------------------------------- forms


def test_many_findings_that_say_the_same_are_one_line(gate: Judge) -> None:
    lines = made.results(40)
    worse = made.changed(lines, 0, made.figure("traffic", "bytes_sent", "77777"))
    worse[1]["verdict"] = "fail"
    found = gate([*lines, made.kill("x")], worse[:2])
    shown = list(gate_output.lines(found))
    assert [line.split(":")[0] for line in shown[0:4:2]] == [
        "breaks    figure",
        "breaks    verdict",
    ]
    assert shown[4].startswith("breaks    missing: 38 of 40 results: ")
    assert shown[4].endswith("and 35 more") and any(o["id"] in shown[4] for o in lines[2:])
    assert "cases.scope" in shown[5] and shown[-1].startswith("broken: 40 break")
    assert gate_output.junit_xml(found).count("<failure") == 40


def test_annotations_are_few(gate: Judge) -> None:
    """Cases of one line share one: a code host shows ten of a job."""
    new = [made.result(made.case(n), n, "fail") for n in range(0, 720, 72)]
    for line in new:
        line["case"]["source"] = "scenarios/x.yaml:3"
    found = gate(made.results(721), new, "cases: {missing: ignore}")
    [annotation] = gate_output.github(found)
    assert "the same in 9 more cases" in annotation


def test_the_summary_and_annotations_are_grouped_by_cause(gate: Judge) -> None:
    """Many cases of one cause are one row, led by the simplest and the command that reruns it."""
    new = [made.result(made.case(n, world=2 + n % 3), n, "fail") for n in range(0, 720, 24)]
    for number, line in enumerate(new):
        kind = "reference/ddp" if number % 2 else "mine:Mine"
        line["case"]["implementation"] = kind
        line["case"]["mesh"] = {"shard": 9 - number % 5}
        line["reason"] = f"equivalence: every gradient is {20 + number} times too small (3 = ranks)"
        line["rerun"] = f"shardproof run -k '{line['id']}'"
    found = gate([], new)
    text = gate_output.summary(found)
    rows = [line for line in text.splitlines() if line.startswith("| breaks")]
    assert len(rows) == 2 and all("the same in 14 more cases" in row for row in rows)
    simplest = min(
        (line for line in new if line["case"]["implementation"] == "mine:Mine"),
        key=lambda line: (line["case"]["mesh"]["shard"], line["case"]["backend"], line["id"]),
    )
    assert any(simplest["id"] in row for row in rows)
    assert simplest["rerun"] in text
    shown = list(gate_output.lines(found))  # on a terminal the same
    heads = [line for line in shown if line.startswith("breaks")]
    assert len(heads) == 2 and sum("the same in 14 more cases" in line for line in shown) == 2
    assert any(simplest["id"] in line for line in heads)


def test_no_more_annotations_than_a_code_host_shows(gate: Judge) -> None:
    new = [made.result(made.case(n), n, "fail") for n in range(30)]
    for number, line in enumerate(new):
        line["case"]["source"] = f"scenarios/x.yaml:{number}"
    shown = list(gate_output.github(gate([], new)))
    assert len(shown) == gate_output.ANNOTATIONS == 10
    assert "and 51 more places" in shown[-1] and shown[-1].startswith("::error title=")


@pytest.mark.parametrize(
    ("was", "now", "state", "says"),
    [
        ("layout", "family", "breaks", "depth worse: layout, now family"),
        ("own", "family", "breaks", "depth worse: own, now family"),
        ("family", "layout", "reported", "depth better: family, now layout"),
        ("layout", "layout", "", ""),
    ],
)
def test_a_loosened_depth_breaks(gate: Judge, was: str, now: str, state: str, says: str) -> None:
    """A pass at depth family says less than one at depth layout, so it is no equal."""
    old, new = made.results(2), made.results(2)
    for lines, depth in ((old, was), (new, now)):
        for line in lines:
            line["depth"] = depth
    if now == "family":
        del new[0]["checks"][3]["figures"]["formula"]  # what only a layout has
    found = gate(old, new)
    assert [f.state for f in found.findings] == [state] * (2 if state else 0)
    assert all(says in finding.message for finding in found.findings)


def test_a_baseline_that_does_not_tell_its_depth_misses_the_figures_of_a_layout(
    gate: Judge,
) -> None:
    old, new = made.results(2), made.results(2)
    for line in new:
        line["depth"] = "family"
    del new[0]["checks"][3]["figures"]["formula"]
    [finding] = gate(old, new).of("breaks")
    assert finding.message == "traffic.formula changed: is gone"
