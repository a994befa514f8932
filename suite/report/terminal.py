"""The tables of a run on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardproof.report import bubbles, memory, tables
from shardproof.report.kills import kill_counts, kill_matrix
from shardproof.report.tables import Result

#: Prints one renderable or text; rich's ``Console.print``.
Print = Callable[..., None]


def show(run_cases: Sequence[Result], write: Print) -> None:
    """The table of results."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in tables.HEADINGS:
        numeric = heading in ("world", "median s")
        folds = heading == "verdicts"
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=not folds)
    for row in tables.rows(run_cases):
        style = "red" if row.red else ""
        table.add_row(*(Text(cell, style=style) for cell in row.cells()))
    write(table)


def show_memory(run_cases: Sequence[Result], write: Print) -> None:
    """The table of memory, where a scenario asks for it by the beginning of its name."""
    from rich.table import Table

    wanted = [r for r in run_cases if r["case"]["scenario"].startswith("memory")]
    told = memory.memory_rows(wanted)
    if not told:
        return
    write()
    table = Table(box=None, pad_edge=False, header_style="bold", title=memory.TITLE)
    for heading in memory.HEADINGS:
        table.add_column(heading, no_wrap=True)
    for cells in told:
        table.add_row(*cells, style="red" if memory.FAILS in cells[memory.MEASURED] else "")
    write(table)
    write(memory.ACCOUNTING, style="dim")


def show_bubbles(run_cases: Sequence[Result], write: Print) -> None:
    """The tables of pipelines, where a scenario asks for them by the beginning of its name."""
    from rich.table import Table

    for title, headings, cells, notes in bubbles.tables(run_cases):
        write()
        table = Table(box=None, pad_edge=False, header_style="bold", title=title)
        for number, heading in enumerate(headings):
            table.add_column(heading, no_wrap=True, justify="right" if number > 1 else "left")
        for row in cells:
            table.add_row(*row)
        write(table)
        for note in notes:
            write(note, style="dim", soft_wrap=True)


def show_kills(kills: Sequence[Result], write: Print) -> None:
    """The kill matrix: fault x check, then every survivor with what happened."""
    from rich.table import Table
    from rich.text import Text

    columns, lines = kill_matrix(kills)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("fault", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="center", no_wrap=True)
    table.add_column("lane", no_wrap=True)
    table.add_column("error / bound", justify="right", no_wrap=True)
    for kill, (name, marks) in zip(kills, lines, strict=True):
        style = "" if kill["killed"] else "red"
        margin = "" if kill["margin"] is None else f"{float(kill['margin']):.1e}"
        cells = (name, *marks, kill["lane"], margin)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    write(table)
    write("K killed by its named check, x fails too, ! named but silent", style="dim")
    write(kill_counts(kills))
    for kill in kills:
        if not kill["killed"]:
            write(Text(f"SURVIVES {kill['name']}: {kill['why_not']}", style="red"))
