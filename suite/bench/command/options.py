"""Groups of options of ``shardproof bench``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

import typer

from shardproof.commands import options


class FailOn(StrEnum):
    """Failures other than a crash; typer has no lists of literals."""

    slower = "slower"
    goal = "goal"


@dataclass(frozen=True, kw_only=True)
class Where(options.Output):
    """Where ranks run, for how long, and what becomes of their times."""

    backend: Annotated[
        str, typer.Option("--backend", metavar="B", help="communication backend")
    ] = ""
    world: Annotated[
        int | None, typer.Option("--world", metavar="N", min=1, max=1024, help="number of ranks")
    ] = None
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="S", min=1, help="seconds that a launch may take")
    ] = 900.0
    results: options.Results = None
    dry_run: Annotated[
        bool,
        typer.Option(
            *("--dry-run", "--collect-only"), help="print the comparisons without running them"
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class How(Where):
    """How much is timed, and which outcome is a failure."""

    blocks: Annotated[
        int | None,
        typer.Option("--blocks", metavar="N", min=2, max=100_000, help="number of repetitions"),
    ] = None
    launches: Annotated[
        int | None,
        typer.Option(
            "--launches", metavar="L", min=1, max=1000, help="how often all ranks are started"
        ),
    ] = None
    fail_on: Annotated[
        list[FailOn] | None,
        typer.Option("--fail-on", help="exit code 1 for a verdict 'slower', or a missed 'goal'"),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="MINUTES", min=0.01, help="measure only what fits"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Selected:
    """A part of what scenarios have."""

    expression: Annotated[
        str, typer.Option("-k", metavar="EXPR", help="time only results whose id matches")
    ] = ""
    shard: options.ShardOption = None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The limits that the ratio of a pair must keep."""

    goal: Annotated[
        float | None,
        typer.Option("--goal", metavar="R", min=0.01, help="upper limit of the interval of A / B"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class OfSteps(Goal):
    """The measurements of pairs of steps other than their times."""

    score: Annotated[
        bool, typer.Option("--score", help="compare each side with its predicted step")
    ] = False
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="do not run each side alone to count bytes")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OnePair:
    """A pair that no scenario has."""

    workload: Annotated[str, typer.Option("--workload", metavar="W", help="model and data")] = (
        "charnames_gpt"
    )
    size: Annotated[
        str, typer.Option("--size", metavar="S", help="size preset of the model, e.g. 20m")
    ] = ""
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="K=V", help="a parameter of the model")
    ] = None
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, max=4096, help="samples per step in total")
    ] = 16
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", metavar="M", min=1, max=64, help="per rank and step")
    ] = 1
    optimizer: Annotated[
        Literal["adamw", "sgd"],
        typer.Option("--optimizer", help="optimizer, with the same kernel for A and B"),
    ] = "adamw"
    dtype: Annotated[str, typer.Option("--dtype", help="dtype of the model")] = "float32"
    option_a: Annotated[
        list[str] | None, typer.Option("--option-a", metavar="K=V", help="option of A, also a.b=V")
    ] = None
    option_b: Annotated[
        list[str] | None, typer.Option("--option-b", metavar="K=V", help="option of B")
    ] = None
    mesh_a: Annotated[
        str, typer.Option("--mesh-a", metavar="AXIS=N,...", help="mesh of A (default: one axis)")
    ] = ""
    mesh_b: Annotated[str, typer.Option("--mesh-b", metavar="AXIS=N,...", help="mesh of B")] = ""


@dataclass(frozen=True, kw_only=True)
class OfCheckpoints:
    """The model that is saved."""

    parameters: Annotated[
        str, typer.Option("--parameters", metavar="N", help="size of the model, e.g. 200M")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class OfCollectives(Where):
    """Which collectives are timed, and of how many bytes."""

    algorithm: Annotated[
        list[str] | None,
        typer.Option("--algorithm", metavar="A", help="algorithm to measure (repeatable)"),
    ] = None
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", metavar="L", min=1, help="also measure 'hierarchical'"),
    ] = None
    sizes: Annotated[
        list[str] | None,
        typer.Option("--bytes", metavar="S", help="message size, such as 64KiB (repeatable)"),
    ] = None
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="R", min=1, max=1000, help="number of calls to time")
    ] = 7
