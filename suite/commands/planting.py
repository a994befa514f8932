"""Planted faults on their way into a run folder, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardproof import report, verdicts
from shardproof.cases.kills import (
    PlantedPair,
    judge_kill,
    kinds,
    mutant_cases,
    pair,
    run_mutants,
)
from shardproof.cases.runner import Course
from shardproof.checks.results import CaseResult, Kill
from shardproof.commands.console import FaultProgress, echo, make_console, print_line
from shardproof.commands.supervision import Interrupts, supervised
from shardproof.runs.run_folder import RunFolder, read
from shardproof.runs.shard import Cut, Shard
from shardproof.table import number, some

#: Share of the faults that may survive where parents are held to their family only.
MOST_AT_FAMILY = 0.15
_SHOWN = 5


@dataclass
class Planting:
    """Faults that are run beside their parents.

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

    def __post_init__(self) -> None:
        self.console = make_console()
        self.pairs = [pair(one, self.all_must_run, self.depth) for one in self.mutants]
        if self.shard is not None:
            self.pairs = _part(self.pairs, self.shard, self.folder)

    def run(self) -> int:
        """Run every fault and print the kill matrix.  Returns the exit code."""
        return supervised(self.folder, self.console, self._body)

    def _body(self, interrupts: Interrupts) -> int:
        folder, cases = self.folder, mutant_cases(self.pairs)
        folder.plan(cases, [item.mutant.name for item in self.pairs])
        what = f"planting {number(len(self.pairs), 'fault')}"
        with FaultProgress(self.console, cases, what, {}, self.jobs) as progress:

            def note(result: CaseResult) -> None:
                with interrupts.held():
                    folder.add(result, "mutant case")
                progress.step(result)

            seconds = None if self.budget is None else self.budget * 60
            course = Course(seconds, on_start=progress.started)
            kills = run_mutants(self.pairs, self.jobs, note, folder.keep, course)
        for kill in kills:
            folder.add(kill, "kill")
        late = {kill.name for kill in kills if kill.left_out}
        before = [kill for kill in read(folder.path).kills if kill.name in late]
        judged = [kill for kill in (*kills, *before) if not kill.left_out]
        if judged:
            report.show_kills(judged, self.console.print)
        return self._told(judged, len(kills) - len(judged))

    def _told(self, judged: Sequence[Kill], left_out: int) -> int:
        """Print the sums of the matrix; the exit code."""
        survivors = sum(not kill.killed for kill in judged)
        counts = f"{len(judged) - survivors} killed, {survivors} survive"
        lines = [f"{number(len(judged), 'fault judged')} ({counts}), {left_out} left out"]
        names = {kill.name for kill in judged}
        wanted = {(kind, item.mutant.name) for item in self.pairs for kind in kinds(item.mutant)}
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
        for line in lines:
            print_line(self.console, line)
        if survivors > (MOST_AT_FAMILY * len(judged) if self.depth else 0):
            return verdicts.BROKEN
        open_end = not judged or (left_out > 0 and self.all_must_run)
        return verdicts.NOT_DECIDED if open_end else verdicts.HELD


def _part(whole: Sequence[PlantedPair], shard: Shard, folder: RunFolder) -> list[PlantedPair]:
    """The pairs of one part of a cut selection."""
    lines = [{"kind": "kill", **judge_kill(item, None, None).to_dict()} for item in whole]
    cut = Cut.of(lines, {item.mutant.name: item.parent.id for item in whole}, shard)
    folder.cut(cut, shard, mutant_cases(whole))
    pairs = [item for item in whole if cut.parts[item.mutant.name] == shard.index]
    what = f"part {shard.index} of {shard.of}"
    echo(f"{what}: {len(pairs):,} of {number(len(whole), 'fault')}")
    return pairs
