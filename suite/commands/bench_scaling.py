"""``shardproof bench scaling/strong``: which cells options choose, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.bench import sides, stats
from shardproof.bench.scaling import judge, matrix
from shardproof.bench.scaling.matrix import Cell
from shardproof.commands import execution
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.scenarios.load import timed
from shardproof.scenarios.select import compile_expression

if TYPE_CHECKING:
    from rich.console import Console

Line = Mapping[str, Any]


def files(names: Sequence[str]) -> list[Path]:
    """The scaling scenarios that ``names`` name; none if they are all of pairs.

    :raises SelectionError: an unknown name, or scenarios of both kinds.
    """
    paths = sides.files(names)
    scaling = [path for path in paths if timed(path) == "scaling"]
    if scaling and len(scaling) < len(paths):
        remedy = "name scenarios of pairs in one command and those of scaling in another"
        raise SelectionError(Problem("two kinds of scenario", remedy, " ".join(names)))
    return scaling


def cells(
    paths: Sequence[Path],
    expression: str,
    backend: str,
    world: int | None,
    blocks: int | None,
    launches: int | None,
    deadline: float,
) -> list[Cell]:
    """The cells of scaling scenarios, as options change and filter them.

    :raises InputError: faulty files, options that do not fit, or nothing that matches.
    """
    found = matrix.read(paths)
    if backend:
        moved = [replace(cell, backend=backend) for cell in found]
        found = list({cell.id: cell for cell in moved}.values())
    if world is not None:
        found = matrix.with_worlds(found, [world])
    changed = []
    for cell in found:
        count = blocks or cell.blocks
        many = launches or min(cell.launches, count)
        changed.append(replace(cell, blocks=count, launches=many, deadline=deadline))
        matrix.check(changed[-1])
    matches = compile_expression(expression)
    chosen = [cell for cell in changed if matches(cell.id)]
    if not chosen:
        remedy = nearest(expression, [cell.title for cell in changed], "systems")
        raise SelectionError(Problem("-k matches no cell", remedy, expression))
    return chosen


def show(lines: Sequence[Line], console: Console) -> None:
    """Both tables, and what is to be said of a row."""
    if not lines:
        return
    _, rows = judge.table(lines)
    _show(judge.NARROW, [judge.narrow(row) for row in rows], console)
    headings, rows = judge.modelled_table(lines)
    if rows:
        execution.tell(console, "")
        execution.tell(console, f"{judge.MODELLED_TITLE}:")
        _show(headings, rows, console)
    for text in judge.remarks(lines):
        execution.tell(console, text)


def _show(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        found.add_column(heading, no_wrap=heading == "system")
    for row in rows:
        red = bool({"below", *stats.BROKEN} & set(row))
        found.add_row(*(Text(cell, style="red" if red else "") for cell in row))
    console.print(found)


def markdown(lines: Sequence[Line]) -> str:
    """Both tables as Markdown."""
    if not lines:
        return ""
    text = _markdown(*judge.table(lines))
    headings, rows = judge.modelled_table(lines)
    return text + (f"\n{judge.MODELLED_TITLE}:\n\n{_markdown(headings, rows)}" if rows else "")


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    told = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in told)
