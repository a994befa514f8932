"""``shardproof mutants``: plant every fault and see its check catch it."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.launch.process_control import cores
from shardproof.table import number

if TYPE_CHECKING:
    from rich.console import Console

    from shardproof.case import Case
    from shardproof.cases.kills import PlantedPair
    from shardproof.checks.results import CaseResult, Kill
    from shardproof.commands.supervision import Interrupts
    from shardproof.runs.run_folder import RunFolder
    from shardproof.runs.shard import Shard


#: Share of the faults that may survive where parents are held to their family only.
MOST_AT_FAMILY = 0.15
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class InRandomCases:
    """Options of planting faults in random cases."""

    campaign: Annotated[
        int | None,
        typer.Option(
            "--campaign",
            metavar="N",
            min=1,
            max=1000,
            help="plant each fault in up to N random clean cases of its parent instead",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="S", min=0, help="with --campaign: other cases, another order [0]"
        ),
    ] = None

    def check(self, given: Mapping[str, object]) -> None:
        """Refuse options that belong to the other way; ``given``: those of planted cases.

        :raises SelectionError: one was given.
        """
        if self.campaign is None and self.seed is not None:
            remedy = "leave it out: planted faults have cases of their own"
            raise SelectionError(Problem("--seed belongs to --campaign", remedy, str(self.seed)))
        if self.campaign is not None:
            what = "--campaign plants in cases as they are drawn"
            options.refuse(given, what, self.campaign)


@options.grouped()
def mutants(
    impl: Annotated[
        list[str] | None,
        typer.Option("--impl", metavar="P", help="glob on faults or their parents"),
    ] = None,
    *,
    tier: Annotated[
        options.TierName,
        typer.Option(
            "--tier",
            help="quick: what the budget leaves out is no failure; memory is weighed where a "
            "kill may need it",
        ),
    ] = "full",
    depth: Annotated[
        Literal["family"] | None,
        typer.Option(
            "--depth", help="family: hold parents to no more than that, and count any failing check"
        ),
    ] = None,
    session: options.Session,
    random: InRandomCases,
) -> None:
    """Plant every fault: its named check must fail while the parent passes the same case.

    Prints the kill matrix, fault x check. A survivor ends with exit code 1.

    With --campaign N each fault is planted in the cases that `run --campaign` draws of its parent,
    in their order, until any check fails that the parent passes; the share of faults that N cases
    kill is printed, by N. That is a measure: a survivor is no failure, but a parent that fails is.
    Faults come in an order of the seed, so a budget leaves a sample. `kills-by-n.json` in the run
    folder tells all.

    \b
    shardproof mutants
    shardproof mutants --impl reference/ddp        faults of one parent
    shardproof mutants --impl 'ddp_*bucket*'
    shardproof mutants --depth family              what survives where layouts are free
    shardproof mutants --shard 2/4 --results part2 a quarter of the faults: see `shardproof merge`
    shardproof mutants --campaign 20 --budget 30   how many die in random cases, by their number
    """
    from shardproof.commands.supervision import open_folder

    random.check({"--tier quick": tier == "quick", "--depth": depth, "--shard": session.shard})
    part, jobs = session.part, session.jobs or cores()
    chosen = choose_mutants(impl or ["*"])
    with open_folder(session.results) as folder:
        if random.campaign is not None:
            seed = random.seed or 0
            code = execute_random(folder, chosen, random.campaign, seed, jobs, session.budget)
        else:
            planting = Planting(chosen, jobs, session.budget, tier == "full", depth or "", part)
            code = planting.run(folder)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Planting:
    """Faults that are run beside their parents.

    ``budget`` is in minutes.  ``all_must_run``: a fault that the budget leaves out leaves the whole
    undecided, and memory is weighed everywhere.  ``shard``: only that part; faults that share a
    parent's case stay together.
    """

    mutants: Sequence[Any]
    jobs: int
    budget: float | None
    all_must_run: bool
    depth: Literal["", "family"] = ""
    shard: Shard | None = None

    def run(self, folder: RunFolder) -> int:
        """Run every fault and print the kill matrix.  Returns the exit code."""
        from shardproof.cases.kills import mutant_cases, pair, run_mutants
        from shardproof.cases.runner import Course
        from shardproof.commands.console import FaultProgress, make_console, print_line
        from shardproof.commands.supervision import supervised
        from shardproof.runs.run_folder import read

        console = make_console()
        pairs = [pair(one, weigh_all=self.all_must_run, depth=self.depth) for one in self.mutants]
        if self.shard is not None:
            pairs = _part(pairs, self.shard, folder)
        planted = [item.mutant for item in pairs]

        def body(interrupts: Interrupts) -> int:
            cases = mutant_cases(pairs)
            folder.plan(cases, [mutant.name for mutant in planted])
            what = f"planting {number(len(planted), 'fault')}"
            with FaultProgress(console, cases, what, {}, self.jobs) as progress:

                def note(result: CaseResult) -> None:
                    with interrupts.held():
                        folder.add(result, "mutant case")
                    progress.step(result)

                seconds = None if self.budget is None else self.budget * 60
                course = Course(seconds, on_start=progress.started)
                kills = run_mutants(pairs, self.jobs, note, folder.keep, course)
            for kill in kills:
                folder.add(kill, "kill")
            late = {kill.name for kill in kills if kill.left_out}
            before = [kill for kill in read(folder.path).kills if kill.name in late]
            judged = [kill for kill in (*kills, *before) if not kill.left_out]
            return self._shown(planted, judged, len(kills) - len(judged), console)

        stopped = functools.partial(print_line, console, "stopped")
        return supervised(folder, console, body, stopped, lambda: None)

    def _shown(
        self, planted: Sequence[Any], judged: Sequence[Kill], left_out: int, console: Console
    ) -> int:
        """Print the matrix and its sums; the exit code."""
        from shardproof import report
        from shardproof.cases.kills import kinds
        from shardproof.commands.console import print_line

        if judged:
            report.show_kills(judged, console.print)
        killed = sum(kill.killed for kill in judged)
        survivors = len(judged) - killed
        counts = f"{killed} killed, {survivors} survive"
        faults = number(len(judged), "fault judged")
        print_line(console, f"{faults} ({counts}), {left_out} left out")
        names = {kill.name for kill in judged}
        wanted = {kind for mutant in planted for kind in kinds(mutant)}
        seen = {kind for mutant in planted if mutant.name in names for kind in kinds(mutant)}
        print_line(console, f"{len(seen)} of {len(wanted)} pairs of check and class of fault")
        named = [kill.named for kill in judged if kill.named is not None]
        if named:
            share = sum(named) / len(named)
            what = f"{sum(named)} of {len(named)} kills name the fault"
            print_line(console, f"{what} ({share:.0%}; unnamed: {_unnamed(judged)})")
        if self.depth:
            share = survivors / max(len(judged), 1)
            what = f"{share:.1%} survive at depth {self.depth}, at most {MOST_AT_FAMILY:.0%}"
            print_line(console, what)
        if survivors > (MOST_AT_FAMILY * len(judged) if self.depth else 0):
            return verdicts.BROKEN
        open_end = not judged or (left_out > 0 and self.all_must_run)
        return verdicts.NOT_DECIDED if open_end else verdicts.HELD


def _part(whole: Sequence[PlantedPair], shard: Shard, folder: RunFolder) -> list[PlantedPair]:
    """The pairs of one part of a cut selection."""
    from shardproof.cases.kills import judge_kill, mutant_cases
    from shardproof.runs.shard import Cut

    lines = [{"kind": "kill", **judge_kill(item, None, None).to_dict()} for item in whole]
    cut = Cut.of(lines, {item.mutant.name: item.parent.id for item in whole}, shard)
    folder.cut(cut, shard, mutant_cases(whole))
    pairs = [item for item in whole if cut.parts[item.mutant.name] == shard.index]
    what = f"part {shard.index} of {shard.of}"
    echo(f"{what}: {len(pairs):,} of {number(len(whole), 'fault')}")
    return pairs


def execute_random(
    folder: RunFolder,
    mutants: Sequence[Any],
    most: int,
    seed: int,
    jobs: int,
    budget: float | None,
) -> int:
    """Plant each of ``mutants`` in up to ``most`` random cases and print how many die, by N.

    ``budget`` is in minutes.  Returns the exit code.
    """
    from shardproof.campaign.kills import plant
    from shardproof.cases.runner import Course, Session
    from shardproof.commands.console import make_console, print_line
    from shardproof.commands.supervision import supervised
    from shardproof.runs import random_kills

    console = make_console()
    end = None if budget is None else time.monotonic() + budget * 60

    def body(interrupts: Interrupts) -> int:
        def judge(cases: Sequence[Case]) -> dict[str, CaseResult]:
            seconds = None if end is None else end - time.monotonic()
            if seconds is not None and seconds <= 0:
                return {}
            results, late = session.run(cases, note, folder.keep, Course(seconds))
            for case in late:
                folder.leave_out(case, f"the budget of {budget:g} minutes was used up")
            return {result.id: result for result in results}

        def note(result: CaseResult) -> None:
            with interrupts.held():
                folder.add(result, "mutant case")

        folder.plan([])  # which cases there will be hangs on what dies before
        with Session(jobs) as session:
            tell = functools.partial(echo, err=True)
            kills = plant(mutants, most, seed, judge, tell)
        folder.write(random_kills.FILE, kills.text())
        if kills.faults:
            console.print(kills.table())
        for name in kills.alarms:
            print_line(console, f"false alarm: its parent fails in {name}")
        print_line(console, kills.sentence())
        if kills.alarms:
            return verdicts.BROKEN
        return verdicts.HELD if kills.faults else verdicts.NOT_DECIDED

    return supervised(folder, console, body, lambda: print_line(console, "stopped"), lambda: None)


def _unnamed(kills: Sequence[Kill]) -> str:
    names = [kill.name for kill in kills if kill.named is False]
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more, in the report" if len(names) > _SHOWN else ""
    return shown + more or "none"


def choose_mutants(patterns: Sequence[str]) -> list[Any]:
    """Mutants whose name, or whose parent's name, a glob matches.

    :raises SelectionError: a pattern that matches none.
    """
    from shardproof import registry

    declared = [registry.load_mutant(name) for name in registry.mutant_names()]
    chosen: list[Any] = []
    for pattern in patterns:
        short = pattern.removeprefix(registry.MUTANTS)
        named = [
            m for m in declared if fnmatchcase(m.name, short) or fnmatchcase(m.parent, pattern)
        ]
        if not named:
            known = {name for m in declared for name in (m.name, m.parent)}
            remedy = nearest(short, known, "faults and their parents")
            raise SelectionError(Problem("--impl matches no fault", remedy, pattern))
        chosen += [m for m in named if m not in chosen]
    return chosen
