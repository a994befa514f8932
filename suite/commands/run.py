"""``shardproof run``: choose cases, run them, judge them, leave evidence.

Next: ``cases/runner.py``, which keeps every core busy with the cases that were chosen here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof import verdicts
from shardproof.case import Case
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError
from shardproof.launch.process_control import cores
from shardproof.table import number, some

if TYPE_CHECKING:
    from shardproof.cases.runner import CaseHost, Judge
    from shardproof.checks.results import CaseResult
    from shardproof.commands.supervision import Interrupts
    from shardproof.launch.nodes import Nodes
    from shardproof.runs.durations import Durations
    from shardproof.runs.run_folder import RunFolder
    from shardproof.runs.shard import Shard
    from shardproof.scenarios.budget import CaseSchedule


def run(
    context: typer.Context,
    scenarios: options.Scenarios = None,
    impl: options.Impl = None,
    backend: options.BackendOption = None,
    world: options.World = None,
    like: options.Like = "",
    expression: options.Expression = "",
    tier: options.Tier = "quick",
    budget: options.Budget = None,
    jobs: options.Jobs = None,
    results: options.Results = None,
    seed: options.Seed = None,
    shard: options.ShardOption = None,
    on: options.On = None,
    campaign: Annotated[
        int | None,
        typer.Option(
            "--campaign", metavar="N", min=1, max=100_000, help="N random clean cases from --seed"
        ),
    ] = None,
    drawn: Annotated[
        str | None, typer.Option("--case", metavar="ID", help="one random case, by its whole id")
    ] = None,
    depth: Annotated[
        Literal["family", "layout"] | None,
        typer.Option(
            "--depth",
            help="hold systems to what their strategy's family does, or to the layout of that "
            "name to the byte (default: as each declares)",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="run what is left of the run of --results (default: the newest)"
        ),
    ] = False,
    rerun_failed: Annotated[
        bool, typer.Option("--rerun-failed", help="run the failed cases of that run again")
    ] = False,
    fail_fast: Annotated[
        int | None,
        typer.Option(
            "--fail-fast", metavar="N", min=1, help="start no case any more once N have broken"
        ),
    ] = None,
    junit: Annotated[Path | None, options.output("--junit", "write JUnit XML there, too")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would run, and run nothing")
    ] = False,
) -> None:
    """Run cases and judge them.

    \b
    shardproof run                                      quick conformance and checkpoints
    shardproof run --tier full                          everything
    shardproof run ddp-gpt --backend gloo --world 4     one part
    shardproof run --backend mpi                        on MPI, in the cells of other backends
    shardproof run --impl 'pytorch/*' -k 'adamw and not noclip'
    shardproof run ddp-gpt --impl mine:MyDDP            a class of your own, in every cell
    shardproof run --impl mine:MyZero1 --depth layout   held to our ZeRO-1, byte for byte
    shardproof run --impl mine:MyZero1 --like 'reference/zero1*'   with the options of its cells
    shardproof run --campaign 200 --seed 7              look for false alarms
    shardproof run --campaign 50 --impl '*/fsdp*'       in a part of the systems
    shardproof run --impl mine:MyDDP --fail-fast 1      stop at the first case that breaks
    shardproof run --tier full --shard 2/4 --results part2   a quarter; `merge` joins all four
    shardproof run --tier full --on ray://HOST          on a Ray cluster, a case a task
    shardproof run --resume                             go on after a kill, Ctrl-C or a full disk
    shardproof run --resume --results results/RUN       with that run, not with the newest
    shardproof run --rerun-failed --backend gloo        some of the cases that failed

    --resume and --rerun-failed run only what that run had planned: filters choose among these
    cases, and any other case is refused.

    A whole case id selects that case, as SCENARIO or after -k. The folder results/RUN holds the
    evidence: run.json, cases.jsonl, records/, report.html, junit.xml; `verify` judges it again.

    Exit codes: 0 all held, 1 a fail, unexpected pass, hang or crash, 2 bad input, 3 undecided (only
    replicas compared, over budget, an error of the judge), or nothing was judged.
    """
    from shardproof.commands.supervision import RESULTS

    kept: list[CaseResult] = []
    part = options.shard_of(shard)
    for option, value in (("--depth", depth), ("--like", like), ("--shard", shard)):
        if value and (resume or rerun_failed):
            remedy = "leave it out: that run keeps the cases that it had planned"
            raise SelectionError(Problem(f"{option} is for new runs", remedy, value))
    if resume and rerun_failed:
        remedy = "give one: --resume runs what has no result, --rerun-failed the cases that failed"
        raise SelectionError(Problem("--resume and --rerun-failed exclude each other", remedy))
    for name in scenarios or ():
        if (Path(name) / "run.json").is_file():
            remedy = f"name a run by --results {name}, with --resume or --rerun-failed"
            raise SelectionError(Problem("a run is not a scenario", remedy, name))
    if campaign is not None or drawn is not None:
        given = {
            "SCENARIO": scenarios,
            "--backend": backend,
            "--world": world,
            "-k": expression,
            "--like": like,
            "--resume": resume,
            "--rerun-failed": rerun_failed,
        }
        clash = next((name for name, value in given.items() if value), "")
        if clash:
            what = "--campaign and --case draw their own cases"
            raise SelectionError(Problem(what, f"leave out {clash}"))
    if campaign is not None:
        from shardproof.campaign import first_cases

        cases = first_cases(campaign, seed or 0, impl or ())
    elif drawn is not None:
        cases = [_case_of(drawn)]
    else:
        filters = options.Filters(
            scenarios=scenarios,
            impl=impl,
            backend=backend,
            world=world,
            like=like,
            expression=expression,
            tier=tier,
            seed=seed,
        )
        selection = filters.selection()
        if resume or rerun_failed:
            from shardproof.runs.integrity import damage_is_bad_input, require_unedited
            from shardproof.runs.resume import split
            from shardproof.runs.run_folder import find_run

            source = context.get_parameter_source("tier")
            if source is not None and source.name == "DEFAULT":
                selection = replace(selection, tier="")
            results = find_run(str(results) if results is not None else None, RESULTS)
            with damage_is_bad_input(results):
                require_unedited(results)
                cases, kept = split(results, selection.within, rerun_failed)
        else:
            from shardproof.scenarios.vocabulary import installed

            cases = selection.cases(installed())
    if not dry_run and on is None:
        _require_backends(cases, backend or ())
    if depth:
        cases = [replace(case, depth=depth) for case in cases]
    fit = not (scenarios or resume or rerun_failed or like)
    how = budget, jobs, results, kept, junit, dry_run, fit, fail_fast
    with options.joined(None if dry_run else on, jobs) as elsewhere:
        run_and_exit(cases, *how, shard=part, elsewhere=elsewhere)


def _case_of(name: str) -> Case:
    """The random case with the id ``name``.

    :raises SelectionError: no campaign draws it.
    """
    from shardproof import campaign
    from shardproof.campaign import histories

    case = campaign.by_id(name) or histories.by_id(name)
    if case is None:
        remedy = "give the whole id that a campaign printed; -k ID selects a case of a scenario"
        raise SelectionError(Problem("--case: not the id of a random case", remedy, name))
    return case


def run_and_exit(
    cases: Sequence[Case],
    budget: float | None,
    jobs: int | None,
    results: Path | None,
    kept: Sequence[CaseResult] = (),
    junit: Path | None = None,
    dry_run: bool = False,
    fit: bool = False,
    fail_fast: int | None = None,
    is_kept: bool = True,
    shard: Shard | None = None,
    elsewhere: CaseHost | None = None,
) -> None:
    """Run what of ``cases`` fits into ``budget`` minutes and end the command with its exit code.

    ``fit``: of a user's own class only the cells whose axes it declares.  ``is_kept``: the folder
    of results stays once the command has ended.  ``shard``: run only that part of the cases.
    ``elsewhere``: what judges them, if not this machine.

    :raises typer.Exit: always, but for a dry run.
    """
    from shardproof.checks.results import LeftOut
    from shardproof.commands.supervision import open_folder
    from shardproof.launch.nodes import Nodes, without_node_faults
    from shardproof.registry import preflight
    from shardproof.runs import code
    from shardproof.runs.durations import Durations
    from shardproof.runs.shard import Cut
    from shardproof.scenarios.budget import fit_cases

    sources = {case.implementation: case.source for case in cases}
    declared = preflight.check(sources, sources=sources)
    if fit:
        cases = _fitting(cases, declared)
    if (nodes := Nodes.here()) is None:
        cases = without_node_faults(cases)
    else:
        every, cases = len(cases), with_room(cases, nodes)
        if len(cases) < every:
            echo(
                f"{nodes}: {number(every - len(cases), 'case')} of more ranks left aside", err=True
            )
        cases = nodes.with_faults(cases)
    cases = preflight.with_found_traits(cases)
    whole, cut = cases, None
    if shard is not None:
        lines = (LeftOut(case.id, case, None, "").line() for case in whole)
        cut = Cut.of(lines, {case.id: case.id for case in whole}, shard)
        own = cut.names(shard.index)
        cases = [case for case in whole if case.id in own]
        what = f"part {shard.index} of {shard.of}"
        echo(f"{what}: {len(cases):,} of {number(len(whole), 'case')}", err=True)
    if any(case.fault and case.fault.strikes_nodes and not case.skip for case in cases):
        jobs = 1  # a case beside it would meet its fault
    durations = Durations.of_user()
    workers = jobs or cores() if elsewhere is None else elsewhere.places
    planned = fit_cases(cases, durations, workers, budget)
    if dry_run:
        for case in planned.chosen:
            echo(case.id)
        summary = f"{number(len(planned.chosen), 'case')}, about {planned.seconds:.0f} s"
        if not planned.chosen:
            summary = "nothing to run" + ("" if cases else f": {len(kept)} results are there")
        left_out = f", {len(planned.left_out)} left out by the budget" if planned.left_out else ""
        echo(f"{summary}{left_out}", err=True)
        return
    wait_for(nodes)
    with open_folder(results) as folder:
        if cut is not None and shard is not None:
            folder.cut(cut, shard, whole)
        if elsewhere is not None:
            folder.tell_cluster(elsewhere.facts)
        digests = code.of(sources)
        if digests and (stale := folder.tell_code(digests, kept)):
            names = some(sorted({result.case.implementation for result in stale}), 3)
            what = f"{number(len(stale), 'verdict')} kept of other code: {names} changed since"
            echo(f"{what}; without --resume and --rerun-failed all is judged anew", err=True)
        judge = None if elsewhere is None else elsewhere.judge
        how = budget, durations, kept, junit, fail_fast, is_kept, nodes, judge
        raise typer.Exit(execute(folder, planned, workers, *how))


def with_room(cases: Sequence[Case], nodes: Nodes) -> list[Case]:
    """Those whose ranks fit the nodes; those whose messages cannot be delayed there are skipped.

    :raises SelectionError: none fits.
    """
    room = [case for case in cases if nodes.has_room(case.backend, case.world)]
    room = [replace(case, skip=case.skip or nodes.not_far(case.backend)) for case in room]
    if cases and not room:
        least = min(case.world for case in cases)
        what = f"no case fits {nodes}: they need {least} or more"
        raise SelectionError(Problem(what, "give more --nodes or --ranks-per-node"))
    return room


def wait_for(nodes: Nodes | None) -> None:
    """Return once the agents of all nodes are there.

    :raises typer.Exit: one does not come; told.
    """
    from shardproof.launch.nodes import NodeGone

    if nodes is not None:
        try:
            nodes.wait()
        except NodeGone as error:
            echo(f"precondition: {error}", err=True)
            raise typer.Exit(verdicts.NOT_DECIDED) from None


def _require_backends(cases: Sequence[Case], asked: Sequence[str]) -> None:
    """Cases on a backend that was asked for by name are not skipped where it is missing.

    :raises SelectionError: it is (but for some on GPUs), or MPI cannot start as many ranks.
    """
    from shardproof.backends import BACKENDS
    from shardproof.launch.mpi import mpirun
    from shardproof.launch.nodes import Nodes

    for name in asked:
        worlds = {case.world for case in cases if case.backend == name}
        if not worlds or BACKENDS[name].skips_if_missing:
            continue
        if reason := BACKENDS[name].available(max(worlds)):
            remedy = "`shardproof doctor` tells what it finds; or leave --backend out"
            raise SelectionError(Problem(reason, remedy, f"--backend {name}"))
        is_here = BACKENDS[name].mpirun and Nodes.here() is None
        if is_here and (reason := mpirun.problem(max(worlds))):
            remedy = f"allow it {max(worlds)} ranks on this machine, or choose --world below"
            raise SelectionError(Problem(reason, remedy, f"--backend {name}"))


def _fitting(cases: Sequence[Case], declared: Mapping[str, Sequence[str]]) -> list[Case]:
    """The cells whose mesh a class of one's own has the axes for; told on the terminal.

    :raises SelectionError: there is none.
    """
    chosen = list(cases)
    for name, axes in declared.items():
        own = [case for case in chosen if case.implementation == name]
        odd = {case.id for case in own if axes and not set(case.mesh) <= set(axes)}
        if len(odd) == len(own):
            remedy = "choose cells of such a mesh by -k, or a scenario"
            raise SelectionError(Problem(f"no cell has the axes {', '.join(axes)}", remedy, name))
        if odd:
            fitting = f"{len(own) - len(odd)} of {len(own)} cells"
            echo(f"{name} declares the axes {', '.join(axes)}: {fitting} fit", err=True)
        chosen = [case for case in chosen if case.id not in odd]
    return chosen


def execute(
    folder: RunFolder,
    schedule: CaseSchedule,
    jobs: int,
    budget: float | None,
    durations: Durations,
    kept: Sequence[CaseResult] = (),
    junit_file: Path | None = None,
    fail_fast: int | None = None,
    is_kept: bool = True,
    nodes: Nodes | None = None,
    judge: Judge | None = None,
) -> int:
    """Run the cases of ``schedule``; ``budget`` is in minutes.  Returns the exit code.

    No case is started any more once ``fail_fast`` have broken.

    ``kept`` are results that the folder holds already: they count, too, as do those of cases that
    the budget leaves out.  ``nodes``: where ranks that are processes run; ``judge``: who judges, if
    not this machine's leaders.
    """
    from shardproof import report
    from shardproof.cases.runner import Course, run_cases
    from shardproof.commands.console import Progress, make_console, print_line
    from shardproof.commands.supervision import supervised
    from shardproof.runs import junit
    from shardproof.runs.run_folder import read
    from shardproof.scenarios.budget import fit_cases

    console = make_console()
    results = [*kept]

    def failed_fast() -> bool:
        broken = (verdicts.kind(result.verdict) in verdicts.RED for result in results[len(kept) :])
        return fail_fast is not None and sum(broken) >= fail_fast

    def run_some(interrupts: Interrupts, planned: CaseSchedule, end: float | None) -> list[Case]:
        """Run what was ``planned``; the cases that time until ``end`` did not allow."""
        seconds = None if end is None else max(0.0, end - time.monotonic())
        with Progress(console, planned.chosen, "judging", planned.expected, jobs) as progress:

            def note(result: CaseResult) -> None:
                with interrupts.held():  # a line on disk and a result that counts are one thing
                    folder.add(result)
                    results.append(result)
                if verdicts.kind(result.verdict) != "skip":
                    durations.note(result.id, result.seconds)
                progress.step(result)

            course = Course(seconds, failed_fast, progress.started)
            _, late = run_cases(planned.chosen, jobs, note, folder.keep, course, nodes, judge)
        return late

    def body(interrupts: Interrupts) -> int:
        folder.plan(schedule.chosen + schedule.left_out)
        no_room = "" if budget is None else f"no room in a budget of {budget:g} minutes"
        for case in schedule.left_out:
            folder.leave_out(case, no_room)
        end = None if budget is None else time.monotonic() + budget * 60
        left_out, late = schedule.left_out, run_some(interrupts, schedule, end)
        # Earlier durations may be those of a busier machine: what now has room runs as well.
        while end is not None and not late and not failed_fast():
            again = fit_cases(left_out, durations, jobs, (end - time.monotonic()) / 60)
            left_out = again.left_out
            if not again.chosen:
                break
            late = run_some(interrupts, again, end)
        if late and failed_fast():
            why = f"--fail-fast {fail_fast}: so many cases had broken"
            print_line(console, f"{why}; {len(late)} are left out (run --resume goes on)")
        elif late:
            why = f"the budget of {budget:g} minutes was used up"
        reasons = dict.fromkeys((case.id for case in left_out), no_room)
        for case in late:
            folder.leave_out(case, why)
            reasons[case.id] = why
        left_out = [*left_out, *late]
        stay = _results_of(folder, left_out)
        results.extend(stay)
        if results:
            report.show(results, console.print)
            report.show_broken(results, console.print)
        for line in report.skips(results):
            print_line(console, line)
        known = {result.id for result in stay}
        if stay:
            what = f"not run again, earlier results stay ({len(stay)})"
            print_line(console, f"{what}: {no_room or '--fail-fast'}")
        for line in report.left_out({k: v for k, v in reasons.items() if k not in known}):
            print_line(console, line)
        print_line(console, verdicts.summary(verdicts.count(results), len(left_out) - len(stay)))
        medians = [f"{name} {value:.2f} s" for name, value in report.medians(results).items()]
        if medians:
            print_line(console, f"median of a case: {', '.join(medians)}")
        return verdicts.exit_code(verdicts.count(results))

    def interrupted() -> None:
        done = {result.id for result in results}
        for case in schedule.chosen:
            if case.id not in done:
                folder.leave_out(case, "stopped by Ctrl-C")
        left_out = len(schedule.left_out) + len(schedule.chosen) - (len(results) - len(kept))
        report.show_broken(results, console.print)
        told = verdicts.summary(verdicts.count(results), left_out)
        print_line(console, f"stopped: {told} (run --resume goes on)")

    def finish() -> None:
        durations.save()
        document = junit.document(read(folder.path))
        folder.write("junit.xml", document)
        if junit_file is not None:
            options.write(junit_file, document)

    return supervised(folder, console, body, interrupted, finish, is_kept)


def _results_of(folder: RunFolder, cases: Sequence[Case]) -> list[CaseResult]:
    """What ``folder`` holds of ``cases`` that a budget left out: it hides no failure of before."""
    from shardproof.runs.run_folder import read

    names = {case.id for case in cases}
    return [result for result in read(folder.path).cases if result.id in names] if names else []
