"""Runs what the command line chose: progress, evidence on disk, tables, exit codes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof import report, verdicts
from shardproof.commands.progress import Progress
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.runs.integrity import damage_is_bad_input
from shardproof.runs.records import RecordError
from shardproof.runs.run_folder import Durations, RunFolder, read

if TYPE_CHECKING:
    from rich.console import Console

    from shardproof.case import Case
    from shardproof.scenarios.budget import CaseSchedule

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
    except RecordError as error:
        raise SelectionError(Problem(str(error), "choose another --results folder")) from None


def execute(
    folder: RunFolder,
    plan: CaseSchedule,
    jobs: int,
    budget: float | None,
    durations: Durations,
    kept: Sequence[dict[str, Any]] = (),
    junit_file: Path | None = None,
) -> int:
    """Run the cases of ``plan``; ``budget`` is in minutes.  Returns the exit code.

    ``kept`` are results that the folder holds already: they count, too, as do those of cases that
    the budget leaves out.
    """
    from shardproof.cases.runner import run_cases
    from shardproof.report import junit

    console = make_console()
    found = [*kept]

    def body(interrupts: Interrupts) -> int:
        folder.plan(plan.chosen + plan.left_out)
        for case in plan.left_out:
            folder.leave_out(case, f"no room in a budget of {budget:g} minutes")
        with Progress(console, len(plan.chosen), "judging") as progress:

            def note(result: dict[str, Any]) -> None:
                with interrupts.held():  # a line on disk and a result that counts are one thing
                    folder.add(result)
                    found.append(result)
                if verdicts.kind(result["verdict"]) != "skip":
                    durations.note(result["id"], float(result["seconds"]))
                progress.step(result)

            seconds = None if budget is None else budget * 60
            _, late = run_cases(plan.chosen, jobs, note, seconds, folder.keep)
        for case in late:
            folder.leave_out(case, f"the budget of {budget:g} minutes was used up")
        left_out = [*plan.left_out, *late]
        stay = _results_of(folder, left_out)
        found.extend(stay)
        if found:
            report.show(found, console.print)
            report.show_memory(found, console.print)
            report.show_bubbles(found, console.print)
        for line in report.skips(found):
            tell(console, line)
        if stay:
            what = f"not run again, results of before stay ({len(stay)})"
            tell(console, f"{what}: no room in a budget of {budget:g} minutes")
        tell(console, verdicts.summary(verdicts.count(found), len(left_out) - len(stay)))
        medians = [f"{name} {value:.2f} s" for name, value in report.medians(found).items()]
        if medians:
            tell(console, f"median of a case: {', '.join(medians)}")
        return verdicts.exit_code(verdicts.count(found))

    def interrupted() -> None:
        done = {result["id"] for result in found}
        for case in plan.chosen:
            if case.id not in done:
                folder.leave_out(case, "stopped by Ctrl-C")
        left_out = len(plan.left_out) + len(plan.chosen) - (len(found) - len(kept))
        tell(console, f"stopped: {verdicts.summary(verdicts.count(found), left_out)}")

    def finish() -> None:
        durations.save()
        told = junit.document(read(folder.path))
        (folder.path / "junit.xml").write_text(told, encoding="utf-8")
        folder.seal("junit.xml")
        if junit_file is not None:
            junit_file.parent.mkdir(parents=True, exist_ok=True)
            junit_file.write_text(told, encoding="utf-8")

    return guarded(folder, console, body, interrupted, finish)


def _results_of(folder: RunFolder, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What ``folder`` holds of ``cases`` that a budget left out: it hides no failure of before."""
    names = {case.id for case in cases}
    return [result for result in read(folder.path).cases if result["id"] in names] if names else []


def execute_mutants(
    folder: RunFolder, mutants: Sequence[Any], jobs: int, budget: float | None, all_must_run: bool
) -> int:
    """Run every mutant beside its parent and print the kill matrix.  Returns the exit code."""
    from shardproof.cases.kills import mutant_cases, run_mutants

    console = make_console()

    def body(interrupts: Interrupts) -> int:
        folder.plan(mutant_cases(mutants), [mutant.name for mutant in mutants])
        what = f"planted faults ({len(mutants)}) and their parents"
        with Progress(console, None, what, show_red=False) as progress:

            def note(result: dict[str, Any]) -> None:
                with interrupts.held():
                    folder.add(result, "mutant case")
                progress.step(result)

            seconds = None if budget is None else budget * 60
            kills = run_mutants(mutants, jobs, note, seconds, folder.keep)
        lines = [asdict(kill) for kill in kills]
        for line in lines:
            folder.add(line, "kill")
        judged = [line for line in lines if line["verdict"] != "left out"]
        late = {line["name"] for line in lines} - {line["name"] for line in judged}
        stay = [line for line in read(folder.path).kills if line["name"] in late]
        judged += [line for line in stay if line["verdict"] != "left out"]
        if judged:
            report.show_kills(judged, console.print)
        killed = sum(bool(line["killed"]) for line in judged)
        survivors, left_out = len(judged) - killed, len(lines) - len(judged)
        counts = f"{killed} killed, {survivors} survive"
        tell(console, f"{len(judged)} faults judged ({counts}), {left_out} left out")
        if survivors:
            return verdicts.BROKEN
        open_end = not judged or (left_out > 0 and all_must_run)
        return verdicts.NOT_DECIDED if open_end else verdicts.HELD

    return guarded(folder, console, body, lambda: tell(console, "stopped"), lambda: None)


def guarded(
    folder: RunFolder,
    console: Console,
    body: Callable[[Interrupts], int],
    interrupted: Callable[[], None],
    finish: Callable[[], None],
) -> int:
    """Run ``body``; whatever ends it, what is written stays and the folder is closed.

    A folder that can no longer be written ends the run with a sentence that names the file.
    """
    code = verdicts.INTERRUPTED
    with Interrupts() as interrupts, damage_is_bad_input(folder.path):
        try:
            try:
                code = body(interrupts)
            except KeyboardInterrupt:
                interrupted()
            _finish(folder, code, finish)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            where = error.filename or folder.path
            tell(console, f"{where}: {error.strerror} - what was written is kept; make room, then")
            tell(console, f"    shardproof run --resume --results {folder.path}")
            red = verdicts.exit_code(verdicts.count(read(folder.path).cases)) == verdicts.BROKEN
            code = verdicts.BROKEN if red else verdicts.NOT_DECIDED
    tell(console, f"evidence: {folder.path}")
    return code


#: The folder is full, over quota, gone read-only, or failing.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class Interrupts:
    """Ctrl-C (or SIGTERM) once stops a run in order; a second one does not disturb the tidying."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._holding = self._pending = self._came = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: object) -> None:
        if self._came:
            os.write(2, b"stopping: ranks are being ended, results kept\n")
            return
        self._came = True
        if self._holding:
            self._pending = True
        else:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is inside is done whole; an interrupt comes after it."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt


def choose_mutants(patterns: Sequence[str]) -> list[Any]:
    """Mutants whose name, or whose parent's name, a glob matches.

    :raises SelectionError: a pattern that matches none.
    """
    from shardproof import registry

    declared = [registry.load_mutant(name) for name in registry.mutant_names()]
    found: list[Any] = []
    for pattern in patterns:
        short = pattern.removeprefix(registry.MUTANTS)
        named = [
            m for m in declared if fnmatchcase(m.name, short) or fnmatchcase(m.parent, pattern)
        ]
        if not named:
            known = {name for m in declared for name in (m.name, m.parent)}
            remedy = nearest(short, known, "faults and their parents")
            raise SelectionError(Problem("--impl matches no fault", remedy, pattern))
        found += [m for m in named if m not in found]
    return found


def _finish(folder: RunFolder, code: int, more: Callable[[], None]) -> None:
    more()
    folder.close(code)
    run = read(folder.path)
    for name, told in (("report.html", report.html(run)), ("report.md", report.document(run))):
        (folder.path / name).write_text(told, encoding="utf-8")
        folder.seal(name)


def make_console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def tell(console: Console, text: str) -> None:
    """One line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
