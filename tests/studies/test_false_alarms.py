"""How often comparisons err: what is counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from shardproof.bench import session
from shardproof.bench.lines import Estimate, PairFigures, PairLine, Twin
from shardproof.bench.subjects import Pair, Side
from shardproof.commands.verify import verify
from shardproof.errors import InputError
from shardproof.runs import run_folder
from tools.studies import false_alarms


def _line(kind: str, low: float, high: float, aa: tuple[float, float], verdict: str) -> PairLine:
    a = false_alarms.SLOWED if kind == "slowed" else false_alarms.PARENT
    b = "pytorch/ddp" if kind == "other" else false_alarms.PARENT
    pair = dataclasses.replace(false_alarms.sessions(1, 0)[0], a=Side(a), b=Side(b))
    log = Estimate(24, 0.0, 0.0, 0.0, 0.1, 0.5, True)
    twin = Twin(
        ratio=1.0,
        low=aa[0],
        high=aa[1],
        half_width=0.03,
        sd=0.1,
        blocks=24,
        blocks_needed=9,
    )
    figures = PairFigures(
        ratio=(low * high) ** 0.5,
        low=low,
        high=high,
        half_width=0.04,
        sd=0.1,
        launches=3,
        p=0.5,
        p_exact=True,
        margin=0.05,
        smallest_effect=0.06,
        aa=twin,
        median_seconds={},
        launches_differ_p=None,
        log=log,
    )
    return PairLine(id=pair.id, pair=pair, verdict=verdict, figures=figures)


def test_sessions_give_the_comparisons_that_were_asked_for() -> None:
    pairs = false_alarms.sessions(alike=100, slowed=30)
    slowed = [pair for pair in pairs if pair.a.implementation == false_alarms.SLOWED]
    assert len(slowed) == 30
    assert 2 * (len(pairs) - len(slowed)) + len(slowed) == 100
    assert len({pair.id for pair in pairs}) == len(pairs)
    half = pairs[: len(pairs) // 2]
    assert abs(sum(pair in slowed for pair in half) - 15) <= 1, "the kinds do not take turns"


def test_an_interval_of_alike_code_that_excludes_one_is_an_alarm() -> None:
    lines = [
        _line("twin", 0.97, 1.04, (0.95, 1.05), "same"),
        _line("twin", 1.01, 1.09, (0.95, 1.05), "small difference"),
        _line("slowed", 1.05, 1.15, (0.90, 0.99), "slower"),
        _line("slowed", 0.99, 1.15, (0.95, 1.05), "inconclusive"),
    ]
    told = false_alarms.count(lines)
    assert (told.comparisons, told.alarms) == (6, 2)
    assert (told.slowed, told.detected) == (2, 1)
    assert told.verdicts == {"inconclusive": 1, "slower": 1}
    low, high = told.alarms_interval
    assert low < 2 / 6 < high


def test_of_a_comparison_of_two_systems_only_the_twin_counts() -> None:
    told = false_alarms.count([_line("other", 1.05, 1.15, (0.90, 0.99), "slower")])
    assert (told.comparisons, told.alarms, told.slowed) == (1, 1, 0)


@pytest.mark.parametrize(
    ("false", "missed", "expected"), [(9, 3, True), (10, 3, False), (9, 4, False)]
)
def test_the_aims_are_those_of_the_issue(false: int, missed: int, expected: bool) -> None:
    quiet = _line("twin", 0.97, 1.04, (0.95, 1.05), "same")
    loud = _line("twin", 1.01, 1.09, (0.95, 1.05), "small difference")
    slow = _line("slowed", 1.05, 1.15, (0.95, 1.05), "slower")
    unseen = slow.model_copy(update={"verdict": "inconclusive"})
    lines = [loud] * false + [quiet] * (35 - false) + [slow] * (30 - missed) + [unseen] * missed
    assert false_alarms.held(false_alarms.count(lines)) is expected


def test_too_few_comparisons_hold_nothing() -> None:
    assert not false_alarms.held(
        false_alarms.count([_line("slowed", 1.05, 1.15, (0.95, 1.05), "slower")])
    )
    assert false_alarms.sentences(false_alarms.count([])) == ["no session has figures yet"]


def test_bad_input_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("no JSON")
    with pytest.raises(InputError, match="is damaged"):
        false_alarms.run(tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        false_alarms.run(Path("/dev/null/run"))


class _Clockwork:
    """A session whose comparisons take a minute each, by a clock of its own."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def __enter__(self) -> _Clockwork:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def examine(self, pairs: list[Pair]) -> list[session.Measured]:
        return [session.Measured(pair) for pair in pairs]

    def time(self, measured: session.Measured, tell: Any) -> None:
        self.clock[0] += 60.0
        measured.problem = ("precondition", "nothing is timed here")


def test_sessions_beyond_the_budget_are_told_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that `verify` misses none of them, and a later invocation may still time them."""
    clock, run = [0.0], tmp_path / "run"
    monkeypatch.setattr(false_alarms, "Session", lambda: _Clockwork(clock))
    monkeypatch.setattr(false_alarms.time, "monotonic", lambda: clock[0])
    assert false_alarms.run(run, alike=8, slowed=4, minutes=2.5) == 3
    found = run_folder.read(run)
    assert (len(found.others["bench"]), len(found.left_out)) == (2, 4)
    assert {line.reason for line in found.left_out} == {"no time in a budget of 2.5 minutes"}
    assert "left out by the budget: 4 sessions" in capsys.readouterr().out
    assert not verify(run).problems
    assert false_alarms.run(run, alike=8, slowed=4) == 3
    found = run_folder.read(run)
    assert (len(found.others["bench"]), len(found.left_out)) == (6, 0) and not verify(run).problems


def test_a_budget_is_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than 0 minutes"):
        false_alarms.run(tmp_path / "run", minutes=0)
    assert not (tmp_path / "run").exists()
