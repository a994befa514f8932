"""The tables of a run on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardproof.checks.results import CaseResult, Kill
from shardproof.errors import printable
from shardproof.report import bubbles, kills, memory, tables

#: Prints one renderable or text; rich's ``Console.print``.
Print = Callable[..., None]


def show(results: Sequence[CaseResult], write: Print) -> None:
    """The table of results; those of memory and pipelines, of scenarios that are named so."""
    write(tables.table(results).titled(""))
    state = memory.table(r for r in results if r.case.scenario.startswith("memory"))
    for table in (*([state] if state.rows else []), *bubbles.tables(results)):
        write()
        write(table)


def show_kills(lines: Sequence[Kill], write: Print) -> None:
    from rich.text import Text

    write(kills.table(lines).titled(""))
    for kill in lines:
        if not kill.killed:
            write(Text(printable(f"SURVIVES {kill.name}: {kill.why_not}"), style="red"))
