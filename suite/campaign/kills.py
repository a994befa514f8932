"""Planted faults in random clean cases of the systems that they patch: how many die, by N?

The kill matrix plants a fault in the case that its author thought of.  Here each is planted in the
cases that a campaign draws of its parent, in their order, until one is red that the parent passes.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof import registry, verdicts
from shardproof.campaign import draws
from shardproof.case import Case
from shardproof.cases.kills import failing
from shardproof.cases.runner import Course, Session
from shardproof.checks.results import CaseResult
from shardproof.commands import options
from shardproof.commands.console import echo, make_console, print_line
from shardproof.commands.supervision import Interrupts, open_folder, supervised
from shardproof.launch.process_control import cores
from shardproof.runs import random_kills
from shardproof.runs.random_kills import RandomKill, RandomKills
from shardproof.table import Table

#: Judges cases; those that time did not allow are missing from what it gives.
Judge = Callable[[Sequence[Case]], Mapping[str, CaseResult]]
#: Faults that are planted beside each other.  One that a budget cuts counts for nothing: those of
#: its faults that died in time would count, and those that take long would not.
GROUP = 8


def run(
    mutants: Sequence[Any],
    most: int,
    seed: int,
    asked: options.SessionOptions,
    output: options.Output,
) -> int:
    """Plant each of ``mutants`` in up to ``most`` random cases and print how many die, by N.

    Returns the exit code.
    """
    console, budget = make_console(), asked.budget
    end = None if budget is None else time.monotonic() + budget * 60

    def body(interrupts: Interrupts) -> int:
        def judge(cases: Sequence[Case]) -> dict[str, CaseResult]:
            seconds = None if end is None else end - time.monotonic()
            if seconds is not None and seconds <= 0:
                return {}
            results, late = session.run(folder.bind(cases), note, folder.keep, Course(seconds))
            for case in late:
                folder.leave_out(case, f"the budget of {budget:g} minutes was used up")
            return {result.id: result for result in results}

        def note(result: CaseResult) -> None:
            with interrupts.held():
                folder.add(result, "mutant case")

        folder.plan([])  # which cases there will be hangs on what dies before
        with Session(asked.jobs or cores()) as session:
            kills = plant(mutants, most, seed, judge, say if output.progress else _nothing)
        folder.write(random_kills.FILE, kills.text())
        if kills.faults and not output.quiet:
            console.print(kills.table())
            if output.rows:
                console.print(by_fault(kills))
        for name in kills.alarms:
            print_line(console, f"false alarm: its parent fails in {name}")
        evidence = f"; evidence: {folder.path}" if output.quiet else ""
        print_line(console, kills.sentence() + evidence)
        if kills.alarms:
            return verdicts.BROKEN
        return verdicts.HELD if kills.faults else verdicts.NOT_DECIDED

    with open_folder(asked.results) as folder:
        return supervised(folder, console, body, quiet=output.quiet)


def by_fault(kills: RandomKills) -> Table:
    """A row for each fault: in how many cases it was planted, and what killed it."""
    rows = [
        (one.name, one.parent, f"{one.cases:,}", ", ".join(one.failing) or "survives")
        for one in sorted(kills.faults, key=lambda one: one.name)
    ]
    return Table("", ("fault", "planted in", "cases", "failing checks"), rows, align="llrl")


def say(line: str) -> None:
    """Print a line of progress on standard error."""
    echo(line, err=True)


def _nothing(_: str) -> None: ...


def plant(
    mutants: Sequence[Any],
    most: int,
    seed: int,
    judge: Judge,
    progress: Callable[[str], None] = _nothing,
) -> RandomKills:
    """Plant ``mutants``, in an order of ``seed``, each in at most ``most`` cases of its parent.

    ``progress`` gets a line after each group of faults.
    """
    drawn = [mutant for mutant in mutants if mutant.parent in draws.names()]
    others = tuple(mutant.name for mutant in mutants if mutant not in drawn)
    random.Random(f"{seed} faults").shuffle(drawn)
    clean = Clean(judge, cases_of({mutant.parent for mutant in drawn}, most, seed))
    found: list[RandomKill] = []
    for start in range(0, len(drawn), GROUP):
        group = clean.planted(drawn[start : start + GROUP])
        if group is None:
            break
        found += group
        killed = sum(one.killed for one in found)
        progress(f"  {len(found)} of {len(drawn)} faults, {killed} killed")
    left_out = tuple(mutant.name for mutant in drawn[len(found) :])
    return RandomKills(seed, most, tuple(found), left_out, others, tuple(clean.alarms))


def cases_of(systems: set[str], most: int, seed: int) -> dict[str, list[Case]]:
    """The first ``most`` cases of each system, drawn at once."""
    cases: dict[str, list[Case]] = {name: [] for name in systems}
    numbers = itertools.count()
    while any(len(own) < most for own in cases.values()):
        case = draws.numbered_case(next(numbers), seed, variations=draws.shipped())
        own = cases.get(case.implementation)
        if own is not None and len(own) < most:
            own.append(case)
    return cases


class Clean:
    """Cases of parents, each judged once however many faults are planted in it."""

    def __init__(self, judge: Judge, cases: Mapping[str, Sequence[Case]]) -> None:
        self._judge, self._cases = judge, cases
        self._passes: dict[str, bool] = {}
        #: Those that a parent did not pass.
        self.alarms: list[str] = []

    def planted(self, mutants: Sequence[Any]) -> list[RandomKill] | None:
        """The outcome of each; ``None``: time ran out before it was known."""
        found: dict[str, RandomKill] = {}
        most = max(len(self._cases[mutant.parent]) for mutant in mutants)
        for index in range(most):
            live = [mutant for mutant in mutants if mutant.name not in found]
            parents = [self._cases[mutant.parent][index] for mutant in live]
            names = [f"{registry.MUTANTS}{mutant.name}" for mutant in live]
            own = list(map(draws.planted, parents, names))
            new = {case.id: case for case in parents if case.id not in self._passes}
            asked = [*new.values(), *own]
            results = self._judge(asked) if asked else {}
            if any(case.id not in results for case in asked):
                return None
            for name in new:
                self._note(results[name])
            for mutant, case, parent in zip(live, own, parents, strict=True):
                result = results[case.id]
                if self._passes[parent.id] and (checks := failing(result)):
                    told = parent.id, result.verdict, checks
                    found[mutant.name] = RandomKill(mutant.name, mutant.parent, index + 1, *told)
        return [found.get(m.name, RandomKill(m.name, m.parent, most)) for m in mutants]

    def _note(self, result: CaseResult) -> None:
        kind = verdicts.kind(result.verdict)
        self._passes[result.id] = kind in verdicts.GREEN
        if kind in verdicts.RED:
            self.alarms.append(result.id)
