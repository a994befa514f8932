"""The contradictions in a scenario of valid shape: sections, checks and axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from shardproof.case import WorkloadSpec
from shardproof.cases import kinds
from shardproof.errors import Problem
from shardproof.scenarios import plans, schema
from shardproof.scenarios.cells import Cell, workload_of
from shardproof.scenarios.load import ScenarioFile
from shardproof.scenarios.vocabulary import Vocabulary

#: Keys and numbers that lead to a part of a file.
Keys = list[str | int]
#: Where something is wrong, what, and the remedy.
Wrong = tuple[Keys, str, str]
#: The trait that needs a loss scaler.
OVERFLOW = "overflow_on_one_rank"


def parts(scenario: schema.Scenario) -> Iterator[tuple[Keys, schema.Matrix | schema.Include]]:
    """Each group of axes and the keys to it: the matrix, then what is included."""
    yield ["matrix"], scenario.matrix
    for index, include in enumerate(scenario.include):
        yield ["include", index], include


def problems(file: ScenarioFile, vocabulary: Vocabulary) -> Iterator[Problem]:
    """The problem of a file of known names, whatever its cells."""
    scenario = file.scenario
    if not scenario.matrix.workload:
        yield from cannot_be_built(file, vocabulary, ["workload"], workload_of(scenario, None))
    for path, axes in parts(scenario):
        for index, variant in enumerate(axes.workload):
            at: Keys = [*path, "workload", index]
            yield from cannot_be_built(file, vocabulary, at, workload_of(scenario, variant))
    yield from plans.problems(file)
    choices: list[Any] = [*scenario.matrix.implementation, *scenario.matrix.workload]
    expects = [e for e in (scenario.expect, *(choice.expect for choice in choices)) if e]
    for name in ("traffic", "memory"):
        if name not in scenario.checks and any(getattr(expect, name) for expect in expects):
            what = f"expect.{name} needs the check `{name}`"
            yield file.problem(
                ["expect"], what, f"add {name} to checks", ", ".join(scenario.checks)
            )
    refuses = any(expect.refuses for expect in expects)
    if refuses != ("refusals" in scenario.checks):
        what = "expect.refuses and the check `refusals` belong together"
        yield file.problem(["checks"], what, "give both or neither", ", ".join(scenario.checks))


def cannot_be_built(
    file: ScenarioFile, vocabulary: Vocabulary, path: Keys, spec: WorkloadSpec
) -> Iterator[Problem]:
    """Why the workload at ``path`` is none."""
    if (fault := vocabulary.fault_of(spec)) is not None:
        what, remedy = f"this workload cannot be built: {fault}", "`shardproof list traits`"
        yield file.problem(path, what, f"correct it, or see {remedy}", spec.name)


def problems_of_cells(
    file: ScenarioFile, vocabulary: Vocabulary, cells: Sequence[Cell]
) -> Iterator[Problem]:
    """The problem of the first wrong cell, and of plans for their cells."""
    wrong = ((cell, one) for cell in cells for one in _wrong(file.scenario, vocabulary, cell))
    for cell, (path, what, remedy) in itertools.islice(wrong, 1):
        yield file.problem(path, what, remedy, " ".join(filter(None, cell.key)))
    yield from plans.problems_of_cells(file, cells)


def _wrong(scenario: schema.Scenario, vocabulary: Vocabulary, cell: Cell) -> Iterator[Wrong]:
    workload = workload_of(scenario, cell.workload)
    yield from _of_kind(scenario, workload, cell)
    scaler = cell.optimizer and cell.optimizer.scaler
    if OVERFLOW in workload.traits and cell.optimizer is not None and scaler is None:
        what = f"trait {OVERFLOW} makes gradients infinite: a loss scaler must skip them"
        remedy = "give the optimizer a scaler, e.g. {name: sgd, scaler: {interval: 2}}"
        yield ["matrix", "optimizer"], what, remedy
    yield from _of_relation(scenario, cell)
    if cell.lane == "dyadic" and workload.name not in vocabulary.dyadic:
        what = f"workload {workload.name} has no form for lane dyadic, which needs small integers"
        yield ["matrix", "lane"], what, f"workloads that have one: {', '.join(vocabulary.dyadic)}"
    if cell.lane in ("bitwise", "dyadic") and cell.clip is not None:
        what = f"lane {cell.lane} needs clipping off: a norm's sum has no fixed order"
        remedy = f"exclude {{lane: {cell.lane}, clip: ...}}, or take lane fp64"
        yield ["matrix", "lane"], what, remedy


def _of_kind(scenario: schema.Scenario, workload: WorkloadSpec, cell: Cell) -> Iterator[Wrong]:
    """The settings that the kind of the workload does not allow."""
    kind, checks = kinds.of(workload), {*scenario.checks}
    if kind.trains and cell.optimizer is None:
        yield ["matrix", "optimizer"], "no optimizer is named", "name one, e.g. sgd"
    if not kind.trains and cell.optimizer is not None:
        what = f"workload {workload.name} trains nothing"
        yield ["matrix", "optimizer"], what, "leave the optimizer out"
    for name, each in kinds.UNTRAINED.items():
        check, asked = each.only_check, each is kind
        if asked != (check in checks) or (asked and checks - each.also != {check}):
            what = f"workload {name} and the check `{check}` belong together"
            yield ["checks"], what, "give both, and no other check, or neither"
    if not kind.trains and (cell.lane != "bitwise" or cell.clip is not None or cell.precision):
        what = f"{workload.name} are compared bit for bit, so they take no clip and no precision"
        yield ["matrix", "lane"], what, "write lane: bitwise, and leave clip and precision out"


def _of_relation(scenario: schema.Scenario, cell: Cell) -> Iterator[Wrong]:
    """The problem of the relation of the cell, or of its absence."""
    own = cell.workload and cell.workload.expect, cell.implementation.expect
    given = next((e for e in own if e and e.relation is not None), scenario.expect)
    if ("relations" in scenario.checks) != (given.relation is not None):
        remedy = f"give both or neither: {', '.join(get_args(schema.RelationName))} or same_as"
        yield ["checks"], "expect.relation and the check `relations` belong together", remedy
    if not isinstance(given.relation, schema.SameAs):
        return
    other, mesh, choice = given.relation.same_as, dict(cell.mesh), cell.implementation
    at = [*keys_to(scenario, lambda one: one.expect is given), "expect", "relation"]
    again = {**choice.options, **other.options} == choice.options
    if again and other.implementation in (None, choice.name) and other.mesh in (None, mesh):
        what = "same_as describes the case itself: the second run must differ"
        yield at, what, "name another implementation, mesh or options"
    ranks = math.prod((other.mesh or mesh).values())
    if ranks != cell.world:
        what = f"same_as runs on {ranks} ranks, but the case on {cell.world}"
        yield [*at, "same_as", "mesh"], what, f"choose axis sizes with the product {cell.world}"


def keys_to(scenario: schema.Scenario, is_it: Callable[[Any], bool]) -> Keys:
    """Where the file has a choice of workload or implementation; no keys: it is the scenario's."""
    for path, axes in parts(scenario):
        for axis in ("workload", "implementation"):
            for index, choice in enumerate(getattr(axes, axis)):
                if is_it(choice):
                    return [*path, axis, index]
    return []
