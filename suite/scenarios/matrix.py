"""Expands a scenario into cases: axes multiply; rules add, remove and mark cells.

Order: the product of the axes, ``include``, ``exclude``, ``skip`` and ``xfail``, ``quick``.  A rule
that changes nothing is an error: it is a typo, or outdated.

Ids are stable: ``scenario::implementation::backend::mesh::optimizer::clip::lane::tier``, with
``scenario[variant]`` where the workload is an axis, ``implementation+label`` where it has one, and
``lane-policy`` where precision is an axis.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from shardproof.backends import BACKENDS
from shardproof.case import Case, WorkloadSpec
from shardproof.cases import kinds
from shardproof.contract import OptimizerSpec
from shardproof.errors import Problem, ScenarioError, nearest
from shardproof.files import from_plain
from shardproof.scenarios import member_plans, plans, schema
from shardproof.scenarios.cells import AXES, Cell, matches
from shardproof.scenarios.load import SHIPPED, ScenarioFile
from shardproof.scenarios.vocabulary import Vocabulary

#: Keys and numbers that lead to a part of a file.
Keys = list[str | int]
MAX_CELLS = 20_000
#: The trait that needs a loss scaler.
OVERFLOW = "overflow_on_one_rank"
_DEFAULT_LR = {"sgd": 0.1, "adamw": 3e-3}
#: Fewer bits absorb less of another order of adding, so equal bits are harder to reach.
DTYPES = {
    "bitwise": "float32",
    "dyadic": "float32",
    "fp64": "float64",
    "working_precision": "float32",
}


def expand(file: ScenarioFile, vocabulary: Vocabulary) -> list[Case]:
    """All cases of a scenario, in a stable order.

    :raises ScenarioError: unknown names, rules without a match, duplicate cells.
    """
    return _Expansion(file, vocabulary).cases()


def cells(file: ScenarioFile, vocabulary: Vocabulary) -> list[Cell]:
    """The cells of a scenario, in the order of its cases.

    :raises ScenarioError: as of :func:`expand`, for what is wrong with cells.
    """
    return _Expansion(file, vocabulary).cells()


class _Expansion:
    def __init__(self, file: ScenarioFile, vocabulary: Vocabulary) -> None:
        self.file = file
        self.scenario: schema.Scenario = file.scenario
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []

    def cases(self) -> list[Case]:
        self._check_names()
        self._stop_if_faulty()
        cells = self.cells()
        self._check_cells(cells)
        self.problems += plans.problems_of_cells(self.file, cells)
        self.problems += member_plans.problems_of_cells(self.file, cells)
        skips, xfails, quick = (self._marks(cells, key) for key in ("skip", "xfail", "quick"))
        self._stop_if_faulty()
        clips = {cell.clip for cell in cells} - {None}
        cases = []
        for cell in cells:
            tier = cell.tier or ("quick" if cell.key in quick else self.scenario.tier)
            marks = skips.get(cell.key), xfails.get(cell.key)
            case = self._case(cell, tier, *marks, several_clips=len(clips) > 1)
            small = self._small(case, cell) if tier == "quick" else case
            if small != case:
                self._check_can_be_built(["quick_size"], small.workload)
                self._stop_if_faulty()
                whole = f"{case.id.removesuffix('quick')}full"
                cases.append(small)
                case = dataclasses.replace(case, id=whole, tier="full")
            cases.append(case)
        if self.scenario.quick_size and len(cases) == len(cells):
            self._add(["quick_size"], "changes no quick case", "correct or remove it", "quick_size")
            self._stop_if_faulty()
        return cases

    def _small(self, case: Case, cell: Cell) -> Case:
        """The case in the size of the quick tier."""
        size = self.scenario.quick_size
        if size is None:
            return case
        workload = self._workload(cell.workload, size)
        return dataclasses.replace(case, workload=workload, steps=size.steps or case.steps)

    def _stop_if_faulty(self) -> None:
        if self.problems:
            raise ScenarioError(self.problems)

    def _add(self, path: Sequence[str | int], what: str, remedy: str, value: str) -> None:
        self.problems.append(self.file.problem(path, what, remedy, value))

    def _check_names(self) -> None:
        scenario = self.scenario
        for index, check in enumerate(scenario.checks):
            self._check_name(["checks", index], "check", check)
        for path, axes in self._parts():
            self._check_axes(path, axes)
        for path, expect in self._expectations():
            other = expect.relation
            if isinstance(other, schema.SameAs) and other.same_as.implementation is not None:
                place = [*path, "relation", "same_as", "implementation"]
                self._check_name(place, "implementation", other.same_as.implementation)
        self.problems += plans.problems(self.file, self.vocabulary)
        self.problems += member_plans.problems(self.file)
        refusing = [c.expect for c in scenario.matrix.implementation if c.expect]
        refuses = any(e.refuses for e in (scenario.expect, *refusing))
        if refuses != ("refusals" in scenario.checks):
            self._add(
                ["checks"],
                "expect.refuses and the check `refusals` belong together",
                "give both or neither",
                ", ".join(scenario.checks),
            )

    def _check_axes(self, path: Keys, axes: schema.Matrix | schema.Include) -> None:
        for index, choice in enumerate(axes.implementation):
            place = [*path, "implementation", index, "name"]
            self._check_name(place, "implementation", choice.name)
        for index, backend in enumerate(axes.backend):
            self._check_name([*path, "backend", index], "backend", backend)
        variants: Sequence[schema.WorkloadChoice | None] = axes.workload
        if not variants and isinstance(axes, schema.Matrix):
            variants = (None,)
        for index, variant in enumerate(variants):
            at: Keys = ["workload"] if variant is None else [*path, "workload", index]
            self._check_workload(at, variant)

    def _check_name(self, path: Keys, kind: str, name: str) -> bool:
        known = getattr(self.vocabulary, f"{kind}s")
        if name in known or (kind in ("implementation", "workload") and ":" in name):
            return True  # a user's own: its place is asked for later
        self._add(path, f"unknown {kind}", nearest(name, known, f"{kind}s"), name)
        return False

    def _parts(self) -> Iterator[tuple[Keys, schema.Matrix | schema.Include]]:
        yield ["matrix"], self.scenario.matrix
        for index, include in enumerate(self.scenario.include):
            yield ["include", index], include

    def _expectations(self) -> Iterator[tuple[Keys, schema.Expect]]:
        """Every ``expect`` of the file and its path, overriding ones first."""
        for axis in ("workload", "implementation"):
            for path, axes in self._parts():
                for index, choice in enumerate(getattr(axes, axis)):
                    if choice.expect is not None:
                        yield [*path, axis, index, "expect"], choice.expect
        yield ["expect"], self.scenario.expect

    def _check_workload(self, path: Keys, variant: schema.WorkloadChoice | None) -> None:
        spec = self._workload(variant)
        at: Keys = [*path, "name"] if variant is None or variant.name else ["workload", "name"]
        if not self._check_name(at, "workload", spec.name):
            return
        known = [
            self._check_name([*path, "traits", index], "trait", trait)
            for index, trait in enumerate(spec.traits)
        ]
        if all(known):
            self._check_can_be_built(path, spec)

    def _check_can_be_built(self, path: Keys, spec: WorkloadSpec) -> None:
        if (fault := self.vocabulary.fault_of(spec)) is not None:
            remedy = "correct it, or see `shardproof list traits`"
            self._add(path, f"this workload cannot be built: {fault}", remedy, spec.name)

    def cells(self) -> list[Cell]:
        scenario = self.scenario
        cells: dict[tuple[str, ...], Cell] = {}
        for cell in self._product(["matrix"], scenario.matrix, None):
            if cell.key in cells:
                remedy = "give one of them a label"
                self._add(["matrix"], "cell given twice", remedy, " ".join(cell.key))
                break
            cells[cell.key] = cell
        for index, include in enumerate(scenario.include):
            before = len(cells)
            for cell in self._product(["include", index], scenario.matrix, include):
                cells.setdefault(cell.key, cell)
            if len(cells) == before:
                self._add(["include", index], "adds no cell", "remove it", include.reason)
        for index, rule in enumerate(scenario.exclude):
            gone = [key for key, cell in cells.items() if matches(rule, cell)]
            if not gone:
                remedy = "correct or remove it"
                self._add(["exclude", index], "matches nothing", remedy, rule.reason)
            for key in gone:
                del cells[key]
        self._stop_if_faulty()
        if not cells:
            self._add(["exclude"], "leaves no cell", "exclude less", scenario.name)
        return list(cells.values())

    def _product(
        self, path: Keys, matrix: schema.Matrix, include: schema.Include | None
    ) -> Iterator[Cell]:
        def axis(name: str) -> list[Any]:
            own: list[Any] = getattr(include, name) if include is not None else []
            return own or getattr(matrix, name) or [None]

        planned: dict[str, list[Any]] = {
            "fault": [*self.scenario.faults] or [None],
            "checkpoint": [*self.scenario.checkpoints] or [None],
            "membership": [*self.scenario.membership] or [None],
        }
        axes = {name: planned.get(name) or axis(name) for name in AXES}
        meshes = sum(math.prod(map(len, choice.values())) for choice in axes["mesh"])
        count = meshes * math.prod(len(axes[name]) for name in AXES if name != "mesh")
        if count > MAX_CELLS:
            self._add(path, f"more than {MAX_CELLS:,} cells", "split the scenario", f"{count:,}")
            self._stop_if_faulty()
        axes["mesh"] = [mesh for choice in axes["mesh"] for mesh in _meshes(choice)]
        tier = include.tier if include is not None else None
        for values in itertools.product(*axes.values()):
            yield Cell(**dict(zip(AXES, values, strict=True)), tier=tier)

    def _check_cells(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            for path, what, remedy in self._faults(cell):
                self._add(path, what, remedy, " ".join(filter(None, cell.key)))
                return

    def _faults(self, cell: Cell) -> Iterator[tuple[Keys, str, str]]:
        workload = self._workload(cell.workload)
        kind, checks = kinds.of(workload), {*self.scenario.checks}
        if kind.trains == (cell.optimizer is None):
            yield (
                ["matrix", "optimizer"],
                "no optimizer" if kind.trains else f"workload {workload.name} trains nothing",
                "name one, e.g. sgd" if kind.trains else "leave the optimizer out",
            )
        for name, each in kinds.UNTRAINED.items():
            check, asked = each.only_check, each is kind
            if asked != (check in checks) or (asked and checks - each.also != {check}):
                yield (
                    ["checks"],
                    f"workload {name} and the check `{check}` belong together",
                    "give both, and no other check, or neither",
                )
        if not kind.trains and (cell.lane != "bitwise" or cell.clip is not None or cell.precision):
            yield (
                ["matrix", "lane"],
                f"{workload.name} are compared bit for bit, and have no clip and no precision",
                "write lane: bitwise",
            )
        if (
            OVERFLOW in workload.traits
            and cell.optimizer is not None
            and cell.optimizer.scaler is None
        ):
            yield (
                ["matrix", "optimizer"],
                f"trait {OVERFLOW} needs a loss scaler, which skips its infinite gradients",
                "give the optimizer a scaler, e.g. {name: sgd, scaler: {interval: 2}}",
            )
        if ("relations" in self.scenario.checks) != (self._related(cell).relation is not None):
            yield (
                ["checks"],
                "expect.relation and the check `relations` belong together",
                f"give both or neither: {', '.join(get_args(schema.RelationName))} or same_as",
            )
        if (other := self._other(cell)) is not None:
            mesh, choice = dict(cell.mesh), cell.implementation
            again = {**choice.options, **other.options} == choice.options
            if again and other.implementation in (None, choice.name) and other.mesh in (None, mesh):
                yield (
                    self._relation_at(cell),
                    "same_as describes the case itself: the second run must differ",
                    "name another implementation, mesh or options",
                )
            ranks, own = (math.prod(sizes.values()) for sizes in (other.mesh or mesh, mesh))
            if ranks != own:
                yield (
                    [*self._relation_at(cell), "same_as", "mesh"],
                    f"same_as runs on {ranks} ranks, the case on {own}",
                    "move a factor from one axis to another",
                )
        if cell.lane == "dyadic" and workload.name not in self.vocabulary.dyadic:
            yield (
                ["matrix", "lane"],
                f"workload {workload.name} has no form for lane dyadic, which needs small integers",
                f"workloads that have one: {', '.join(self.vocabulary.dyadic)}",
            )
        if cell.lane in ("bitwise", "dyadic") and cell.clip is not None:
            yield (
                ["matrix", "lane"],
                f"lane {cell.lane} needs clipping off: a norm's sum has no fixed order",
                f"exclude {{lane: {cell.lane}, clip: ...}}, or take lane fp64",
            )

    def _related(self, cell: Cell) -> schema.Expect:
        own = (cell.workload and cell.workload.expect, cell.implementation.expect)
        return next((e for e in own if e and e.relation is not None), self.scenario.expect)

    def _other(self, cell: Cell) -> schema.Other | None:
        relation = self._related(cell).relation
        return relation.same_as if isinstance(relation, schema.SameAs) else None

    def _relation_at(self, cell: Cell) -> Keys:
        given = self._related(cell)
        at = next(path for path, expect in self._expectations() if expect is given)
        return [*at, "relation"]

    def _marks(self, cells: Sequence[Cell], section: str) -> dict[tuple[str, ...], Any]:
        """Key -> the first matching rule of ``section``, for every matched cell."""
        marks: dict[tuple[str, ...], Any] = {}
        for index, rule in enumerate(getattr(self.scenario, section)):
            keys = [cell.key for cell in cells if matches(rule, cell)]
            if not keys:
                what = f"{section} rule matches nothing"
                reason = getattr(rule, "reason", "")
                self._add([section, index], what, "correct or remove it", reason)
            for key in keys:
                marks.setdefault(key, rule)
        return marks

    def _workload(
        self, variant: schema.WorkloadChoice | None, size: schema.QuickSize | None = None
    ) -> WorkloadSpec:
        values = self.scenario.workload.model_dump()
        if size is not None and (variant is None or variant.name is None):
            params = values["params"] | size.params
            values |= size.model_dump(exclude_none=True, exclude={"steps"}) | {"params": params}
        if variant is not None:
            own = variant.model_dump(exclude={"label", "expect"}, exclude_none=True)
            values |= {**own, "params": {**values["params"], **own.get("params", {})}}
        return from_plain(WorkloadSpec, values)

    def _expect(self, cell: Cell) -> dict[str, Any]:
        """The scenario's expectations, overridden by the implementation's and the variant's."""
        expect = self.scenario.expect.model_dump(exclude_none=True)
        for own in (cell.implementation.expect, cell.workload and cell.workload.expect):
            if own is not None:
                expect |= own.model_dump(exclude_none=True)
        return expect

    def _optimizer(
        self, choice: schema.OptimizerChoice | None, clip: float | None, traits: Iterable[str]
    ) -> OptimizerSpec:
        if choice is None:
            return OptimizerSpec()
        fields = choice.model_dump(exclude={"label"}) | {"clip_norm": clip}
        if choice.lr is None:
            fields["lr"] = _DEFAULT_LR[choice.name]
        spec = from_plain(OptimizerSpec, fields)
        groups = spec.groups or tuple(self.vocabulary.groups(traits))
        return dataclasses.replace(spec, groups=groups)

    def _case(
        self,
        cell: Cell,
        tier: str,
        skip: schema.Rule | None,
        xfail: schema.KnownFailure | None,
        several_clips: bool,
    ) -> Case:
        scenario, choice = self.scenario, cell.implementation
        variant, system, backend, mesh, optimizer, clip, lane = cell.key
        if not several_clips:
            clip = "noclip" if cell.clip is None else "clip"
        workload = self._workload(cell.workload)
        name = f"{scenario.name}{variant}"
        policy: dict[str, str] = {}
        if cell.precision is not None:
            policy = cell.precision.model_dump(exclude={"label"}, exclude_none=True)
        built = policy.pop("built", DTYPES[cell.lane])
        return Case(
            id="::".join((name, system, backend, mesh, optimizer, clip, lane, tier)),
            scenario=scenario.name,
            implementation=choice.name,
            label=choice.label or "",
            options=choice.options | ({"precision": policy} if policy else {}),
            backend=cell.backend,
            mesh=dict(cell.mesh),
            workload=workload,
            optimizer=self._optimizer(cell.optimizer, cell.clip, workload.traits),
            lane=cell.lane,  # type: ignore[arg-type]
            checks=tuple(scenario.checks),
            dtype=built,
            precision=policy,
            steps=scenario.steps if kinds.of(workload).trains else 0,
            tier=tier,  # type: ignore[arg-type]
            expect=self._expect(cell),
            deadline=scenario.deadline,
            memory_gib=scenario.memory_gib,
            skip=skip.reason if skip else None,
            xfail=xfail.reason if xfail else None,
            xfail_says=tuple(xfail.says) if xfail else (),
            source=self._source(choice),
            fault=plans.fault(cell.fault) if cell.fault else None,
            checkpoint=plans.checkpoint(cell.checkpoint) if cell.checkpoint else None,
            membership=member_plans.membership(cell.membership),
            deaths=member_plans.deaths(cell.membership),
        )

    def _source(self, choice: schema.ImplementationChoice) -> str:
        for path, axes in self._parts():
            for index, own in enumerate(axes.implementation):
                if own is choice:
                    line = self.file.node.locate([*path, "implementation", index])
                    return f"{_portable(self.file.file)}:{line}"
        raise AssertionError("no cell has an implementation from outside of the file")


@cache
def _portable(file: str) -> str:
    """``file`` from ``scenarios/`` on if it is one of the suite's."""
    path = Path(file)
    if path.is_relative_to(SHIPPED):
        return str(Path("scenarios") / path.relative_to(SHIPPED))
    return str(path)


def _meshes(choice: Mapping[str, list[int]]) -> Iterator[tuple[tuple[str, int], ...]]:
    for sizes in itertools.product(*choice.values()):
        yield tuple(zip(choice, sizes, strict=True))


def substitute(
    cases: Sequence[Case], implementation: str, with_options: bool = False
) -> list[Case]:
    """The cells of ``cases`` with another implementation, each once.

    ``with_options``: also with the options of the system whose cell it was, which its label names.

    Serves systems that no scenario names: a user's own, or a mutant.  It drops cells that expect a
    refusal, or a result or a load of another system (all depend on options), and ``skip``,
    ``xfail`` and expected ``buckets``.  A cell is in the quick tier if any implementation has it
    there, and in both where it has a smaller size there.
    """
    substituted: dict[str, Case] = {}
    trained = [case for case in cases if kinds.of(case.workload).trains]
    cases = trained or cases  # who trains models does nothing else, as a rule
    for case in sorted(cases, key=lambda case: case.tier != "quick"):
        if "refuses" in case.expect or isinstance(case.expect.get("relation"), Mapping):
            continue
        if case.checkpoint is not None and "implementation" in case.checkpoint.into:
            continue
        scenario, _, *middle, tier = case.id.split("::")
        label = re.sub(r"[/+]", ".", case.system) if with_options else ""
        system = implementation.replace("::", ":") + (f"+{label}" if label else "")
        cell = "::".join([scenario, system, *middle])
        mixed = {"precision": dict(case.precision)} if case.precision else {}
        quick = substituted.get(f"{cell}::quick")
        if quick is not None and quick.workload == case.workload:
            continue
        substituted.setdefault(
            f"{cell}::{tier}",
            dataclasses.replace(
                case,
                id=f"{cell}::{tier}",
                implementation=implementation,
                label=label,
                options=dict(case.options) if with_options else mixed,
                expect={key: value for key, value in case.expect.items() if key != "buckets"},
                skip=None,
                xfail=None,
                xfail_says=(),
                is_borrowed=not with_options,
                # The file, to run it again; its line names another system.
                source=f"{case.source.rpartition(':')[0]}:",
            ),
        )
    return list(substituted.values())


def on_backend(cases: Sequence[Case], backend: str) -> list[Case]:
    """The cells of ``cases`` on another backend, each once.

    Cells of it are as their scenarios have them; others on GPUs are left out.  A cell that moves
    keeps ``skip`` and ``xfail`` if it has them on every backend that its scenario runs it on, and
    it is in the quick tier if it is there on one of them.  Calls do not move to a backend that
    another scenario puts on trial (``has_own_calls``).
    """
    moved: dict[str, Case] = {}
    own = {case.id: case for case in cases if case.backend == backend}
    known = BACKENDS[backend]
    for case in sorted(cases, key=lambda case: case.tier != "quick"):
        if case.backend == backend or BACKENDS[case.backend].device != "cpu":
            continue
        if known.has_own_calls and kinds.of(case.workload).tests_backend:
            continue
        scenario, system, _, *middle, tier = case.id.split("::")
        cell = "::".join([scenario, system, backend, *middle])
        quick = moved.get(f"{cell}::quick")
        name = f"{cell}::{tier}"
        if quick is not None and quick.workload == case.workload:
            name = quick.id
        other = dataclasses.replace(case, id=name, backend=backend, is_moved=True)
        if name in own:
            continue
        first = moved.setdefault(name, other)
        if (first.skip, first.xfail) != (other.skip, other.xfail):
            skip, xfail = first.skip and other.skip, first.xfail and other.xfail
            says = first.xfail_says if xfail else ()
            moved[name] = dataclasses.replace(first, skip=skip, xfail=xfail, xfail_says=says)
    return [*own.values(), *moved.values()]


def reseed(cases: Sequence[Case], seed: int) -> list[Case]:
    """The same cases with another seed of the workload; ``[seedN]`` is added to their ids."""
    return [
        dataclasses.replace(
            case,
            id=case.id.replace("::", f"[seed{seed}]::", 1),
            workload=dataclasses.replace(case.workload, seed=seed),
        )
        for case in cases
    ]
