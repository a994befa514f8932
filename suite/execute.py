"""Runs what the command line chose: progress, evidence on disk, tables, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import report, verdicts
from suite.errors import Problem, SelectionError, nearest
from suite.progress import Progress
from suite.results import Durations, RunFolder, read

if TYPE_CHECKING:
    from rich.console import Console

    from suite.budget import Plan
    from suite.case import Case

RESULTS = Path("results")


def open_folder(path: Path | None) -> RunFolder:
    """The run folder at ``path``, or a new one under ``results/``.

    :raises SelectionError: it cannot be written, or holds something else.
    """
    command = ["shardproof", *sys.argv[1:]]
    try:
        return RunFolder(path, command) if path is not None else RunFolder.create(RESULTS, command)
    except OSError as error:
        where = str(error.filename or path or RESULTS)
        what = f"results cannot be written: {error.strerror}"
        raise SelectionError(Problem(what, "choose another --results folder", where)) from None


def execute(
    folder: RunFolder, plan: Plan, jobs: int, budget: float | None, durations: Durations
) -> int:
    """Run the cases of ``plan``; ``budget`` is in minutes.  Returns the exit code."""
    from suite import runner

    console = make_console()
    code = verdicts.INTERRUPTED
    found: list[dict[str, Any]] = []
    for case in plan.left_out:
        folder.leave_out(case, f"no room in a budget of {budget:g} minutes")
    try:
        with Progress(console, len(plan.chosen), "conformance") as progress:

            def note(result: dict[str, Any]) -> None:
                found.append(result)
                folder.add(result)
                if verdicts.kind(result["verdict"]) != "skip":
                    durations.note(result["id"], float(result["seconds"]))
                progress.step(result)

            seconds = None if budget is None else budget * 60
            _, late = runner.run_cases(plan.chosen, jobs, note, stop_after=seconds)
        for case in late:
            folder.leave_out(case, f"the budget of {budget:g} minutes was used up")
        code = verdicts.exit_code(verdicts.count(found))
        if found:
            report.show(found, console.print)
        left_out = len(plan.left_out) + len(late)
        tell(console, verdicts.summary(verdicts.count(found), left_out))
        medians = [f"{name} {value:.2f} s" for name, value in report.medians(found).items()]
        if medians:
            tell(console, f"median of a case: {', '.join(medians)}")
    except KeyboardInterrupt:
        _interrupted(folder, plan.chosen, found)
        left_out = len(plan.left_out) + len(plan.chosen) - len(found)
        tell(console, f"stopped: {verdicts.summary(verdicts.count(found), left_out)}")
    finally:
        durations.save()
        _finish(folder, code)
    tell(console, f"evidence: {folder.path}")
    return code


def _interrupted(folder: RunFolder, cases: Sequence[Case], found: Sequence[dict[str, Any]]) -> None:
    done = {result["id"] for result in found}
    for case in cases:
        if case.id not in done:
            folder.leave_out(case, "stopped by Ctrl-C")


def execute_mutants(
    folder: RunFolder, mutants: Sequence[Any], jobs: int, budget: float | None, all_must_run: bool
) -> int:
    """Run every mutant beside its parent and print the kill matrix.  Returns the exit code."""
    from suite import runner

    console = make_console()
    code = verdicts.INTERRUPTED
    try:
        what = f"planted faults ({len(mutants)}) and their parents"
        with Progress(console, None, what, show_red=False) as progress:

            def note(result: dict[str, Any]) -> None:
                folder.add(result, "mutant case")
                progress.step(result)

            seconds = None if budget is None else budget * 60
            kills = runner.run_mutants(mutants, jobs, note, stop_after=seconds)
        lines = [asdict(kill) for kill in kills]
        for line in lines:
            folder.add(line, "kill")
        judged = [line for line in lines if line["verdict"] != "left out"]
        if judged:
            report.show_kills(judged, console.print)
        killed = sum(bool(line["killed"]) for line in judged)
        survivors, left_out = len(judged) - killed, len(lines) - len(judged)
        counts = f"{killed} killed, {survivors} survive"
        tell(console, f"{len(judged)} faults judged ({counts}), {left_out} left out")
        open_end = not judged or (left_out > 0 and all_must_run)
        code = verdicts.NOT_DECIDED if open_end else verdicts.HELD
        if survivors:
            code = verdicts.BROKEN
    except KeyboardInterrupt:
        tell(console, "stopped")
    finally:
        _finish(folder, code)
    tell(console, f"evidence: {folder.path}")
    return code


def choose_mutants(patterns: Sequence[str]) -> list[Any]:
    """Mutants whose name, or whose parent's name, a glob matches.

    :raises SelectionError: a pattern that matches none.
    """
    from suite import registry

    declared = [registry.load_mutant(name) for name in registry.mutant_names()]
    found: list[Any] = []
    for pattern in patterns:
        short = pattern.removeprefix(registry.MUTANTS)
        named = [
            m for m in declared if fnmatchcase(m.name, short) or fnmatchcase(m.parent, pattern)
        ]
        if not named:
            known = {name for m in declared for name in (m.name, m.parent)}
            remedy = nearest(short, known, "faults")
            raise SelectionError(Problem("--impl matches no fault", remedy, pattern))
        found += [m for m in named if m not in found]
    return found


def draw_campaign(count: int, seed: int) -> list[Case]:
    """Random clean cases over all traits that each workload can carry."""
    from suite import campaign
    from suite.workloads import TRAITS, WORKLOADS

    carried = {
        name: [trait for trait, about in TRAITS.items() if name in about.applies_to]
        for name in WORKLOADS
    }
    return campaign.draw(count, seed, carried)


def _finish(folder: RunFolder, code: int) -> None:
    folder.close(code)
    (folder.path / "report.html").write_text(report.html(read(folder.path)), encoding="utf-8")


def make_console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def tell(console: Console, text: str) -> None:
    """One line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def cores() -> int:
    """Cores that this process may use."""
    with suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
