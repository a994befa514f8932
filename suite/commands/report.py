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
    from shardproof.runs.bundle.unpacking import open_run
    from shardproof.runs.integrity import (
        damage_is_bad_input,
        require_unchanged,
        require_unedited,
    )
    from shardproof.runs.run_folder import read

    with open_run(run) as path, damage_is_bad_input(path):
        (require_unedited if into is None else require_unchanged)(path)
        _report(read(path), form, into)


def _report(run: Run, form: Format, into: Path | None) -> None:
    from shardproof import report as reports
    from shardproof.report.sections import of_wings

    if into is not None:
        if form == "html":
            raise SelectionError(Problem("--into takes Markdown", "leave out --format", form))
        if not run.cases:
            problem = Problem("--into: nothing to put there", "name a run of cases", run.path.name)
            raise SelectionError(problem)
        reports.insert(reports.markdown(run), into)
        echo(f"{into}: table of run {run.path.name}")
    elif form == "markdown":
        others = [section.table() for section in of_wings(run)]
        judged = [reports.markdown(run)] if run.cases or not others else []
        echo("\n".join([*judged, *others]), nl=False)
    elif form == "html":
        echo(reports.html(run), nl=False)
    else:
        _show(run)


def _show(run: Run) -> None:
    """Print the tables of ``run``."""
    from shardproof import report as reports
    from shardproof.commands.console import make_console, print_line
    from shardproof.report.sections import of_wings

    console, others = make_console(), of_wings(run)
    if run.cases:
        reports.show(run.cases, console.print)
        reports.show_broken(run.cases, console.print)
    if run.kills:
        reports.show_kills(run.kills, console.print)
        print_line(console, reports.verdict_counts(run.kills))
    for section in others:
        section.show(console)
    reasons = {line.id: line.reason for line in run.left_out}
    for line in (*reports.skips(run.cases), *reports.left_out(reasons), run.unread):
        if line:
            print_line(console, line)
    if run.cases or not (run.kills or others):
        print_line(console, reports.closing(run))
