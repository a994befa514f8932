"""From records to a verdict: gravest cause first, and nothing judged is no pass."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import verdicts
from shardproof.launch import frames
from shardproof.watch.calls import Total, place_in_script
from shardproof.watch.judge import decide
from shardproof.watch.record import End, Finding, Kind, RankRecord, Watched
from shardproof.watch.report import Report, document, html, text


def rank(number: int, *findings: Finding, **changes: Any) -> RankRecord:
    """A rank of two that made ten steps and compared three of them."""
    seen = Watched("SGD", 10, [1, 2, 10], 4, 64, {"parameters": 3, "gradients": 2})
    given: dict[str, Any] = {"initialised": True, "optimizers": [seen], "ended": True} | changes
    world = given.pop("world", 2)
    return RankRecord(
        number, world, 100 + number, "host", "train.py", "2.13", findings=list(findings), **given
    )


def found(kind: Kind, step: int = 5, **changes: Any) -> Finding:
    return Finding(kind, f"{kind} at step {step}", step=step, **changes)


def both(*findings: Finding, **changes: Any) -> dict[int, RankRecord]:
    return {number: rank(number, *findings, **changes) for number in (0, 1)}


def test_equal_replicas_pass_and_name_what_was_compared() -> None:
    judged = decide(both(), [], {})
    assert judged.verdict == "pass" and judged.findings == []
    assert [*judged.held] == [
        *("parameters at 3 steps", "gradients at 2 steps", "hyperparameters", "finite values")
    ]


def test_the_cause_comes_before_what_follows_from_it() -> None:
    kinds: tuple[Kind, ...] = ("parameters", "optimizer state", "gradients", "hyperparameters")
    judged = decide(both(*(found(kind) for kind in kinds)), [], {})
    assert judged.verdict == "fail" and judged.reason == "hyperparameters at step 5"
    assert [f.kind for f in judged.findings] == [*reversed(kinds)], "told once, not by each rank"


def test_the_first_value_that_is_not_finite_counts() -> None:
    records = {
        0: rank(0, Finding("non-finite", "at step 7", step=7, name="parameter of b")),
        1: rank(1, Finding("non-finite", "at step 3", step=3, name="gradient of a")),
    }
    judged = decide(records, [], {})
    assert judged.reason == "a value of the gradient of a is not finite on rank 1 at step 3"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"initialised": False}, "no rank called init_process_group"),
        ({"optimizers": []}, "no step of an optimizer"),
        ({"optimizers": [Watched("SGD", 10)]}, "no parameter has known replicas"),
    ],
)
def test_nothing_judged_is_no_pass(changes: dict[str, Any], says: str) -> None:
    judged = decide(both(**changes), [], {})
    assert judged.verdict == "undecidable" and says in judged.reason
    assert verdicts.exit_code({judged.verdict: 1}) == verdicts.NOT_DECIDED


def test_what_could_not_be_compared_is_open() -> None:
    judged = decide(both(found("not compared", broken=False)), [], {})
    assert judged.verdict == "undecidable"


@pytest.mark.parametrize(
    ("total", "verdict"),
    [
        (Total("send", "float32", "ranks 0-1"), "undecidable"),
        (Total("all_reduce", "float32", "ranks 0-1"), "fail"),
    ],
)
def test_stages_of_a_pipeline_are_no_replicas_unasked(total: Total, verdict: str) -> None:
    differ = found("parameters", assumed=True)
    assert decide(both(differ, totals=[total]), [], {}).verdict == verdict
    said = found("parameters", assumed=False)
    assert decide(both(said, totals=[total]), [], {}).verdict == "fail"


def test_ranks_that_made_other_numbers_of_steps() -> None:
    records = {0: rank(0), 1: rank(1, optimizers=[Watched("SGD", 9, [1, 2, 9], 4)])}
    judged = decide(records, [End(0, 0), End(1, 0)], {})
    assert judged.verdict == "fail"
    assert judged.reason == "rank 1 made one step fewer: rank 0 made 10; rank 1 made 9"


@pytest.mark.parametrize(
    ("behind_at", "step", "first"), [(5, 5, "steps"), (5, 3, "gradients"), (0, 5, "gradients")]
)
def test_a_step_left_out_is_the_cause_of_what_differs_from_then_on(
    behind_at: int, step: int, first: str
) -> None:
    """Not of what differs before; and where calls tell nothing, of nothing."""
    told = found("gradients", step)
    mine, other = (Watched("SGD", n, [1, 2, n], 4, behind_at=behind_at) for n in (10, 8))
    records = {0: rank(0, told, optimizers=[mine]), 1: rank(1, told, optimizers=[other])}
    judged = decide(records, [End(0, 0), End(1, 0)], {})
    assert judged.verdict == "fail" and judged.findings[0].kind == first
    assert {f.kind for f in judged.findings} == {"steps", "gradients"}
    if first == "steps":
        assert judged.reason.startswith("rank 1 made 2 steps fewer: rank 0 made 10; rank 1 made 8")


def test_a_rank_that_dies_is_the_cause_not_who_waits_for_it() -> None:
    gone = {"error_type": "RuntimeError", "error": "Connection closed by peer"}
    records = {0: rank(0, **gone, consequence=True, is_comm_error=True, ended=False), 1: rank(1)}
    judged = decide(records, [End(0, 1, ended=2.0), End(1, signal=11, ended=1.0)], {})
    assert judged.verdict == "crash"
    assert judged.reason == "rank 1 was killed: SIGSEGV; rank 0 could not continue without it"


@pytest.mark.parametrize("ends", [[], [End(0), End(1)]], ids=["torchrun", "interrupted"])
def test_ranks_without_an_end_are_no_pass(ends: list[End]) -> None:
    judged = decide(both(ended=False), ends, {})
    assert judged.verdict == "undecidable"
    assert judged.reason.startswith("ranks 0-1 did not reach the end")


def test_all_forms_of_the_report_say_the_same() -> None:
    odd = "parameters start to differ <b>\x1b[2J"
    broken = Finding("parameters", odd, step=5)
    report = Report(decide(both(broken, world=3), [], {}))
    for form in (text(report), document(report), html(report)):
        assert "\x1b" not in form and "\\x1b[2J" in form
        assert "an oracle" in form and form.count("rank 2 left no record") == 1
        assert "steps between comparisons" in form
    assert "<b>" not in html(report) and "&lt;b&gt;" in html(report)


def test_what_was_found_is_told_beside_nothing_judged() -> None:
    """Also where the headline is another: the first finding was lost so."""
    judged = decide(both(found("not compared", broken=False), optimizers=[]), [], {})
    assert judged.reason.startswith("nothing was judged")
    assert Report(judged).others() == ["not compared at step 5"]


def test_missing_ranks_are_told_once_beside_a_crash() -> None:
    records = {0: rank(0, world=3, error_type="ValueError", error="bad", ended=False)}
    judged = decide(records, [], {})
    assert judged.verdict == "crash" and judged.reason.startswith("rank 0 raised ValueError")
    assert text(Report(judged)).count("ranks 1-2 left no record") == 1


@pytest.mark.parametrize("ended", [1.0, 2.1], ids=["before", "its process later"])
def test_a_rank_that_ended_first_is_the_cause(ended: float) -> None:
    gone = {"error_type": "RuntimeError", "error": "Connection closed by peer"}
    records = {0: rank(0, **gone, consequence=True, is_comm_error=True, ended=False), 1: rank(1)}
    judged = decide(records, [End(0, 1, ended=2.0), End(1, 0, ended=ended)], {})
    assert judged.verdict == "crash"
    assert judged.reason == "rank 1 ended the script; rank 0 could not continue without it"


def test_frames_of_the_suite_are_not_shown() -> None:
    """Neither where a rank waits at its end, nor where the script stands further out."""
    suite, torch_ = frames.__file__, "/x/site-packages/torch/nn.py"
    own = [("<string>", 1, "<module>"), (suite, 3, "main"), ("/home/train.py", 7, "step")]
    assert place_in_script([*own, (torch_, 5, "f"), (suite, 9, "_settle")]) == (
        "in step (/home/train.py:7)"
    )
    assert place_in_script([("<string>", 1, "<module>"), (suite, 9, "_settle")]) == ""


def test_ranks_without_a_record_are_no_pass() -> None:
    judged = decide({0: rank(0), 1: rank(1, world=4)}, [], {})
    assert judged.verdict == "undecidable"
    assert judged.reason.startswith("ranks 2-3 left no record")


def test_a_report_says_where_it_comes_from_and_ends_in_its_finding() -> None:
    """The first line of a long report has left the screen when its last one is printed."""
    told: dict[str, Any] = {
        "arguments": ["--lr", "0 1"],
        "command": "shardproof watch train.py --nproc 2 -- --lr '0 1'",
        "began": "2026-01-02 03:04:05 UTC",
        "machine": "EPYC, 2 cores",
    }
    report = Report(decide(both(found("parameters"), **told), [], {}))
    for form in (text(report), document(report), html(report)):
        for said in ("train.py --lr", "watch train.py --nproc 2", "2026-01-02 03:04:05 UTC"):
            assert said in form
        assert "host (EPYC, 2 cores)" in form
    lines = text(report).splitlines()
    assert lines[0] == lines[-1] == "fail: parameters at step 5"
    sound = text(Report(decide(both(), [], {}))).splitlines()
    assert sum(line.startswith("pass: ") for line in sound) == 1
