"""Comparisons and cells measured one after the other: within a budget, kept as they end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardproof import verdicts
from shardproof.bench import lines as stored
from shardproof.bench import stats
from shardproof.bench.command.options import FailOn
from shardproof.bench.command.time_budget import Schedule, choose, duration_name, estimates
from shardproof.bench.evidence import keep, keep_report
from shardproof.bench.lines import CellLine, PairLine
from shardproof.bench.reported import Cells, Pairs
from shardproof.bench.session import Measured, Session
from shardproof.bench.subjects import Cell, Pair
from shardproof.commands import supervision
from shardproof.commands.console import ProgressBar, echo, make_console, print_line
from shardproof.report import brief
from shardproof.runs.durations import Durations
from shardproof.runs.run_folder import RunFolder, read
from shardproof.runs.shard import Cut

if TYPE_CHECKING:
    from shardproof.bench.command.plan import TimedPlan

Line = PairLine | CellLine


def dry_run(plan: TimedPlan, durations: Durations) -> None:
    """Print the ids of what would be measured or modelled, and of what the budget leaves out.

    :raises SelectionError: a system refuses its options.
    """
    budget = plan.how.budget
    items = [Measured(subject) for subject in plan.subjects]
    scaling = any(isinstance(subject, Cell) for subject in plan.subjects)
    if scaling and budget is not None:
        with Session() as session:  # which cells are timed depends on what fits on this machine
            items = session.examine(plan.subjects)
    schedule = choose(items, durations, budget, plan.passes)
    for item in schedule.chosen:
        echo(item.subject.id)
    for item in schedule.left_out:
        echo(f"left out by the budget: {item.subject.id}", err=True)
    if not scaling or budget is not None:
        echo(schedule.summary(), err=True)


def run(session: Session, plan: TimedPlan, durations: Durations, cut: Cut | None = None) -> int:
    """Measure all pairs, or all cells, of ``plan`` into a run folder; the exit code.

    ``cut``: the selection that they are the part ``plan.shard`` of.

    What does not fit into the budget is left out by name; with a cell, those that would have been
    modelled from its launches.

    :raises SelectionError: a system cannot be loaded, or refuses its options.
    """
    items = session.examine(plan.subjects)
    schedule = choose(items, durations, plan.how.budget, plan.passes)
    with supervision.open_folder(plan.how.results) as folder:
        if cut is not None and plan.shard is not None:
            folder.cut(cut, plan.shard)
        return _Measuring(session, plan, schedule, durations, folder).run()


@dataclass(eq=False)
class _Measuring:
    """The measurements of one command; ``late``: items that had no room."""

    session: Session
    plan: TimedPlan
    schedule: Schedule
    durations: Durations
    folder: RunFolder

    def __post_init__(self) -> None:
        self.console = make_console()
        self.items = [*self.schedule.chosen, *self.schedule.left_out]
        self.timed = [item for item in self.items if item.timed]
        self.scaling = bool(self.items) and isinstance(self.items[0].subject, Cell)
        subjects = (item.subject for item in self.items)
        self.expected = estimates(subjects, self.durations, self.plan.passes)
        self.lines: list[Line] = []
        self.late: list[Measured] = []

    def run(self) -> int:
        """Measure; the exit code."""
        ends, quiet = (self._body, self._stopped, self.durations.save), self.plan.how.quiet
        return supervision.supervised(self.folder, self.console, *ends, quiet=quiet)

    def _body(self, interrupts: supervision.Interrupts) -> int:
        self.folder.plan_others([item.subject.id for item in self.items])
        known = {line.id for line in self._kept()}
        if self.plan.how.budget is not None and self.plan.how.progress:
            print_line(self.console, self.schedule.summary())
        for item in self.items:
            if item.source not in self.late and self._fits(item):
                self._measure(item, interrupts)
                continue
            self.late.append(item)
            if item.subject.id not in known:  # figures of an earlier invocation stay
                why = f"no time in a budget of {self.plan.how.budget:g} minutes"
                self.folder.leave_out_other(item.subject.to_dict(), why)
        self._show()
        names = [item.subject.id for item in self.late]
        earlier = {line.id: line for line in self._kept() if line.id in names}
        for name in names:
            stays = f" (kept: {earlier[name].verdict})" if name in earlier else ""
            print_line(self.console, f"left out by the budget: {name}{stays}")
        # Figures of before are no work of now, but a budget hides no failure among them.
        fail_on = self.plan.how.fail_on or ()
        failed = exit_code(list(earlier.values()), fail_on) == verdicts.BROKEN
        return verdicts.BROKEN if failed else exit_code(self.lines, fail_on)

    def _fits(self, item: Measured) -> bool:
        budget = self.plan.how.budget
        end = time.monotonic() - self.plan.began + self.expected[item.subject.id]
        return budget is None or not item.timed or end <= budget * 60

    def _measure(self, item: Measured, interrupts: supervision.Interrupts) -> None:
        """Time and keep one comparison or cell."""
        started = time.monotonic()
        try:
            if item.timed:
                self._time(item)
        finally:
            # Also after Ctrl-C: whole blocks can be judged.
            if item.rows or item.problem or item.source is not None:
                with interrupts.held():
                    self.lines.append(keep(self.folder, item))
        if item.timed and item.problem is None:
            name = duration_name(item.subject, self.plan.passes)
            self.durations.note(name, time.monotonic() - started)

    def _time(self, item: Measured) -> None:
        """All launches and passes of one comparison or cell."""
        subject, session, passes = item.subject, self.session, self.plan.passes
        number = f"{self.timed.index(item) + 1}/{len(self.timed)}"
        steps: list[tuple[str, Any]] = []
        what = subject.versus if isinstance(subject, Pair) else ""
        if isinstance(subject, Cell):
            ranks = f"on {subject.world} ranks" if item.together else "alone"
            what = f"{subject.mode} {subject.title} {ranks}, {subject.network}"
            steps += [("memory", session.measure_memory)] * (item.on_threads and not item.refused)
        elif subject.action == "step":
            alone = [("each side alone", session.run_alone), ("memory", session.measure_memory)]
            steps += [*alone * passes.alone, *[("scorecard", session.score)] * passes.score]
        title, visible = f"{number} {what}", self.plan.how.progress
        with _Blocks(self.console, title, subject.blocks, "blocks", visible) as progress:
            session.time(item, progress.update)
            for name, step in steps:
                if item.problem is None:
                    progress.note(name)
                    step(item)

    def _kept(self) -> Sequence[Line]:
        """The lines of the run so far."""
        run = read(self.folder.path)
        return stored.cells(run) if self.scaling else stored.pairs(run)

    def _show(self) -> None:
        if not self.scaling:
            keep_report(self.folder)
        if self.lines:
            made: Any = Cells if self.scaling else Pairs
            how = self.plan.how
            made(self.lines).show(self.console, how.rows, how.quiet)
            if how.quiet:
                counts = Counter(line.verdict for line in self.lines)
                told = brief.counted(counts, sorted(counts))
                print_line(self.console, f"{told}; evidence: {self.folder.path}")

    def _stopped(self) -> str:
        self._show()
        noun = "cells" if self.scaling else "comparisons"
        return f"stopped: {len(self.lines)} of {len(self.items)} {noun} have figures"


class _Blocks(ProgressBar):
    """Progress over the blocks of one comparison."""

    def _columns(self, progress: Any) -> list[Any]:
        blocks = progress.TextColumn("{task.completed}/{task.total} blocks")
        return [blocks, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]

    def update(self, done: int) -> None:
        """So many blocks are over."""
        self._move(done, " blocks")

    def note(self, what: str) -> None:
        """The passes after the blocks."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self.what}: {what}")
        elif self.visible:
            print_line(self.console, f"  {what}")


def exit_code(lines: Sequence[Line], fail_on: Collection[FailOn]) -> int:
    """1 something broke (or is slower, or missed its goal, if asked), 3 something is open or all of
    it was refused, 0 all decided.
    """
    words = {line.verdict for line in lines}
    slower = FailOn.slower in fail_on and "slower" in words
    missed = any(line.missed for line in lines)
    if words & set(stats.BROKEN) or slower or (FailOn.goal in fail_on and missed):
        return verdicts.BROKEN
    if words & set(stats.OPEN) or words <= {"oversubscribed"}:
        return verdicts.NOT_DECIDED
    return verdicts.HELD
