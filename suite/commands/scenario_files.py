"""``shardproof check-scenario`` and ``schema``: for those who write scenario files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardproof.commands.console import echo
from shardproof.errors import InputError, Problem, SelectionError
from shardproof.table import number

if TYPE_CHECKING:
    from shardproof.case import Case


def check_scenario(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="scenario files")],
) -> None:
    """Check scenario files of all kinds: every fault with its file, line, value and remedy.

    Systems are asked whether they take the options; those of a user's own are loaded for that.

    \b
    shardproof check-scenario scenarios/conformance/*.yaml
    shardproof check-scenario scenarios/scaling/strong.yaml
    """
    from shardproof.scenarios.load import load, load_all, timed
    from shardproof.scenarios.matrix import expand
    from shardproof.scenarios.vocabulary import installed

    problems: list[Problem] = []
    good: list[Path] = []
    asked: list[Case] = []
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
        asked += cases
        quick = sum(case.tier == "quick" for case in cases)
        echo(f"{file.file}: {file.name}, {number(len(cases), 'case')}, {quick} of them quick")
    for look in (lambda: load_all(good), lambda: _require_taken(asked)):
        try:
            look()
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)


def _require_taken(cases: Sequence[Case]) -> None:
    """Ask every system, in a leader, whether it takes the options that it is given on a mesh.

    :raises SelectionError: some cannot be loaded, or refuse them.  All of them are told.
    """
    from shardproof.cases.leader import refusals
    from shardproof.launch.pool import Pool
    from shardproof.registry import preflight

    asked: dict[str, dict[str, Case]] = {}
    for case in cases:
        if case.options and not (case.skip or case.xfail or "refuses" in case.expect):
            key = json.dumps([case.options, case.mesh], sort_keys=True)
            asked.setdefault(case.implementation, {}).setdefault(key, case)
    if not asked:
        return
    problems = []
    with Pool(1, [refusals]) as pool:
        sources = {name: next(iter(own.values())).source for name, own in asked.items()}
        preflight.check(sources, pool, sources)
        items = [(name, [*own.values()], preflight.SECONDS) for name, own in asked.items()]
        with closing(pool.run(refusals, items)) as ends:
            for end in ends:
                ended = f"{end.key} was asked for its options: {preflight.ending(end)}"
                for case, why in zip_longest(end.payload, end.value or [ended]):
                    if why:
                        file, _, line = case.source.rpartition(":")
                        what = why.removeprefix(f"{case.source}: ")
                        problems.append(Problem(what, "correct the option", None, file, int(line)))
    if problems:
        raise SelectionError(problems)


def _timed(path: Path, kind: str) -> str:
    """What a timed scenario without faults holds."""
    if kind == "speed":
        from shardproof.bench.sides import read

        return f"{path}: {number(len(read([str(path)])), 'pair')}, for `shardproof bench`"
    from shardproof.bench.scaling import matrix

    cells = matrix.read([path])
    return f"{path}: {cells[0].name}, {number(len(cells), 'cell')}, for `shardproof bench`"


def schema(
    shape: Annotated[
        Literal["scenario", "speed", "scaling"],
        typer.Argument(
            metavar="SHAPE",
            help="scenario, or one for `bench` (speed, scaling)",
        ),
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
