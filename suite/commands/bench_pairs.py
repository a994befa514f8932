"""``shardproof bench A B``: pairs timed one after the other, evidence and tables out."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof import verdicts
from shardproof.bench.tables import NARROW, beside, details, lost, narrow
from shardproof.commands.console import Blocks

if TYPE_CHECKING:
    from rich.console import Console

    from shardproof.bench.sides import Pair
    from shardproof.bench.timetable import Timetable
    from shardproof.runs.run_folder import Durations

Line = Mapping[str, Any]


class FailOn(StrEnum):
    """What is a failure beside a crash."""

    slower = "slower"
    goal = "goal"


@dataclass(frozen=True)
class Asked:
    """How to time: ``budget`` in minutes from ``began`` on, passes of a side ``alone``,
    ``profile``, ``score``, and what fails.
    """

    began: float
    budget: float | None
    alone: bool
    profile: bool
    fail_on: frozenset[FailOn]
    score: bool = False


def told_of(planned: Timetable) -> str:
    """What a timetable holds, in words."""
    left_out = f", {len(planned.left_out)} left out by the budget" if planned.left_out else ""
    return f"{len(planned.chosen)} comparisons, about {planned.seconds:.0f} s{left_out}"


def run(
    session: Any, planned: Timetable, asked: Asked, durations: Durations, results: Path | None
) -> int:
    """Time what was ``planned`` into a run folder; the exit code."""
    from shardproof.bench import timetable
    from shardproof.bench.evidence import keep, keep_report
    from shardproof.commands import supervision
    from shardproof.commands.console import make_console, print_line
    from shardproof.runs.run_folder import read

    console = make_console()
    pairs = [*planned.chosen, *planned.left_out]
    measured = session.examine(pairs)
    lines: list[dict[str, Any]] = []
    late: list[Pair] = []

    def fits(pair: Pair) -> bool:
        if asked.budget is None:
            return True
        expected = timetable.estimates(pairs, durations, asked.alone, asked.profile, asked.score)[
            pair.id
        ]
        return time.monotonic() - asked.began + expected <= asked.budget * 60

    with supervision.open_folder(results) as folder:

        def body(interrupts: supervision.Interrupts) -> int:
            folder.plan_benches([pair.id for pair in pairs])
            known = {line["id"] for line in read(folder.path).benches}
            if asked.budget is not None:
                print_line(console, told_of(planned))
            for number, item in enumerate(measured, 1):
                pair = item.pair
                if item.problem is None and not fits(pair):
                    late.append(pair)
                    if pair.id not in known:  # figures of an earlier invocation stay
                        why = f"no room in a budget of {asked.budget:g} minutes"
                        folder.leave_out_bench(pair.to_dict(), why)
                    continue
                said = f"{number}/{len(pairs)} {pair.a.implementation} v {pair.b.implementation}"
                started = time.monotonic()
                try:
                    if item.problem is None:
                        _time(session, item, asked, Blocks(console, said, pair.blocks))
                finally:
                    if item.rows or item.problem:  # also after Ctrl-C: whole blocks can be judged
                        with interrupts.held():
                            lines.append(keep(folder, item))
                if item.problem is None:
                    name = timetable.name_of(pair, asked.alone, asked.profile, asked.score)
                    durations.note(name, time.monotonic() - started)
            keep_report(folder)
            show(lines, console)
            names = [pair.id for pair in late]
            stay = [line for line in read(folder.path).benches if line["id"] in names]
            tell_late(names, stay, console)
            # Figures of before are no work of now, but a budget hides no failure among them.
            failed = exit_code(stay, asked.fail_on) == verdicts.BROKEN
            return verdicts.BROKEN if failed else exit_code(lines, asked.fail_on)

        def interrupted() -> None:
            keep_report(folder)
            show(lines, console)
            print_line(console, f"stopped: {len(lines)} of {len(pairs)} comparisons have figures")

        return supervision.supervised(folder, console, body, interrupted, durations.save)


def _time(session: Any, item: Any, asked: Asked, blocks: Blocks) -> None:
    """All passes of one comparison."""
    with blocks as shown:
        session.time(item, shown.tell)
        if asked.alone and item.problem is None:
            shown.say("each side alone")
            session.alone(item)
        if asked.score and item.problem is None:
            shown.say("scorecard")
            session.score(item)
        if asked.profile and item.problem is None:
            shown.say("profile")
            session.profile(item)


def tell_late(names: Sequence[str], stay: Sequence[Line], console: Console) -> None:
    """What the budget left out, by id, with the verdict of an earlier invocation if one stays."""
    from shardproof.commands.console import print_line

    before = {line["id"]: f" (stays as it was: {line['verdict']})" for line in stay}
    for name in names:
        print_line(console, f"left out by the budget: {name}{before.get(name, '')}")


def exit_code(lines: Sequence[Line], fail_on: Collection[FailOn]) -> int:
    """1 something broke, 3 something is open, 0 all decided."""
    told = [line["verdict"] for line in lines]
    slower = FailOn.slower in fail_on and "slower" in told
    missed = FailOn.goal in fail_on and any(line["goal_met"] is False for line in lines)
    if slower or missed or any(word in ("crash", "hang", "fail") for word in told):
        return verdicts.BROKEN
    if not told or any(word in ("inconclusive", "precondition") for word in told):
        return verdicts.NOT_DECIDED
    return verdicts.HELD


def show(lines: Sequence[Line], console: Console) -> None:
    """The table, and what belongs to each row."""
    from rich.table import Table
    from rich.text import Text

    from shardproof.bench import stats
    from shardproof.commands.console import print_line

    if not lines:
        return
    report = stats.family(lines)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in NARROW:
        table.add_column(heading, no_wrap=heading == "pair")
    for line in lines:
        red = line["verdict"] in ("slower", "crash", "hang", "fail")
        table.add_row(*(Text(cell, style="red" if red else "") for cell in narrow(line, report)))
    console.print(table)
    for line in lines:
        first, *rest = details(line)
        for text in (first, *beside(line), *rest):
            print_line(console, text)
    if (told := lost(lines, report)) is not None:
        print_line(console, told)
