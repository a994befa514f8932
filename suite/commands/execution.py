"""Cases and planted faults on their way into a run folder: their choice, run and messages.

Next: ``cases/runner.py``, which keeps every core busy with the cases that it gets here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import typer

from shardproof import report, verdicts, wings
from shardproof.case import Case
from shardproof.cases import kills, room, runner
from shardproof.checks.results import CaseResult, Kill, LeftOut
from shardproof.commands import options
from shardproof.commands.console import FaultProgress, Progress, echo, make_console, print_line
from shardproof.commands.supervision import (
    Interrupts,
    open_folder,
    resume_command,
    supervised,
)
from shardproof.errors import Problem, SelectionError
from shardproof.launch.nodes import Nodes, without_node_faults
from shardproof.launch.process_control import cores
from shardproof.registry import preflight
from shardproof.runs import code, junit
from shardproof.runs.durations import Durations
from shardproof.runs.run_folder import RunFolder, read
from shardproof.runs.shard import Cut, Shard
from shardproof.scenarios.budget import CaseSchedule, fit_cases
from shardproof.table import number, some

#: Share of the faults that may survive where parents are held to their family only.
MOST_AT_FAMILY = 0.15
_SHOWN = 5


def run_and_exit(
    cases: Sequence[Case],
    session: options.SessionOptions,
    how: options.HowRun = options.WHOLE,
    kept: Sequence[CaseResult] = (),
    fit: bool = False,
    is_kept: bool = True,
    elsewhere: runner.CaseHost | None = None,
) -> None:
    """Run what of ``cases`` fits into the budget of ``session``, and end with the exit code.

    ``kept``, ``is_kept``: as of an :class:`Execution`.  ``fit``: of a user's own class only the
    cells whose axes it declares.  ``elsewhere``: what judges them, if not this machine.

    :raises typer.Exit: always, but for a dry run.
    """
    shard, cut = session.part, None
    sources = {case.implementation: case.source for case in cases}
    nodes = Nodes.here()
    options.wait_for(nodes)
    declared = preflight.check(sources, sources=sources)
    cases = _on_nodes(_fitting(cases, declared) if fit else cases, nodes)
    cases = whole = preflight.with_found_traits(cases)
    if shard is not None:
        cut = _cut(whole, shard)
        cases = [case for case in whole if cut.parts[case.id] == shard.index]
        what = f"part {shard.index} of {shard.of}"
        echo(f"{what}: {len(cases):,} of {number(len(whole), 'case')}", err=True)
    # A case beside one whose fault strikes nodes would meet that fault.
    alone = any(case.fault and case.fault.strikes_nodes and not case.skip for case in cases)
    jobs = elsewhere.places if elsewhere else 1 if alone else session.jobs or cores()
    durations = Durations.of_user()
    schedule = fit_cases(cases, durations, jobs, session.budget)
    if how.dry_run:
        _show_plan(schedule, "" if cases else f": {len(kept)} results are there")
        return
    if elsewhere is None:
        room.require(schedule.chosen, jobs)
    with open_folder(session.results) as folder:
        if cut is not None and shard is not None:
            folder.cut(cut, shard, whole)
        if elsewhere is not None:
            folder.tell_cluster(elsewhere.facts)
        digests = code.of(sources)
        if digests and (stale := folder.tell_code(digests, kept)):
            names = some(sorted({result.case.implementation for result in stale}), 3)
            what = f"kept {number(len(stale), 'verdict')} from before a change of {names}"
            echo(f"{what}; run without --resume and --rerun-failed to judge all again", err=True)
        budget, judge = session.budget, elsewhere.judge if elsewhere else None
        execution = Execution(
            folder, schedule, jobs, durations, budget, kept, nodes, judge, how, is_kept
        )
        if (ended := execution.run()) == verdicts.BROKEN and how.shrink:
            given = folder.path, session.jobs, how.quiet
            if (
                wings.required("shrink", "--shrink", lambda w: w.shrink(*given))
                == verdicts.INTERRUPTED
            ):
                ended = verdicts.INTERRUPTED
        raise typer.Exit(ended)


def _on_nodes(cases: Sequence[Case], nodes: Nodes | None) -> list[Case]:
    """The cases for which ``nodes`` (``None``: this machine) have room, with faults of nodes."""
    if nodes is None:
        return without_node_faults(cases)
    room = nodes.with_room(cases)
    if less := len(cases) - len(room):
        echo(f"{nodes}: {number(less, 'case')} skipped: they need more ranks", err=True)
    return nodes.with_faults(room)


def _fitting(cases: Sequence[Case], declared: Mapping[str, Sequence[str]]) -> list[Case]:
    """The cells whose mesh fits the axes of your own class; the terminal says how many.

    :raises SelectionError: there is none.
    """
    chosen = list(cases)
    for name, axes in declared.items():
        own = [case for case in chosen if case.implementation == name]
        odd = {case.id for case in own if axes and not set(case.mesh) <= set(axes)}
        if len(odd) == len(own):
            what = f"no case has a mesh of only the axes that the class declares: {', '.join(axes)}"
            raise SelectionError(Problem(what, "select other cases (-k) or another scenario", name))
        if odd:
            fitting = f"{len(own) - len(odd)} of {len(own)} cases"
            echo(f"{name} declares the axes {', '.join(axes)}: {fitting} fit", err=True)
        chosen = [case for case in chosen if case.id not in odd]
    return chosen


def _cut(cases: Sequence[Case], shard: Shard) -> Cut:
    lines = (LeftOut(case.id, case, None, "").line() for case in cases)
    return Cut.of(lines, {case.id: case.id for case in cases}, shard)


def _show_plan(schedule: CaseSchedule, none: str) -> None:
    """Print what would run; ``none``: why nothing would."""
    for case in schedule.chosen:
        echo(case.id)
    summary = f"{number(len(schedule.chosen), 'case')}, about {schedule.seconds:.0f} s"
    left_out = f", {len(schedule.left_out)} left out by the budget" if schedule.left_out else ""
    echo(f"{summary if schedule.chosen else f'nothing to run{none}'}{left_out}", err=True)


@dataclass
class Execution:
    """Cases of ``schedule``, run into ``folder``; ``budget`` is in minutes.

    ``kept`` are results that the folder holds already: they count, too, as do those of cases that
    the budget leaves out.  ``nodes``: where ranks that are processes run; ``judge``: who judges, if
    not this machine's leaders.  No case is started any more once ``how.fail_fast`` have broken.
    ``is_kept``: the folder of results stays once the command has ended.
    """

    folder: RunFolder
    schedule: CaseSchedule
    jobs: int
    durations: Durations
    budget: float | None = None
    kept: Sequence[CaseResult] = ()
    nodes: Nodes | None = None
    judge: runner.Judge | None = None
    how: options.HowRun = options.WHOLE
    is_kept: bool = True

    def __post_init__(self) -> None:
        self.console = make_console()
        self.new: list[CaseResult] = []
        chosen, left_out = map(self.folder.bind, (self.schedule.chosen, self.schedule.left_out))
        self.schedule = replace(self.schedule, chosen=chosen, left_out=left_out)
        self.end = None if self.budget is None else time.monotonic() + self.budget * 60

    def run(self) -> int:
        """Run the cases and print what became of them; the exit code."""
        ends = self._body, self._stopped, self._finish
        quiet = self.how.quiet
        return supervised(self.folder, self.console, *ends, self.is_kept, quiet)

    def _body(self, interrupts: Interrupts) -> int:
        folder, left_out = self.folder, self.schedule.left_out
        folder.plan(self.schedule.chosen + left_out)
        budget = "" if self.budget is None else f"budget of {self.budget:g} minutes"
        no_room = budget and f"no time in a {budget}"
        for case in left_out:
            folder.leave_out(case, no_room)
        late = self._run(interrupts, self.schedule)
        # Earlier durations may be those of a busier machine: what now has room runs as well.
        while self.end is not None and not late and not self._failed_fast():
            minutes = (self.end - time.monotonic()) / 60
            again = fit_cases(left_out, self.durations, self.jobs, minutes)
            left_out = again.left_out
            if not again.chosen:
                break
            late = self._run(interrupts, again)
        why = f"the {budget} was used up"
        if late and self._failed_fast():
            why = f"stopped after {number(self.how.most_failures or 0, 'failure')}"
            self._say(f"{why}: {number(len(late), 'case')} not run; run them with: {self._resume}")
        for case in late:
            folder.leave_out(case, why)
        reasons = {case.id: no_room for case in left_out} | {case.id: why for case in late}
        # What a budget left out hides no failure of before.
        stay = [one for one in read(folder.path).cases if one.id in reasons] if reasons else []
        return self._told(stay, reasons, no_room or "--maxfail")

    def _run(self, interrupts: Interrupts, planned: CaseSchedule) -> list[Case]:
        """Run what was ``planned``; the cases that the budget did not allow."""
        seconds = None if self.end is None else max(0.0, self.end - time.monotonic())
        cases, jobs = planned.chosen, self.jobs
        visible = self.how.progress
        with Progress(self.console, cases, "judging", planned.expected, visible) as progress:

            def note(result: CaseResult) -> None:
                with interrupts.held():  # a line on disk and a result that counts are one thing
                    self.folder.add(result)
                    self.new.append(result)
                if verdicts.kind(result.verdict) != "skip":
                    self.durations.note(result.id, result.seconds)
                progress.step(result)

            course = runner.Course(seconds, self._failed_fast, progress.started)
            keep, nodes = self.folder.keep, self.nodes
            _, late = runner.run_cases(cases, jobs, note, keep, course, nodes, self.judge)
        return late

    def _failed_fast(self) -> bool:
        broken = sum(verdicts.kind(result.verdict) in verdicts.RED for result in self.new)
        return self.how.most_failures is not None and broken >= self.how.most_failures

    def _told(self, stay: Sequence[CaseResult], left_out: Mapping[str, str], why: str) -> int:
        """Print all results, ``stay`` of before and what was ``left_out`` (why, by id); the exit
        code.
        """
        told = {one.id: one for one in read(self.folder.path).cases}  # some may be flaky
        results = [told.get(one.id, one) for one in (*self.kept, *self.new, *stay)]
        counts, known = verdicts.count(results), {result.id for result in stay}
        rows, quiet = self.how.rows, self.how.quiet
        if results and not quiet:
            report.show(results, self.console.print, rows)
        report.show_broken(results, self.console.print)
        lines = [] if quiet else [*report.skips(results, rows)]
        if stay and not quiet:
            lines.append(f"not run again, earlier results kept ({len(stay)}): {why}")
        if not quiet:
            unknown = {k: v for k, v in left_out.items() if k not in known}
            lines += report.left_out(unknown, rows)
        summary = verdicts.summary(counts, len(left_out) - len(stay))
        lines.append(f"{summary}; evidence: {self.folder.path}" if quiet else summary)
        for line in lines:
            self._say(line)
        return verdicts.exit_code(counts)

    @property
    def _resume(self) -> str:
        return resume_command(self.folder)

    def _say(self, text: str) -> None:
        print_line(self.console, text)

    def _stopped(self) -> str:
        results = [*self.kept, *self.new]
        done = {result.id for result in results}
        for case in self.schedule.chosen:
            if case.id not in done:
                self.folder.leave_out(case, "stopped by Ctrl-C")
        planned = len(self.schedule.left_out) + len(self.schedule.chosen)
        report.show_broken(results, self.console.print)
        told = verdicts.summary(verdicts.count(results), planned - len(self.new))
        return f"stopped: {told}; run the rest with: {self._resume}"

    def _finish(self) -> None:
        self.durations.save()
        document = junit.document(read(self.folder.path))
        self.folder.write("junit.xml", document)
        if self.how.junit is not None:
            options.write(self.how.junit, document)


@dataclass
class Planting:
    """Faults that are run with their parents.

    ``budget`` is in minutes.  ``all_must_run``: a fault that the budget leaves out leaves the whole
    undecided, and memory is weighed everywhere.  ``shard``: only that part; faults that share a
    parent's case stay together.
    """

    folder: RunFolder
    mutants: Sequence[Any]
    jobs: int
    budget: float | None
    all_must_run: bool
    depth: Literal["", "family"] = ""
    shard: Shard | None = None
    output: options.Output = options.WHOLE

    def __post_init__(self) -> None:
        self.console = make_console()
        pairs = [kills.pair(one, self.all_must_run, self.depth) for one in self.mutants]
        bound = [self.folder.bind((one.case, one.parent)) for one in pairs]
        self.pairs = [
            replace(one, case=case, parent=parent)
            for one, (case, parent) in zip(pairs, bound, strict=True)
        ]
        if self.shard is not None:
            self.pairs = _part(self.pairs, self.shard, self.folder)

    def run(self) -> int:
        """Run every fault and print the kill matrix.  Returns the exit code."""
        quiet = self.output.quiet
        return supervised(self.folder, self.console, self._body, quiet=quiet)

    def _body(self, interrupts: Interrupts) -> int:
        folder, cases = self.folder, kills.mutant_cases(self.pairs)
        folder.plan(cases, [item.mutant.name for item in self.pairs])
        what = f"planting {number(len(self.pairs), 'fault')}"
        with FaultProgress(self.console, cases, what, {}, self.output.progress) as progress:

            def note(result: CaseResult) -> None:
                with interrupts.held():
                    folder.add(result, "mutant case")
                progress.step(result)

            seconds = None if self.budget is None else self.budget * 60
            course = runner.Course(seconds, on_start=progress.started)
            done = kills.run_mutants(self.pairs, self.jobs, note, folder.keep, course)
        for kill in done:
            folder.add(kill, "kill")
        late = {kill.name for kill in done if kill.left_out}
        before = [kill for kill in read(folder.path).kills if kill.name in late]
        judged = [kill for kill in (*done, *before) if not kill.left_out]
        if not self.output.quiet:
            report.show_kills(judged, self.console.print, self.output.rows)
        report.show_survivors(judged, self.console.print)
        return self._told(judged, len(done) - len(judged))

    def _told(self, judged: Sequence[Kill], left_out: int) -> int:
        """Print the sums of the matrix; the exit code."""
        survivors = sum(not kill.killed for kill in judged)
        counts = f"{len(judged) - survivors} killed, {survivors} survive"
        lines = [f"{number(len(judged), 'fault judged')} ({counts}), {left_out} left out"]
        names = {kill.name for kill in judged}
        mutants = [item.mutant for item in self.pairs]
        wanted = {(kind, one.name) for one in mutants for kind in kills.kinds(one)}
        seen = {kind for kind, name in wanted if name in names}
        of = len({kind for kind, _ in wanted})
        lines.append(f"{len(seen)} of {of} pairs of check and class of fault")
        if named := [kill.named for kill in judged if kill.named is not None]:
            silent = [kill.name for kill in judged if kill.named is False]
            unnamed = some(silent, _SHOWN) or "none"
            share = f"{sum(named) / len(named):.0%}; unnamed: {unnamed}"
            lines.append(f"{sum(named)} of {len(named)} kills name the fault ({share})")
        if self.depth:
            share = f"{survivors / max(len(judged), 1):.1%} survive at depth {self.depth}"
            lines.append(f"{share}, at most {MOST_AT_FAMILY:.0%}")
        if self.output.quiet:
            lines = [f"{lines[0]}; evidence: {self.folder.path}"]
        for line in lines:
            print_line(self.console, line)
        if survivors > (MOST_AT_FAMILY * len(judged) if self.depth else 0):
            return verdicts.BROKEN
        open_end = not judged or (left_out > 0 and self.all_must_run)
        return verdicts.NOT_DECIDED if open_end else verdicts.HELD


def _part(
    whole: Sequence[kills.PlantedPair], shard: Shard, folder: RunFolder
) -> list[kills.PlantedPair]:
    """The pairs of one part of a cut selection."""
    lines = [{"kind": "kill", **kills.judge_kill(item, None, None).to_dict()} for item in whole]
    cut = Cut.of(lines, {item.mutant.name: item.parent.id for item in whole}, shard)
    folder.cut(cut, shard, kills.mutant_cases(whole))
    pairs = [item for item in whole if cut.parts[item.mutant.name] == shard.index]
    what = f"part {shard.index} of {shard.of}"
    echo(f"{what}: {len(pairs):,} of {number(len(whole), 'fault')}")
    return pairs
