"""``shardproof bench scaling/strong``: cells in, measured side by side, evidence and tables out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardproof import verdicts
from shardproof.bench import sides as timed_plan
from shardproof.bench.scaling import judge, matrix
from shardproof.bench.scaling.matrix import Cell
from shardproof.bench.scaling.session import Measured, Scaling, keep
from shardproof.bench.session import Bench
from shardproof.bench.sides import SEGMENT_SECONDS, WARM_SECONDS
from shardproof.commands import supervision
from shardproof.commands.bench_pairs import tell_late
from shardproof.commands.console import Blocks, make_console, print_line
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.registry import preflight
from shardproof.runs.run_folder import Durations, read
from shardproof.scenarios.load import timed
from shardproof.scenarios.select import compile_expression

if TYPE_CHECKING:
    from rich.console import Console

Line = Mapping[str, Any]
#: Seconds that a launch takes besides its warm-up and its blocks, where nothing is known.
_LAUNCH_SECONDS = 6.0


def files(names: Sequence[str]) -> list[Path]:
    """The scaling scenarios that ``names`` name; none if they are all of pairs.

    :raises SelectionError: an unknown name, or scenarios of both kinds.
    """
    paths = timed_plan.files(names)
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


def run(
    chosen: Sequence[Cell],
    results: Path | None,
    below_fails: bool,
    budget: float | None = None,
    dry_run: bool = False,
) -> int:
    """Measure cells into a run folder, within ``budget`` minutes; the exit code.

    What does not fit is left out by name: a cell by past durations, and with the cell in whose
    launches they would have been probed those that are modelled.

    :raises SelectionError: a system cannot be loaded, or refuses its options.
    """
    preflight.check(cell.system.implementation for cell in chosen)
    console = make_console()
    root = results.parent if results is not None else supervision.RESULTS
    durations = Durations(root / "durations.json")
    if dry_run:
        _tell_plan(chosen, budget, durations)
        return verdicts.HELD
    lines: list[dict[str, Any]] = []
    late: list[Cell] = []
    began = time.monotonic()

    def fits(item: Measured) -> bool:
        seconds = _expected(item.cell, durations)
        return budget is None or time.monotonic() - began + seconds <= budget * 60

    with Bench() as bench:
        session = Scaling(bench)
        items = session.examine(chosen)
        timed_ones = [item for item in items if item.timed]
        with supervision.open_folder(results) as folder:

            def body(interrupts: supervision.Interrupts) -> int:
                folder.plan_benches([item.cell.id for item in items])
                known = {line["id"] for line in read(folder.path).scalings}
                for item in items:
                    cell = item.cell
                    source = item.source or item
                    if source.cell in late or (item in timed_ones and not fits(item)):
                        late.append(cell)
                        if cell.id not in known:  # figures of an earlier invocation stay
                            why = f"no room in a budget of {budget:g} minutes"
                            folder.leave_out_bench(cell.to_dict(), why)
                        continue
                    started = time.monotonic()
                    try:
                        if item in timed_ones:
                            number = f"{timed_ones.index(item) + 1}/{len(timed_ones)}"
                            _time(session, item, number, console)
                    finally:
                        # Also after Ctrl-C: whole blocks can be judged.
                        if item.rows or item.problem or item.source is not None:
                            with interrupts.held():
                                lines.append(keep(folder, item))
                    if item in timed_ones and item.problem is None:
                        durations.note(_name(cell), time.monotonic() - started)
                show(lines, console)
                names = [cell.id for cell in late]
                stay = [line for line in read(folder.path).scalings if line["id"] in names]
                tell_late(names, stay, console)
                # Figures of before are no work of now, but a budget hides no failure among them.
                failed = exit_code(stay, below_fails) == verdicts.BROKEN
                return verdicts.BROKEN if failed else exit_code(lines, below_fails)

            def interrupted() -> None:
                show(lines, console)
                print_line(console, f"stopped: {len(lines)} of {len(items)} cells have figures")

            return supervision.supervised(folder, console, body, interrupted, durations.save)


def _tell_plan(chosen: Sequence[Cell], budget: float | None, durations: Durations) -> None:
    """Print the ids of what would be measured or modelled; what a budget leaves out is named, too.

    :raises SelectionError: a system refuses its options.
    """
    if budget is None:  # all of it, whatever fits on this machine
        for cell in chosen:
            typer.echo(cell.id)
        return
    with Bench() as bench:
        items = Scaling(bench).examine(chosen)
    inside, seconds = within(items, budget, durations)
    for item in inside:
        typer.echo(item.cell.id)
    names = {item.cell.id for item in inside}
    late = [item.cell.id for item in items if item.cell.id not in names]
    for name in late:
        typer.echo(f"left out by the budget: {name}", err=True)
    left_out = f", {len(late)} left out by the budget" if late else ""
    typer.echo(f"{len(inside)} cells, about {seconds:.0f} s{left_out}", err=True)


def within(
    items: Sequence[Measured], budget: float, durations: Durations
) -> tuple[list[Measured], float]:
    """Those that fit into ``budget`` minutes by past durations, in their order, and their seconds.

    With a cell go those that are modelled from its launches.
    """
    inside: list[Measured] = []
    used = 0.0
    for item in items:
        if item.timed:
            seconds = _expected(item.cell, durations)
            fits = used + seconds <= budget * 60
            used += seconds if fits else 0.0
        else:
            fits = item.problem is not None or item.source in inside
        if fits:
            inside.append(item)
    return inside, used


def _time(session: Scaling, item: Measured, number: str, console: Console) -> None:
    """All launches of one cell."""
    cell = item.cell
    ranks = "alone" if item.refused else f"on {cell.world} ranks"
    said = f"{number} {cell.mode} {cell.title} {ranks}, {cell.backend}"
    with Blocks(console, said, cell.blocks) as shown:
        session.time(item, shown.tell)
        if item.on_threads and not (item.refused or item.problem):
            shown.say("memory")
            session.memory(item)


def _name(cell: Cell) -> str:
    """What a duration is remembered by."""
    return f"{cell.id}::{cell.blocks}x{cell.launches}"


def _expected(cell: Cell, durations: Durations) -> float:
    """Seconds of a cell: those of the past, else a guess from warm-up, segments and launches."""
    known = durations.estimate(_name(cell))
    if known is not None:
        return known
    sides = len(dict.fromkeys(judge.ORDER))
    launch = _LAUNCH_SECONDS + sides * WARM_SECONDS
    return cell.launches * launch + cell.blocks * len(judge.ORDER) * 2 * SEGMENT_SECONDS


def exit_code(lines: Sequence[Line], below_fails: bool) -> int:
    """1 something broke (or, if asked, misses its target), 3 something is open or all of it was
    refused, 0 decided.
    """
    told = {line["verdict"] for line in lines}
    if told & set(judge.BROKEN) or (below_fails and "below" in told):
        return verdicts.BROKEN
    if told & set(judge.OPEN) or not told & set(judge.DECIDED):
        return verdicts.NOT_DECIDED
    return verdicts.HELD


def show(lines: Sequence[Line], console: Console) -> None:
    """Both tables, and what is to be said of a row."""
    if not lines:
        return
    _, rows = judge.table(lines)
    _show(judge.NARROW, [judge.narrow(row) for row in rows], console)
    headings, rows = judge.modelled_table(lines)
    if rows:
        print_line(console, "")
        print_line(console, f"{judge.MODELLED_TITLE}:")
        _show(headings, rows, console)
    for text in judge.remarks(lines):
        print_line(console, text)


def _show(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        found.add_column(heading, no_wrap=heading == "system")
    for row in rows:
        red = bool({"below", *judge.BROKEN} & set(row))
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
