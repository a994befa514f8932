"""``shardproof report``: a run, shown again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.runs.run_folder import Run


Format = Literal["table", "markdown", "html"]


def report(
    run: options.Run = None,
    form: Annotated[Format, typer.Option("--format", help="form of the report")] = "table",
    into: Annotated[
        Path | None, options.output("--into", "put the Markdown between FILE's markers")
    ] = None,
) -> None:
    """Show a run again, on the terminal or as a file's text on standard output.

    \b
    shardproof report
    shardproof report 20260102-030405 --format markdown
    shardproof report 20260102-030405.tar.gz --format html > report.html
    shardproof report --into results/README.md
    """
    from shardproof.commands.supervision import RESULTS
    from shardproof.runs.bundle.unpacking import open_run
    from shardproof.runs.integrity import (
        damage_is_bad_input,
        require_unchanged,
        require_unedited,
    )
    from shardproof.runs.run_folder import read

    with open_run(run, RESULTS) as path, damage_is_bad_input(path):
        (require_unedited if into is None else require_unchanged)(path)
        _report(read(path), form, into)


def _report(run: Run, form: Format, into: Path | None) -> None:
    from shardproof import report as reports
    from shardproof.bench import collective_times, lines, peers, tables
    from shardproof.bench.command import bench_run
    from shardproof.bench.drawings import bandwidth
    from shardproof.bench.scaling import tables as scaling_tables
    from shardproof.commands.console import make_console, print_line

    if into is not None:
        if form == "html":
            raise SelectionError(Problem("--into takes Markdown", "leave out --format", form))
        beside = bool(peers.lines_of(run))
        missing = peers.missing(run) if beside else []
        if not run.cases and (missing or not beside):
            why = "--into: nothing to put there" + (f": {peers.why_not(missing)}" * bool(missing))
            remedy = "name a run of cases, or of the whole `shardproof bench peers`"
            raise SelectionError(Problem(why, remedy, run.path.name))
        if run.cases:
            reports.insert(reports.markdown(run), into)
            echo(f"{into}: table of run {run.path.name}")
        if missing:
            echo(f"{into}: its table of peers stays: {peers.why_not(missing)}")
        elif beside:
            reports.insert(peers.section(run), into, peers.BEGIN, peers.END)
            echo(f"{into}: reference beside upstream systems, run {run.path.name}")
    elif form == "markdown":
        timed = [
            *([tables.table(lines.pairs(run)).markdown()] if run.benches else []),
            *([scaling_tables.markdown(lines.cells(run))] if run.scalings else []),
            *([collective_times.summary(bandwidth.of(run)).markdown()] if run.collectives else []),
        ]
        judged = [reports.markdown(run)] if run.cases or not timed else []
        echo("\n".join([*judged, *timed]), nl=False)
    elif form == "html":
        echo(reports.html(run), nl=False)
    else:
        console = make_console()
        if run.cases:
            reports.show(run.cases, console.print)
            reports.show_broken(run.cases, console.print)
        if run.kills:
            reports.show_kills(run.kills, console.print)
            print_line(console, reports.verdict_counts(run.kills))
        bench_run.show_pairs(lines.pairs(run), console)
        bench_run.show_cells(lines.cells(run), console)
        if run.collectives:
            console.print(collective_times.summary(bandwidth.of(run)))
        reasons = {line.id: line.reason for line in run.left_out}
        for line in (*reports.skips(run.cases), *reports.left_out(reasons)):
            print_line(console, line)
        if run.cases or not (run.kills or run.benches or run.scalings or run.collectives):
            print_line(console, reports.closing(run))
