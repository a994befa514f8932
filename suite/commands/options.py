"""Options that several commands share, and the selection of cases that they come to."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from shardproof.scenarios.selection import Selection


TierName = Literal["quick", "full"]
Scenarios = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCENARIO",
        help="files, folders, scenario names or case ids (default: scenarios/conformance)",
    ),
]
Impl = Annotated[
    list[str] | None,
    typer.Option("--impl", metavar="P", help="glob on implementations, or package.module:Class"),
]
BackendOption = Annotated[
    list[str] | None, typer.Option("--backend", metavar="B", help="communication backend")
]
World = Annotated[list[int] | None, typer.Option("--world", metavar="N", help="number of ranks")]
Expression = Annotated[
    str,
    typer.Option(
        "-k", metavar="EXPR", help="words of case ids with and, or, not, ( ): pytest's -k"
    ),
]
Tier = Annotated[TierName, typer.Option("--tier", help="the quick subset, or all cases")]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="S", min=0, max=2**31 - 1, help="another seed for every workload"
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget", metavar="MIN", min=0.01, help="minutes; what does not fit is left out and named"
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("-j", metavar="JOBS", min=1, max=256, help="cases at once (default: cores)"),
]
Results = Annotated[
    Path | None,
    typer.Option("--results", metavar="RUN_FOLDER", help="write into this run folder, new or old"),
]
#: A run that is looked at.
Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="run folder, id or bundle (default: the newest)")
]


def selection(
    scenarios: list[str] | None,
    impl: list[str] | None,
    backend: list[str] | None,
    world: list[int] | None,
    expression: str,
    tier: TierName,
    seed: int | None,
) -> Selection:
    """The cases that the options of a command line mean."""
    from shardproof.scenarios.selection import Selection

    return Selection(
        scenarios=scenarios or (),
        implementations=impl or (),
        backends=backend or (),
        worlds=world or (),
        expression=expression,
        tier=tier,
        seed=seed,
    )


class FailOn(StrEnum):
    """What is a failure beside a crash; typer has no lists of literals."""

    slower = "slower"
    goal = "goal"
