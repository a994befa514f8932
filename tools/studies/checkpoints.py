"""Random clean histories of saves and loads: ``python -m tools.studies checkpoints N``."""

from __future__ import annotations

from typing import Annotated

import typer

from shardproof.campaign.histories import first_cases
from shardproof.commands import options
from shardproof.commands.execution import run_and_exit


@options.grouped()
def run(
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=100_000)],
    impl: options.Impl = None,
    seed: options.Seed = None,
    *,
    session: options.SessionOptions,
) -> None:
    """Run N random clean histories of saves and loads; a failure is a false alarm.

    A reference strategy trains, saves once or several times in a format that is drawn, and is
    loaded by the same ranks, on another mesh, as another strategy or in another precision. The
    check `checkpoint` judges it: docs/checkpoints.md.

    \b
    python -m tools.studies checkpoints 300 --seed 16
    python -m tools.studies checkpoints 50 --impl 'reference/zero*'
    """
    run_and_exit(first_cases(count, seed or 0, impl or ()), session)
