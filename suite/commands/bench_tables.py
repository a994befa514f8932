"""Comparisons and scaling cells on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardproof.commands.console import print_line

if TYPE_CHECKING:
    from rich.console import Console

Line = Mapping[str, Any]


def show_pairs(lines: Sequence[Line], console: Console) -> None:
    """The table of comparisons, and what belongs to each row."""
    if not lines:
        return
    from shardproof.bench import stats, tables

    console.print(tables.table(lines, tables.NARROW))
    for line in lines:
        first, *rest = tables.details(line)
        for text in (first, *tables.beside(line), *rest):
            print_line(console, text)
    if (caution := tables.lost(lines, stats.family(lines))) is not None:
        print_line(console, caution)


def show_cells(lines: Sequence[Line], console: Console) -> None:
    """Both tables of scaling cells, and remarks on single rows."""
    if not lines:
        return
    from shardproof.bench.scaling import tables

    console.print(tables.table(lines, tables.NARROW))
    modelled = tables.modelled_table(lines)
    if modelled.rows:
        print_line(console, "")
        console.print(modelled)
    for text in tables.remarks(lines):
        print_line(console, text)
