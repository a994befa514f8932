"""``shardproof check-scenario`` and ``schema``: for those who write scenario files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardproof.commands.console import echo
from shardproof.errors import InputError, Problem


def check_scenario(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="scenario files")],
) -> None:
    """Check scenario files, timed ones too: every fault with its file, line, value and remedy.

    \b
    shardproof check-scenario scenarios/conformance/*.yaml
    shardproof check-scenario scenarios/scaling/strong.yaml
    """
    from shardproof.scenarios.load import load, load_all, timed
    from shardproof.scenarios.matrix import expand
    from shardproof.scenarios.vocabulary import installed

    problems: list[Problem] = []
    good: list[Path] = []
    for path in files:
        try:
            if kind := timed(path):
                echo(_timed(path, kind))
                continue
            file = load(path)
            cases = expand(file, installed())
        except InputError as error:
            problems += error.problems
            continue
        good.append(path)
        quick = sum(case.tier == "quick" for case in cases)
        echo(f"{file.file}: {file.name}, {len(cases)} cases, {quick} of them quick")
    try:
        load_all(good)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)


def _timed(path: Path, kind: str) -> str:
    """What a timed scenario without faults holds."""
    if kind == "speed":
        from shardproof.bench.sides import read

        return f"{path}: {len(read([str(path)]))} pairs, for `shardproof bench`"
    from shardproof.bench.scaling import matrix

    cells = matrix.read([path])
    return f"{path}: {cells[0].name}, {len(cells)} cells, for `shardproof bench`"


def schema(
    shape: Annotated[
        Literal["scenario", "speed", "scaling"],
        typer.Argument(metavar="SHAPE", help="scenario, or one for `bench`: speed, scaling"),
    ] = "scenario",
) -> None:
    """Print the JSON Schema of scenario files, for editors.

    \b
    shardproof schema > scenario.schema.json
    shardproof schema scaling > scaling.schema.json
    """
    from shardproof.scenarios.schema import Model, Scenario, json_schema

    model: type[Model] = Scenario
    if shape == "speed":
        from shardproof.bench.sides import SpeedScenario

        model = SpeedScenario
    elif shape == "scaling":
        from shardproof.bench.scaling.matrix import ScalingScenario

        model = ScalingScenario
    echo(json.dumps(json_schema(model, shape), indent=2))
