"""The commands about evidence and this machine: ``verify`` and ``doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from suite import verdicts


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(short_help="Judge a run again from its records.")(verify)
    app.command(short_help="Look for what would make runs fail here.")(doctor)


def verify(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="run folder or id (default: the newest)")
    ] = None,
) -> None:
    """Judge a run again from its records, and check that nothing is missing or changed.

    Ends with exit code 1 and a sentence that names the case and the file if a planned case is
    missing, a byte was changed, or a record gives another verdict; with 3 if nothing was judged.

    \b
    shardproof verify
    shardproof verify results/20260102-030405
    """
    from suite import execute
    from suite.results import find_run
    from suite.verify import verify as verify_run

    found = verify_run(find_run(run, execute.RESULTS))
    for problem in found.problems:
        typer.echo(problem)
    typer.echo(found.sentence())
    if found.problems:
        raise typer.Exit(verdicts.BROKEN)
    judged = found.cases + found.kills + found.benches
    raise typer.Exit(verdicts.HELD if judged else verdicts.NOT_DECIDED)


def doctor() -> None:
    """Look for what would make runs fail or mislead here, and say what to do about it.

    Exit code 0: ready; 3: something has to be done first.
    """
    from suite import execute
    from suite.doctor import examine

    ready = True
    for finding in examine(execute.RESULTS):
        ready = ready and finding.state != "bad"
        typer.echo(f"{finding.state:4}  {finding.what}: {finding.found}")
        if finding.remedy:
            typer.echo(f"      -> {finding.remedy}")
    raise typer.Exit(verdicts.HELD if ready else verdicts.NOT_DECIDED)
