"""``shardproof check-scenario`` and ``schema``: for those who write scenario files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardproof.commands.console import echo
from shardproof.errors import InputError, Problem, SelectionError, nearest
from shardproof.table import number
from shardproof.wings import file_kinds

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.scenarios.schema import Model

#: The shape of files that the core reads.
SCENARIO = "scenario"


def check_scenario(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="scenario files")],
) -> None:
    """Check scenario files of all kinds: every fault with its file, line, value and remedy.

    Asks each system whether it takes the options, and loads your own systems for that.

    \b
    shardproof check-scenario scenarios/conformance/*.yaml
    shardproof check-scenario scenarios/scaling/strong.yaml
    """
    from shardproof.scenarios.load import kind_of, load, load_all
    from shardproof.scenarios.matrix import expand
    from shardproof.scenarios.vocabulary import installed

    problems: list[Problem] = []
    good: list[Path] = []
    asked: list[Case] = []
    for path in files:
        try:
            if kind := kind_of(path):
                echo(f"{path}: {kind.summary(path)}, for `{kind.command}`")
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
                ended = f"asking {end.key} for its options failed: {preflight.ending(end)}"
                for case, why in zip_longest(end.payload, end.value or [ended]):
                    if why:
                        file, _, line = case.source.rpartition(":")
                        what = why.removeprefix(f"{case.source}: ")
                        problems.append(Problem(what, "correct the option", None, file, int(line)))
    if problems:
        raise SelectionError(problems)


def schema(
    shape: Annotated[
        str,
        typer.Argument(
            metavar="SHAPE", help="scenario, or a command that has its own kind of files"
        ),
    ] = SCENARIO,
) -> None:
    """Print the JSON Schema of scenario files, for editors.

    \b
    shardproof schema > scenario.schema.json
    shardproof schema scaling > scaling.schema.json
    """
    from shardproof.scenarios.schema import Scenario, json_schema

    models: dict[str, Callable[[], type[Model]]] = {SCENARIO: lambda: Scenario}
    models |= {name: kind.model for name, kind in file_kinds().items()}
    if shape not in models:
        remedy = nearest(shape, models, "shapes")
        raise SelectionError(Problem("unknown kind of file", remedy, shape))
    echo(json.dumps(json_schema(models[shape](), shape), indent=2), raw=True)
