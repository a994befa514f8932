"""Comparisons and cells measured one after the other: within a budget, kept as they end."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof import verdicts
from shardproof.bench import lines as stored
from shardproof.bench import stats
from shardproof.bench.evidence import keep, keep_report
from shardproof.bench.lines import CellLine, PairLine
from shardproof.bench.session import Measured, Session
from shardproof.bench.subjects import Cell, Pair, Subject
from shardproof.bench.time_budget import Passes, choose, duration_name, estimates
from shardproof.commands import supervision
from shardproof.commands.console import Blocks, echo, make_console, print_line
from shardproof.commands.options import FailOn
from shardproof.runs.durations import Durations
from shardproof.runs.run_folder import read
from shardproof.runs.shard import Cut, Shard

if TYPE_CHECKING:
    from rich.console import Console

Line = PairLine | CellLine


@dataclass(frozen=True)
class Request:
    """How to measure: within ``budget`` minutes of ``began``, with which passes, and what fails.

    ``shard``: only that part of all.
    """

    budget: float | None = None
    passes: Passes = field(default_factory=Passes)
    fail_on: frozenset[FailOn] = frozenset()
    shard: Shard | None = None
    began: float = field(default_factory=lambda: time.monotonic())


def dry_run(subjects: Sequence[Subject], request: Request, durations: Durations) -> None:
    """Print the ids of what would be measured or modelled, and of what the budget leaves out.

    :raises SelectionError: a system refuses its options.
    """
    items = [Measured(subject) for subject in subjects]
    scaling = any(isinstance(subject, Cell) for subject in subjects)
    if scaling and request.budget is not None:
        with Session() as session:  # which cells are timed depends on what fits on this machine
            items = session.examine(subjects)
    schedule = choose(items, durations, request.budget, request.passes)
    for item in schedule.chosen:
        echo(item.subject.id)
    for item in schedule.left_out:
        echo(f"left out by the budget: {item.subject.id}", err=True)
    if not scaling or request.budget is not None:
        echo(schedule.summary(), err=True)


def run(
    session: Session,
    subjects: Sequence[Subject],
    request: Request,
    durations: Durations,
    results: Path | None,
    cut: Cut | None = None,
) -> int:
    """Measure ``subjects`` (all pairs, or all cells) into a run folder; the exit code.

    ``cut``: the selection that they are the part ``request.shard`` of.

    What does not fit into the budget is left out by name; with a cell, those that would have been
    modelled from its launches.

    :raises SelectionError: a system cannot be loaded, or refuses its options.
    """
    console = make_console()
    schedule = choose(session.examine(subjects), durations, request.budget, request.passes)
    items = [*schedule.chosen, *schedule.left_out]
    timed = [item for item in items if item.timed]
    scaling = bool(items) and isinstance(items[0].subject, Cell)
    expected = estimates((item.subject for item in items), durations, request.passes)
    lines: list[Line] = []
    late: list[Measured] = []

    def fits(item: Measured) -> bool:
        if request.budget is None or not item.timed:
            return True
        end = time.monotonic() - request.began + expected[item.subject.id]
        return end <= request.budget * 60

    with supervision.open_folder(results) as folder:
        if cut is not None and request.shard is not None:
            folder.cut(cut, request.shard)

        def kept() -> Sequence[Line]:
            run = read(folder.path)
            return stored.cells(run) if scaling else stored.pairs(run)

        def body(interrupts: supervision.Interrupts) -> int:
            folder.plan_benches([item.subject.id for item in items])
            known = {line.id for line in kept()}
            if request.budget is not None:
                print_line(console, schedule.summary())
            for item in items:
                subject = item.subject
                if item.source in late or not fits(item):
                    late.append(item)
                    if subject.id not in known:  # figures of an earlier invocation stay
                        why = f"no room in a budget of {request.budget:g} minutes"
                        folder.leave_out_bench(subject.to_dict(), why)
                    continue
                started = time.monotonic()
                try:
                    if item.timed:
                        number = f"{timed.index(item) + 1}/{len(timed)}"
                        _measure(session, item, number, request.passes, console)
                finally:
                    # Also after Ctrl-C: whole blocks can be judged.
                    if item.rows or item.problem or item.source is not None:
                        with interrupts.held():
                            lines.append(keep(folder, item))
                if item.timed and item.problem is None:
                    name = duration_name(subject, request.passes)
                    durations.note(name, time.monotonic() - started)
            show()
            names = [item.subject.id for item in late]
            earlier = {line.id: line for line in kept() if line.id in names}
            for name in names:
                stays = earlier.get(name)
                text = "" if stays is None else f" (stays as it was: {stays.verdict})"
                print_line(console, f"left out by the budget: {name}{text}")
            # Figures of before are no work of now, but a budget hides no failure among them.
            failed = exit_code(list(earlier.values()), request.fail_on) == verdicts.BROKEN
            return verdicts.BROKEN if failed else exit_code(lines, request.fail_on)

        def show() -> None:
            if not scaling:
                keep_report(folder)
            show_cells([line for line in lines if isinstance(line, CellLine)], console)
            show_pairs([line for line in lines if isinstance(line, PairLine)], console)

        def interrupted() -> None:
            show()
            noun = "cells" if scaling else "comparisons"
            print_line(console, f"stopped: {len(lines)} of {len(items)} {noun} have figures")

        return supervision.supervised(folder, console, body, interrupted, durations.save)


def _measure(
    session: Session, item: Measured, number: str, passes: Passes, console: Console
) -> None:
    """All launches and passes of one comparison or cell."""
    subject = item.subject
    with Blocks(
        console, f"{number} {subject.progress_name(not item.together)}", subject.blocks
    ) as progress:
        session.time(item, progress.update)
        steps = [("memory", session.measure_memory)] if item.on_threads and not item.refused else []
        if isinstance(subject, Pair) and subject.action != "step":
            steps = []
        elif isinstance(subject, Pair):
            steps = [
                *([("each side alone", session.run_alone)] if passes.alone else []),
                *([("memory", session.measure_memory)] if passes.alone else []),
                *([("scorecard", session.score)] if passes.score else []),
                *([("profile", session.profile)] if passes.profile else []),
            ]
        for name, step in steps:
            if item.problem is None:
                progress.note(name)
                step(item)


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


def show_pairs(lines: Sequence[PairLine], console: Console) -> None:
    """The table of comparisons, and what belongs to each row."""
    if not lines:
        return
    from shardproof.bench import tables

    console.print(tables.table(lines, tables.NARROW))
    for line in lines:
        first, *rest = tables.details(line)
        for text in (first, *tables.beside(line), *rest):
            print_line(console, text)
    if caution := tables.lost(lines):
        print_line(console, caution)


def show_cells(lines: Sequence[CellLine], console: Console) -> None:
    """Both tables of scaling cells, and remarks on single rows."""
    if not lines:
        return
    from shardproof.bench.scaling import tables

    console.print(tables.table(lines, tables.NARROW))
    modelled = tables.modelled_table(lines)
    if modelled.rows:
        print_line(console, "")
        console.print(modelled)
    for text in tables.remarks(lines):
        print_line(console, text)
