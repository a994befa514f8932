"""What is seen while cases run: which of them, for how long, and how long it will take."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import synthetic
from commands import ROOT, shardproof
from made_case import made_case
from rich.console import Console

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.commands import console as module
from shardproof.commands.console import (
    FaultProgress,
    Progress,
    echo,
    make_console,
    print_line,
)
from shardproof.table import Table


def cases(count: int, name: str = "mine:Mine") -> list[Case]:
    return [made_case(name, {"replicate": 2}, id=f"s::{name}::{n}") for n in range(count)]


def result(case: Case, verdict: str = "pass", reason: str = "") -> CaseResult:
    return CaseResult(case.id, case, verdict, reason, rerun="shardproof run s")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress sees."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def console(width: int, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=terminal, highlight=False), file


def test_piped_lines_name_what_runs_and_the_time_left(clock: list[float]) -> None:
    out, file = console(240, False)
    made = cases(4)
    with Progress(out, made, "judging", {case.id: 2.0 for case in made}) as progress:
        progress.started(made[0])
        progress.started(made[1])
        clock[0] = 29.0
        progress.tick()
        clock[0] = 30.0
        progress.step(result(made[0]))
        progress.started(made[2])
        clock[0] = 60.0
        progress.tick()  # nothing ended since, and still it says what runs
        clock[0] = 89.0
        progress.tick()
    assert file.getvalue().splitlines() == [
        "judging: 4 cases",
        "  1/4 in 30 s, about 90 s left: 1 pass; running: s::mine:Mine::1 (30 s)",
        "  1/4 in 60 s, about 3 min left: 1 pass; running: s::mine:Mine::1 (60 s), "
        "s::mine:Mine::2 (30 s)",
    ]


def test_nothing_is_estimated_before_the_first_case_has_ended(clock: list[float]) -> None:
    """What new cases will take is a guess: 0/2 in 27 s, about 1 s left."""
    out, file = console(240, False)
    made = cases(2)
    with Progress(out, made, "judging", {case.id: 0.5 for case in made}) as progress:
        progress.started(made[0])
        clock[0] = 31.0
        progress.tick()
    assert file.getvalue().splitlines()[1] == "  0/2 in 31 s: running: s::mine:Mine::0 (31 s)"


def test_progress_can_be_left_out(clock: list[float]) -> None:
    for terminal in (True, False):
        out, file = console(80, terminal)
        made = cases(2)
        with Progress(out, made, "judging", {}, visible=False) as progress:
            progress.started(made[0])
            clock[0] += 100.0
            progress.step(result(made[0], "fail", "equivalence: differs"))
        assert file.getvalue() == ""


def test_colours_that_are_forced_move_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    made = make_console()
    assert made.is_terminal and not made.is_interactive


def test_no_color_leaves_colours_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    out = Console(file=file, width=80, force_terminal=True)
    out.print(Table("", ("a",), [("b",)], marks=["bad"]))
    assert "\x1b[31m" not in file.getvalue() and "b" in file.getvalue()


def test_a_terminal_shows_a_live_view_as_narrow_as_it_is(clock: list[float]) -> None:
    out, file = console(60, True)
    made = cases(3, "package.module:AClassWithALongName_" + "x" * 40)
    with Progress(out, made, "judging", {}) as progress:
        for case in made:
            progress.started(case)
        clock[0] = 3.0
        progress.step(result(made[0]))
        shown = list(progress._bar.get_renderables())
    drawn, text = Console(file=io.StringIO(), width=60, record=True), ""
    for part in shown:
        drawn.print(part)
    text = drawn.export_text()
    assert all(len(line.rstrip()) <= 60 for line in text.splitlines())
    whole = "".join(text.split())
    assert (
        "1/3" in whole
        and "1pass" in whole
        and "…" not in whole
        and made[1].id in whole
        and made[2].id in whole
    )
    assert made[0].id not in whole and "left" in text
    assert file.getvalue(), "something was drawn"


def test_a_cause_is_named_once_while_cases_run(clock: list[float]) -> None:
    out, file = console(240, False)
    made = cases(3)
    with Progress(out, made, "judging", {}) as progress:
        for world, case in enumerate(made, 2):
            reason = f"equivalence: every gradient is {world} times too small"
            progress.step(result(case, "fail", reason))
    shown = file.getvalue()
    assert shown.count("fail: s::mine:Mine") == 1
    assert shown.count("times too small") == 1 and "3 fail" in shown


def test_a_kill_does_not_look_like_a_failure(clock: list[float]) -> None:
    out, file = console(240, True)
    faults: list[Any] = cases(2, "mutants/ddp_never_reduces")
    with FaultProgress(out, faults, "planted faults", {}) as progress:
        for case in faults:
            progress.step(result(case, "fail", "equivalence: differs"))
    shown = file.getvalue()
    assert "2 faults caught" in shown
    assert "fail" not in shown and "\x1b[1;31m" not in shown and "\x1b[31m" not in shown


def test_one_is_told_without_a_plural(clock: list[float]) -> None:
    out, file = console(240, False)
    pair = cases(1, "mutants/ddp_never_reduces") + cases(1, "reference/ddp")
    with FaultProgress(out, pair, "planting 1 fault", {}) as progress:
        progress.step(result(pair[0], "fail", "equivalence: differs"))
        progress.step(result(pair[1]))
    assert file.getvalue().splitlines()[-1].endswith(": 1 fault caught, 1 parent passed")
    with Progress(out, cases(1), "judging", {}):
        pass
    assert file.getvalue().splitlines()[-1] == "judging: 1 case"


def test_a_command_whose_output_nobody_reads_still_ends_with_its_verdict(tmp_path: Path) -> None:
    lines = synthetic.results(4)
    run = str(synthetic.write(tmp_path / "run", lines))
    other = str(synthetic.write(tmp_path / "other", lines[:3]))
    for words, code in (
        (("gate", run, "--against", run), verdicts.HELD),
        (("gate", other, "--against", run), verdicts.BROKEN),
        (("report", run), verdicts.HELD),
        (("verify", run), verdicts.BROKEN),  # it has no records
    ):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            done = shardproof(*words, stdout=pipe)
        assert (done.returncode, done.stderr) == (code, ""), words


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_standard_streams_may_be_closed(tmp_path: Path, closed: str) -> None:
    run = synthetic.write(tmp_path / "run", synthetic.results(4))
    words = shlex.join([sys.executable, "-m", "shardproof", "report", str(run)])
    done = subprocess.run(
        ["bash", "-c", f"{words} {closed}"], cwd=ROOT, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("::error file=x::mine", ":\\:error file=x::mine"),
        ("fail\n   \t ::stop-commands::x", "fail\n   \t :\\:stop-commands::x"),
        ("\u3000::add-mask::x", "\u3000:\\:add-mask::x"),
        ("done ##[error]mine", "done #\\#[error]mine"),
        ("##vso[task.complete]", "#\\#vso[task.complete]"),
        ("ddp-gpt::reference/ddp", "ddp-gpt::reference/ddp"),
        ("## Heading [1]", "## Heading [1]"),
    ],
)
def test_what_others_wrote_is_no_command_of_a_runner(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runners of GitHub trim blanks before they look; those of Azure look anywhere."""
    print_line(make_console(), text)
    echo(text)
    echo(text, raw=True)
    assert capsys.readouterr().out.expandtabs() == f"{told}\n{told}\n{text}\n".expandtabs()
