"""``shardproof doctor``: findings about this machine, each with its remedy."""

from __future__ import annotations

from typing import Annotated

import typer

from shardproof import verdicts, wings
from shardproof.commands.console import echo, is_json, make_console
from shardproof.table import Table


def doctor(
    of_cluster: Annotated[
        bool,
        typer.Option("--cluster", help="also check container engine, images, tc, Slurm and Ray"),
    ] = False,
) -> None:
    """Check this machine for problems that break runs or make results wrong, and print remedies.

    It also shows what connects GPUs and nodes (NVLink, InfiniBand), and which timeouts and settings
    of torch and NCCL are in effect.

    \b
    shardproof doctor
    shardproof doctor --cluster     also for `cluster run`, deploy/slurm and `run --on ray`

    Exit codes: 0 ready; 3 you must solve a problem first.
    """
    from shardproof.commands.supervision import RESULTS
    from shardproof.doctor.findings import examine

    if of_cluster and "cluster" not in wings.names():
        raise wings.absent("cluster", "--cluster")
    ready, rows = True, []
    for finding in examine(RESULTS, thorough=of_cluster):
        ready = ready and finding.state != "bad"
        rows.append((finding.state, finding.what, finding.found, finding.remedy))
        echo(f"{finding.state:4}  {finding.what}: {finding.found}")
        if finding.remedy:
            echo(f"      -> {finding.remedy}")
    if is_json():
        make_console().print(Table("Findings", ("state", "what", "found", "remedy"), rows))
    raise typer.Exit(verdicts.HELD if ready else verdicts.NOT_DECIDED)
