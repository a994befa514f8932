"""``shardproof site`` and ``shardproof history``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo, make_console, print_line
from shardproof.commands.options import option
from shardproof.errors import Problem, SelectionError
from shardproof.table import number

if TYPE_CHECKING:
    from shardproof.site.series import Move

#: Where a series is kept unless an option says otherwise.
SERIES = Path("results/history")
#: Rows of a table on a terminal.
_ROWS = 40

history = typer.Typer(
    no_args_is_help=True,
    help="Keep a series of runs, and name the commit at which a result changed.",
)
_Series = Annotated[
    Path, typer.Option("--series", metavar="DIR", help="folder of the series", parser=options.named)
]


@options.grouped()
def site(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="run folders, ids, bundles, baselines, or a series"),
    ],
    output: Path = option(
        ..., "--output", metavar="DIR", help="folder of the pages", parser=options.named
    ),
    title: str = option("Shardproof results", "--title", help="heading of the first page"),
    findings: Path | None = option(
        None, "--findings", metavar="FILE", help="Markdown page whose first table is added"
    ),
) -> None:
    """Write runs as static pages that open offline, and on any page host.

    The pages show systems by capability over machines and versions, every case with its evidence,
    curves over runs, planted faults, findings, claims, scaling, and each two runs compared. They
    need no server and no network. DIR may hold an earlier site, which is replaced, and no other
    files.

    \b
    shardproof site results/baselines/*.json --output build/site
    shardproof site 20260102-030405 20260103-040506 --output build/site
    shardproof site results/history --output build/site --title "Nightly runs"
    shardproof site results/baselines/*.json --findings docs/findings.md --output build/site

    A run that was edited is refused. No environment variable is read into the pages.

    Exit codes: 0 the pages were written, whatever the verdicts; 2 bad input, nothing was written.
    """
    from shardproof.commands.supervision import Interrupts
    from shardproof.site.pages import build

    with Interrupts():
        made = build(runs, output, title, findings)
    sizes = made.folder.sizes
    first = sum(sizes[name] for name in FIRST_VIEW)
    whole = f"{number(len(sizes), 'file')}, {sum(sizes.values()) / 1e6:,.1f} MB"
    told = f"{number(len(made.runs), 'run')}, {number(made.index.count, 'case')}, {whole}"
    echo(f"{output / 'index.html'}: {told}, first view {first / 1000:,.0f} kB")
    raise typer.Exit(verdicts.HELD)


#: All that a browser loads for the first page.
FIRST_VIEW = ("index.html", "report.css", "site.css", "report.js", "site.js")


@history.command("add")
def add(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="run folders, ids, bundles or baselines")
    ],
    series: _Series = SERIES,
) -> None:
    """Append runs to a series.

    Each run becomes one new file: its verdicts, exact figures and ratios of times, as
    `compare RUN --save FILE` writes them. No file of the series is changed. Nothing is written if
    one of the runs cannot be read, or is in the series.

    \b
    shardproof history add results/20260102-030405
    shardproof history add nightly.tar.gz --series results/nightly

    Exit codes: 0 the runs were added, 2 bad input.
    """
    from shardproof.commands.supervision import Interrupts
    from shardproof.site import series as kept

    with Interrupts():
        added = kept.add(series, runs)
    for path in added:
        echo(f"{path}: {path.stat().st_size / 1000:,.0f} kB")


@history.command("show")
def show(
    series: _Series = SERIES,
    expression: options.Expression = "",
    form: Annotated[
        Literal["table", "markdown"], typer.Option("--format", help="format of the output")
    ] = "table",
) -> None:
    """Show the runs of a series, and each result that changed with the commit of the change.

    A run is compared with the last results of its machine before it. A change is between two
    commits: the one at which the new value was first seen, and the one before it in the series.

    \b
    shardproof history show
    shardproof history show --series results/nightly -k "zero2 and gloo"
    shardproof history show --format markdown > history.md

    Exit codes: 0 the series was shown, whether or not anything changed; 2 bad input.
    """
    from shardproof.compare import tables
    from shardproof.site import series as kept

    runs = kept.read(series)
    moves = kept.moves(runs)
    if expression:
        moves = _chosen(moves, expression)
    listed = tables.runs(runs)
    listed = replace(listed, headings=listed.headings[:-1], rows=[row[:-1] for row in listed.rows])
    shown = [listed, kept.table(moves, runs)]
    closing = _sentence(len(runs), moves)
    if form == "markdown":
        echo("\n".join([*(t.section(2) for t in shown if t.rows), closing]), raw=True)
        return
    console = make_console()
    for one in shown:
        if one.rows:
            console.print(one.first(_ROWS, "--format markdown has all"))
            console.print()
    print_line(console, closing)


def _chosen(moves: list[Move], expression: str) -> list[Move]:
    """Those of results that ``expression`` matches.

    :raises SelectionError: it matches none of them, or cannot be read.
    """
    from shardproof.scenarios.select import compile_expression

    matches = compile_expression(expression)
    found = [move for move in moves if matches(move.id)]
    if not found and moves:
        remedy = "leave -k out to see every change"
        raise SelectionError(Problem("no change of a matching result", remedy, expression))
    return found


def _sentence(runs: int, moves: list[Move]) -> str:
    commits = {move.at.commit or "unknown" for move in moves}
    if not moves:
        return f"{number(runs, 'run')}: nothing changed between runs of one machine"
    where = ", ".join(sorted(commits))
    return f"{number(runs, 'run')}: {number(len(moves), 'change')}, at {where}"
