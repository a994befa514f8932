"""The gate on ratios: a certain slowdown breaks, noise does not, what was not timed is missed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import synthetic as made
from compared import Judge, gate_in, states

from shardproof import verdicts
from shardproof.compare import gate_output
from shardproof.compare.gate import Gate

EXPECTED = """\
xfails:
  - {cases: "bench::zero1::*", reason: the bug is known, until: 2026-11-30}
"""
SLOWER = """\
times:
  allow:
    - {pairs: "bench::zero1::*", slowdown: 0.2, reason: being rewritten, until: 2026-11-30}
"""


@pytest.fixture
def gate(tmp_path: Path) -> Judge:
    return gate_in(tmp_path)


def test_what_has_not_changed_holds(gate: Judge) -> None:
    lines = [*made.results(9), made.bench("zero1"), made.scaling("ddp"), made.kill("x")]
    found = gate(lines, lines)
    assert found.exit_code == 0 and found.findings == []
    assert found.sentence().startswith("held: 0 break")


def test_one_of_a_comparison_is_an_expected_failure_as_well(gate: Judge) -> None:
    both = [made.result(made.case(1), 1), made.bench("zero1", verdict="crash", reason="gone")]
    assert states(gate(both, both, EXPECTED)) == [("excused", "verdict")]
    assert states(gate(both, both, EXPECTED, on="2026-12-01")) == [("breaks", "expired")]


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
    new = made.bench(
        "zero1",
        verdict="inconclusive",
        reason="an interval needs at least 2 whole blocks, and there are 1",
    )
    del new["ratio"], new["log"]
    found = gate([*made.results(1), made.bench("zero1")], [*made.results(1), new])
    assert states(found) == [("breaks", "missing")]
    assert found.findings[0].message.endswith("and there are 1")
    refused = made.scaling("ddp", verdict="oversubscribed", efficiency=None, wrapping=None)
    found = gate([made.scaling("ddp", verdict="holds")], [refused])
    assert states(found) == [
        ("reported", "verdict"),
        *[("reported", "not comparable")] * 3,
    ]
    assert found.exit_code == verdicts.NOT_DECIDED


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


def test_what_a_run_need_not_have_is_no_part_of_the_share(gate: Judge) -> None:
    """What lies out of scope, planted faults, what the baseline left open, another command's."""
    open_ = made.result(made.case(3), 3, "undecidable")
    old = [*made.results(3), open_, made.bench("zero1"), made.kill("x")]
    scope = f"cases: {{missing: report, scope: ['{old[0]['id']}']}}"
    for new, text in (
        (old[:1], scope),
        ([*old[:1], {"kind": "left out", "id": old[1]["id"], "reason": "no room"}], scope),
        (old[:3], "cases: {missing: report}"),
    ):
        found = gate(old, new, text)
        assert found.exit_code == verdicts.HELD, found.sentence()
        assert "; 100% of the results with a verdict in the baseline" in found.sentence()


def test_a_slower_ratio_has_failed(gate: Judge) -> None:
    old, new = ([made.bench("zero1", mean, 1e-4, 40)] for mean in (0.0, 0.5))
    assert ": 1 failed; 100% of the results with a verdict" in gate(old, new).sentence().replace(
        "0 passed, ", ""
    )
    assert ": 1 passed; 100% of the results with a verdict" in gate(old, old).sentence()


def test_ratios_that_show_nothing_decide_nothing(gate: Judge) -> None:
    """Two short benches: each has a ratio, and their difference is left open."""
    old, new = ([made.bench("zero1", mean, 0.5, 4)] for mean in (0.0, 0.1))
    found = gate(old, new)
    assert found.findings == [] and found.exit_code == verdicts.NOT_DECIDED
    assert found.sentence().startswith("nothing was decided: ")
    case = made.results(1)
    assert gate(old + case, new + case).exit_code == verdicts.HELD
    old, new = ([made.bench("zero1", mean, 0.04, 4)] for mean in (0.0, 0.005))
    assert gate(old, new).exit_code == verdicts.NOT_DECIDED
    wide = "times: {slowdown: 0.1}"
    assert gate(old, new, wide).exit_code == verdicts.HELD, "that much can be excluded"


@pytest.fixture
def broken(gate: Judge) -> Gate:
    old = [*made.results(9), made.bench("zero1", 0.0, 0.02)]
    new = made.changed(old, 0, made.figure("traffic", "bytes_sent", "77777"))
    new = made.changed(new, 1, lambda line: line.update(verdict="fail", reason="50% of a|b\nmore"))
    new[-1] = made.bench("zero1", 0.3, 0.02)
    return gate(old, new, "xfails:\n  - {cases: 'zero1*', reason: bug, until: 2020-01-01}\n")


def test_the_summary_is_markdown_that_names_what_broke(broken: Gate) -> None:
    text = gate_output.summary(broken)
    assert text.startswith("## Shardproof gate: broken: 3 break, 0 reported, 0 excused")
    rows = [line for line in text.splitlines() if line.startswith("| breaks")]
    assert len(rows) == 3
    unescaped = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(unescaped) == {6}  # a bar in a message does not open a column
    assert "77,777" in text and "slower" in text


def test_junit_has_a_test_for_every_result(broken: Gate) -> None:
    suite = ElementTree.fromstring(gate_output.junit_xml(broken))[0]
    assert suite.get("tests") == "10" and suite.get("failures") == "3"
    assert suite.get("skipped") == "0" and suite.get("errors") == "0"
    failing = [test for test in suite if test.find("failure") is not None]
    assert len(failing) == 3
    assert any("77,777" in str(test.find("failure").text) for test in failing)  # type: ignore[union-attr]


def test_annotations_point_at_scenarios_and_policy(broken: Gate) -> None:
    lines = list(gate_output.github(broken))
    assert all(re.match(r"::(error|warning|notice) [^:]*title=[^:]*::[^\n]+$", x) for x in lines)
    assert any("file=scenarios/conformance/ddp-gpt0.yaml,line=7," in line for line in lines)
    assert any("policy.yaml,line=2," in line for line in lines)
    assert any("50%25 of a|b" in line for line in lines)
    assert {line.split(" ")[0] for line in lines} == {"::error"}
