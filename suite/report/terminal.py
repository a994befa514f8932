"""The tables of a run on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardproof import verdicts
from shardproof.checks.results import CaseResult, Kill
from shardproof.errors import printable
from shardproof.report import kills
from shardproof.report.sections import ABOVE
from shardproof.runs.blocks import blocks, of_result
from shardproof.runs.header import Header
from shardproof.runs.run_folder import Run
from shardproof.table import number

#: Prints one renderable or text; rich's ``Console.print``.
Print = Callable[..., None]
#: Blocks that a terminal shows, and lines of a reason.
_BLOCKS, _LINES = 20, 12


def show(results: Sequence[CaseResult], write: Print) -> None:
    """The tables of cases that a terminal shows: results, then memory and pipelines, if any."""
    run = Run(Path(), Header(invocations=[]), cases=[*results])
    first, *others = (table for part in ABOVE for table in part.terminal(run))
    write(first)
    for table in others:
        if table.rows:
            write()
            write(table)


def show_broken(results: Sequence[CaseResult], write: Print) -> None:
    """What broke or is open, a block for each cause: the simplest case, and how to rerun it."""
    from rich.text import Text

    told = verdicts.RED | verdicts.OPEN
    found = blocks(of_result(r) for r in results if verdicts.kind(r.verdict) in told)
    if found:
        cases = sum(len(block.failures) for block in found)
        write(f"\nwhat did not hold: {number(cases, 'case')}, {number(len(found), 'cause')}")
    for block in found[:_BLOCKS]:
        first = block.first
        write(Text(printable(f"{first.verdict}: {first.id}"), style="bold red"), soft_wrap=True)
        lines = [*first.reason.splitlines()[:_LINES], f"rerun: {first.rerun}"]
        for line in (*lines, *filter(None, [block.more()])):
            write(Text(printable(f"    {line}")), soft_wrap=True)
    if rest := found[_BLOCKS:]:
        cases = sum(len(block.failures) for block in rest)
        causes = f"{len(rest)} more {'cause' if len(rest) == 1 else 'causes'}"
        write(f"{causes} ({number(cases, 'case')}): see report.html")


def show_kills(lines: Sequence[Kill], write: Print) -> None:
    """What became of the faults that were planted; of the others nothing is known."""
    from rich.text import Text

    if judged := kills.judged(lines):
        write(kills.table(judged).titled(""))
    for kill in kills.survivors(lines):
        write(Text(printable(f"SURVIVES {kill.name}: {kill.why_not}"), style="red"))
