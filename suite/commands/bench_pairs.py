"""Comparisons on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardproof.bench.tables import NARROW, beside, details, lost, narrow

if TYPE_CHECKING:
    from rich.console import Console

Line = Mapping[str, Any]


def show(lines: Sequence[Line], console: Console) -> None:
    """The table, and what belongs to each row."""
    from rich.table import Table
    from rich.text import Text

    from shardproof.bench import stats
    from shardproof.commands import execution

    if not lines:
        return
    report = stats.family(lines)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in NARROW:
        table.add_column(heading, no_wrap=heading == "pair")
    for line in lines:
        red = line["verdict"] in ("slower", *stats.BROKEN)
        table.add_row(*(Text(cell, style="red" if red else "") for cell in narrow(line, report)))
    console.print(table)
    for line in lines:
        first, *rest = details(line)
        for text in (first, *beside(line), *rest):
            execution.tell(console, text)
    if (told := lost(lines, report)) is not None:
        execution.tell(console, told)
