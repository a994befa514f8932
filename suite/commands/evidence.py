"""The commands about evidence: ``report``, ``verify``, ``merge``, ``bundle``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof import verdicts, wings
from shardproof.commands import options
from shardproof.commands.console import echo, is_json, make_console, print_line
from shardproof.errors import Problem, SelectionError

if TYPE_CHECKING:
    from shardproof.runs.merge import Merge
    from shardproof.runs.run_folder import Run, RunFolder


Format = Literal["table", "markdown", "html"]


def report(
    run: options.Run = None,
    form: Annotated[Format, typer.Option("--format", help="format of the report")] = "table",
    into: Annotated[
        Path | None,
        options.output(
            "--into", "write Markdown into FILE, between the comments results:begin and results:end"
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="print every row, not one row per system")
    ] = False,
) -> None:
    """Show a run's report as tables, Markdown or HTML.

    Without --into, Markdown and HTML are printed to standard output.

    \b
    shardproof report             a row per system; with -v, a row per case
    shardproof report 20260102-030405 --format markdown
    shardproof report 20260102-030405.tar.gz --format html > report.html
    shardproof report --into results/README.md
    """
    from shardproof.runs import integrity
    from shardproof.runs.bundle.unpacking import open_run
    from shardproof.runs.run_folder import read

    with open_run(run) as path, integrity.damage_is_bad_input(path):
        (integrity.require_unedited if into is None else integrity.require_unchanged)(path)
        _report(read(path), form, into, verbose or is_json())


def _report(run: Run, form: Format, into: Path | None, rows: bool) -> None:
    from shardproof import report as reports
    from shardproof.report.sections import of_wings

    if into is not None:
        if form == "html":
            raise SelectionError(Problem("--into writes Markdown", "leave out --format", form))
        if not run.cases:
            problem = Problem("--into: the run has no cases", "name another run", run.path.name)
            raise SelectionError(problem)
        reports.insert(reports.markdown(run), into)
        echo(f"{into}: table of run {run.path.name}")
    elif form == "markdown":
        others = [section.table() for section in of_wings(run)]
        judged = [reports.markdown(run)] if run.cases or not others else []
        echo("\n".join([*judged, *others]), nl=False, raw=True)
    elif form == "html":
        echo(reports.html(run), nl=False, raw=True)
    else:
        _show(run, rows)


def _show(run: Run, rows: bool) -> None:
    """Print the tables of ``run``, with every row or one for each family."""
    from shardproof import report as reports
    from shardproof.report.sections import of_wings

    console, others = make_console(), of_wings(run)
    if run.cases:
        reports.show(run.cases, console.print, rows)
        reports.show_broken(run.cases, console.print)
    if run.kills:
        reports.show_kills(run.kills, console.print, rows)
        reports.show_survivors(run.kills, console.print)
        print_line(console, reports.verdict_counts(run.kills))
    for section in others:
        section.show(console, rows)
    reasons = {line.id: line.reason for line in run.left_out}
    for line in (*reports.skips(run.cases, rows), *reports.left_out(reasons, rows), run.unread):
        if line:
            print_line(console, line)
    if run.cases or not (run.kills or others):
        print_line(console, reports.closing(run))


def verify(run: options.Run = None) -> None:
    """Judge a run again from its records, and check that nothing is missing or changed.

    RUN may be an archive that `shardproof bundle` made. The archive is checked, then unpacked
    into a temporary folder. No other file from the machine of the run is needed.

    \b
    Exit codes: 0 every verdict was confirmed
                1 a planned case is missing, a byte was changed, the records give
                  a verdict that differs from the verdict in the run, or a Python
                  package for a backend or strategy of the run is missing.
                  A message names the case and the file
                2 an archive is damaged, or not safe to unpack
                3 nothing was judged

    \b
    shardproof verify
    shardproof verify results/20260102-030405
    shardproof verify 20260102-030405.tar.gz
    """
    from shardproof.commands.verify import verify as verify_run
    from shardproof.commands.verify import verify_archive
    from shardproof.runs.bundle.unpacking import notes
    from shardproof.runs.run_folder import find_run

    if run is not None and Path(run).is_file():
        verified, listing = verify_archive(Path(run))
        about = notes(listing)
    else:
        verified, about = verify_run(find_run(run)), ()
    for text in (*verified.problems, *about, verified.sentence()):
        echo(text)
    if verified.problems:
        raise typer.Exit(verdicts.BROKEN)
    judged = verified.cases + verified.kills + sum(verified.others.values())
    raise typer.Exit(verdicts.HELD if judged else verdicts.NOT_DECIDED)


def merge(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="parts: run folders, ids or bundles")
    ],
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="RUN", help="the new run folder", parser=options.named),
    ] = None,
) -> None:
    """Merge the parts of a selection, made by `--shard I/N` on N machines, into one run.

    Lines, records and raw times are copied byte for byte; `verify`, `report`, `compare` and `gate`
    accept the merged run like any other. Cases without a result in any part are listed, and can be
    run by `run --resume --results RUN` (cases). run.json has machine, torch and kernels of each
    part.

    All parts must have the same selection, number of parts, version and commit of the suite, and
    format; no part may be given twice. Timed parts must also have the same hardware and torch,
    because figures other than ratios belong to one machine.

    Exit codes: 0 all parts are there, whatever their verdicts (see `report` and `gate`); 2 the
    parts do not belong together; 3 a part is missing, did not end, or left something out
    (a budget, Ctrl-C).

    \b
    shardproof run --tier full --shard 1/4 --results part1        on one machine; 2/4 on the next
    shardproof merge part1 part2 part3 part4 --into results/full
    shardproof merge part*.tar.gz                                 bundles of parts
    """
    from shardproof.commands.supervision import open_folder
    from shardproof.runs import merge as parts
    from shardproof.runs.bundle.unpacking import open_run

    options.require_new("--into", into)
    with ExitStack() as stack:
        opened = [(name, stack.enter_context(open_run(name))) for name in runs]
        merged = parts.plan(parts.read_part(name, path) for name, path in opened)
        raise typer.Exit(_merge(merged, stack.enter_context(open_folder(into))))


def _merge(merged: Merge, folder: RunFolder) -> int:
    """Write the run, its reports and its messages; the exit code."""
    from shardproof.commands.supervision import Interrupts, supervised
    from shardproof.runs import junit
    from shardproof.runs import merge as parts
    from shardproof.runs.run_folder import read

    console = make_console()

    def body(_: Interrupts) -> int:
        parts.copy(merged, folder)
        for wing in wings.wings():
            wing.after_merge(folder)
        run = read(folder.path)
        parts_told = (part.sentence() for part in merged.parts)
        for text in (*parts_told, *merged.differences, *merged.gaps):
            print_line(console, text)
        if judged := [*run.cases, *run.mutant_cases]:
            counts = verdicts.count(judged)
            print_line(console, verdicts.summary(counts, len(run.left_out)))
        return verdicts.NOT_DECIDED if merged.gaps else verdicts.HELD

    def stopped() -> str:
        return f"stopped: remove {folder.path} and merge again"

    def finish() -> None:
        folder.write("junit.xml", junit.document(read(folder.path)))

    return supervised(folder, console, body, stopped, finish)


def bundle(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="run folder or id (default: the newest)")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="archive (default: <run-id>.tar.gz)"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace FILE if it exists")] = False,
) -> None:
    """Pack a run into one archive that `shardproof verify` accepts on another machine.

    The archive holds the inputs of verdicts (records, raw times, the lines of all cases, the
    manifest) and the reports, with a digest of all. It lists what it leaves out (logs of clusters).
    The same run gives the same bytes. To verify the archive you need only shardproof, with any
    torch. Owners and times of files are not packed, but the run's records name its commands, and
    paths in messages of failures.

    Ends with exit code 2, and writes nothing, if the run does not match its manifest.

    \b
    shardproof bundle
    shardproof bundle results/20260102-030405 --output evidence.tar.gz
    shardproof verify evidence.tar.gz
    """
    from shardproof.runs.bundle.packing import pack
    from shardproof.runs.bundle.unpacking import notes
    from shardproof.runs.integrity import damage_is_bad_input
    from shardproof.runs.run_folder import find_run, read

    folder = find_run(run)
    with damage_is_bad_input(folder):
        reports = _reports(folder)
    packed = pack(folder, output, reports, force)
    listing = packed.listing
    held = f"{len(listing.members)} files of {listing.bytes / 1e6:.1f} MB"
    echo(f"{packed.path}: {held} in {packed.bytes / 1e6:.1f} MB")
    left_out = [f"left out: {name}" for name in listing.left_out]
    for text in filter(None, (*notes(listing), *left_out, read(folder).gap)):
        echo(text)


def _reports(folder: Path) -> dict[str, str]:
    """The reports that a run lacks (it was killed, or is older than they are)."""
    from dataclasses import replace

    from shardproof import report
    from shardproof.runs import junit
    from shardproof.runs.run_folder import read

    run = read(folder)
    run = replace(run, path=run.path.parent / run.name)
    makers = {"report.html": report.html, "report.md": report.document, "junit.xml": junit.document}
    return {name: make(run) for name, make in makers.items() if not (folder / name).exists()}
