"""``shardproof doctor``: findings about this machine, each with its remedy."""

from __future__ import annotations

from typing import Annotated

import typer

from shardproof import verdicts, wings
from shardproof.commands.console import echo


def doctor(
    of_cluster: Annotated[
        bool,
        typer.Option("--cluster", help="also the engine, images, tc, Slurm and Ray"),
    ] = False,
) -> None:
    """Check this machine for problems that make runs fail or mislead, and print remedies.

    \b
    shardproof doctor
    shardproof doctor --cluster     for `cluster run`, deploy/slurm and `run --on ray`

    Exit code 0: ready; 3: a problem must be solved first.
    """
    from shardproof.commands.supervision import RESULTS
    from shardproof.doctor.findings import examine

    if of_cluster and "cluster" not in wings.names():
        raise wings.absent("cluster", "--cluster")
    ready = True
    for finding in examine(RESULTS, thorough=of_cluster):
        ready = ready and finding.state != "bad"
        echo(f"{finding.state:4}  {finding.what}: {finding.found}")
        if finding.remedy:
            echo(f"      -> {finding.remedy}")
    raise typer.Exit(verdicts.HELD if ready else verdicts.NOT_DECIDED)
