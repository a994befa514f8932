"""``shardproof mutants``: plant every fault and see its check catch it."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
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
    from shardproof.case import Case
    from shardproof.checks.results import CaseResult, Kill
    from shardproof.commands.supervision import Interrupts
    from shardproof.runs.run_folder import RunFolder
    from shardproof.runs.shard import Shard


#: Share of the faults that may survive where parents are held to their family only.
MOST_AT_FAMILY = 0.15
_SHOWN = 5


def mutants(
    impl: Annotated[
        list[str] | None,
        typer.Option("--impl", metavar="P", help="glob on faults or their parents"),
    ] = None,
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
    budget: options.Budget = None,
    jobs: options.Jobs = None,
    results: options.Results = None,
    shard: options.ShardOption = None,
    campaign: Annotated[
        int | None,
        typer.Option(
            "--campaign",
            metavar="N",
            min=1,
            max=1000,
            help="plant each fault in up to N random clean cases of its parent instead",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="S", min=0, help="with --campaign: other cases, another order [0]"
        ),
    ] = None,
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

    if campaign is None and seed is not None:
        remedy = "leave it out: planted faults have cases of their own"
        raise SelectionError(Problem("--seed belongs to --campaign", remedy, str(seed)))
    if campaign is not None:
        given = {"--tier quick": tier == "quick", "--depth": depth, "--shard": shard}
        if clash := next((name for name, value in given.items() if value), ""):
            what = "--campaign plants in cases as they are drawn"
            raise SelectionError(Problem(what, f"leave out {clash}", str(campaign)))
    part = options.shard_of(shard)
    chosen = choose_mutants(impl or ["*"])
    with open_folder(results) as folder:
        workers, all_must_run = jobs or cores(), tier == "full"
        if campaign is not None:
            how = campaign, seed or 0, workers, budget
            raise typer.Exit(execute_random(folder, chosen, *how))
        raise typer.Exit(
            execute_mutants(folder, chosen, workers, budget, all_must_run, depth or "", part)
        )


def execute_mutants(
    folder: RunFolder,
    mutants: Sequence[Any],
    jobs: int,
    budget: float | None,
    all_must_run: bool,
    depth: Literal["", "family"] = "",
    shard: Shard | None = None,
) -> int:
    """Run every mutant beside its parent and print the kill matrix.  Returns the exit code.

    ``shard``: only that part of them.  Faults that share a parent's case stay together.
    """
    from shardproof import report
    from shardproof.cases.kills import judge_kill, kinds, mutant_cases, pair, run_mutants
    from shardproof.commands.console import FaultProgress, make_console, print_line
    from shardproof.commands.supervision import supervised
    from shardproof.runs.run_folder import read
    from shardproof.runs.shard import Cut

    console = make_console()
    pairs = [pair(mutant, weigh_all=all_must_run, depth=depth) for mutant in mutants]
    if shard is not None:
        whole = pairs
        lines = [{"kind": "kill", **judge_kill(item, None, None).to_dict()} for item in whole]
        cut = Cut.of(lines, {item.mutant.name: item.parent.id for item in whole}, shard)
        pairs = [item for item in whole if cut.parts[item.mutant.name] == shard.index]
        mutants = [item.mutant for item in pairs]
        folder.cut(cut, shard, mutant_cases(whole))
        what = f"part {shard.index} of {shard.of}"
        print_line(console, f"{what}: {len(pairs):,} of {number(len(whole), 'fault')}")

    def body(interrupts: Interrupts) -> int:
        cases = mutant_cases(pairs)
        folder.plan(cases, [mutant.name for mutant in mutants])
        what = f"planting {number(len(mutants), 'fault')}"
        with FaultProgress(console, cases, what, {}, jobs) as progress:

            def note(result: CaseResult) -> None:
                with interrupts.held():
                    folder.add(result, "mutant case")
                progress.step(result)

            seconds = None if budget is None else budget * 60
            kills = run_mutants(pairs, jobs, note, seconds, folder.keep, progress.started)
        for kill in kills:
            folder.add(kill, "kill")
        late = {kill.name for kill in kills if kill.left_out}
        stay = [kill for kill in read(folder.path).kills if kill.name in late]
        judged = [kill for kill in (*kills, *stay) if not kill.left_out]
        if judged:
            report.show_kills(judged, console.print)
        killed = sum(kill.killed for kill in judged)
        survivors, left_out = len(judged) - killed, len(kills) - len(judged)
        counts = f"{killed} killed, {survivors} survive"
        faults = number(len(judged), "fault judged")
        print_line(console, f"{faults} ({counts}), {left_out} left out")
        planted = {kill.name for kill in judged}
        wanted = {kind for mutant in mutants for kind in kinds(mutant)}
        seen = {kind for m in mutants if m.name in planted for kind in kinds(m)}
        print_line(console, f"{len(seen)} of {len(wanted)} pairs of check and class of fault")
        named = [kill.named for kill in judged if kill.named is not None]
        if named:
            share = sum(named) / len(named)
            what = f"{sum(named)} of {len(named)} kills name the fault"
            print_line(console, f"{what} ({share:.0%}; unnamed: {_unnamed(judged)})")
        if depth:
            share = survivors / max(len(judged), 1)
            print_line(
                console, f"{share:.1%} survive at depth {depth}, at most {MOST_AT_FAMILY:.0%}"
            )
        if survivors > (MOST_AT_FAMILY * len(judged) if depth else 0):
            return verdicts.BROKEN
        open_end = not judged or (left_out > 0 and all_must_run)
        return verdicts.NOT_DECIDED if open_end else verdicts.HELD

    return supervised(folder, console, body, lambda: print_line(console, "stopped"), lambda: None)


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
    from shardproof.cases.runner import Session
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
            results, late = session.run(cases, note, seconds, folder.keep)
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
