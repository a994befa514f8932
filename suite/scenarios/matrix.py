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
from pathlib import Path
from typing import Any

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cases import kinds
from shardproof.contract import OptimizerSpec
from shardproof.errors import Problem, ScenarioError
from shardproof.files import from_plain
from shardproof.scenarios import plans, rules, schema
from shardproof.scenarios.cells import AXES, Cell, matches, workload_of
from shardproof.scenarios.load import SHIPPED, ScenarioFile
from shardproof.scenarios.vocabulary import Vocabulary

MAX_CELLS = 20_000
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
        self.file.check_names(self.vocabulary)
        self._stop_at(rules.problems(self.file, self.vocabulary))
        cells = self.cells()
        self.has_several_clips = len({cell.clip for cell in cells} - {None}) > 1
        self.problems += rules.problems_of_cells(self.file, self.vocabulary, cells)
        skips, xfails, quick = (self._marks(cells, key) for key in ("skip", "xfail", "quick"))
        self._stop_at()
        cases = []
        for cell in cells:
            tier = cell.tier or ("quick" if cell.key in quick else self.scenario.tier)
            case = self._case(cell, tier, skips.get(cell.key), xfails.get(cell.key))
            size = self.scenario.quick_size if tier == "quick" else None
            workload = workload_of(self.scenario, cell.workload, size)
            steps = (size and size.steps) or case.steps
            if (workload, steps) != (case.workload, case.steps):
                at: rules.Keys = ["quick_size"]
                self._stop_at(rules.cannot_be_built(self.file, self.vocabulary, at, workload))
                whole = f"{case.id.removesuffix('quick')}full"
                cases.append(dataclasses.replace(case, workload=workload, steps=steps))
                case = dataclasses.replace(case, id=whole, tier="full")
            cases.append(case)
        if self.scenario.quick_size and len(cases) == len(cells):
            self._add(["quick_size"], "changes no quick case", "correct or remove it", "quick_size")
            self._stop_at()
        return cases

    def _stop_at(self, problems: Iterable[Problem] = ()) -> None:
        self.problems += problems
        if self.problems:
            raise ScenarioError(self.problems)

    def _add(self, path: Sequence[str | int], what: str, remedy: str, value: str) -> None:
        self.problems.append(self.file.problem(path, what, remedy, value))

    def cells(self) -> list[Cell]:
        scenario = self.scenario
        cells: dict[tuple[str, ...], Cell] = {}
        for cell in self._product(["matrix"], scenario.matrix, None):
            if cell.key in cells:
                remedy = "give one entry a label"
                self._add(["matrix"], "two cells are the same", remedy, " ".join(cell.key))
                break
            cells[cell.key] = cell
        for index, include in enumerate(scenario.include):
            before = len(cells)
            for cell in self._product(["include", index], scenario.matrix, include):
                cells.setdefault(cell.key, cell)
            if len(cells) == before:
                self._add(["include", index], "the rule adds no cell", "remove it", include.reason)
        for index, rule in enumerate(scenario.exclude):
            kept = {key: cell for key, cell in cells.items() if not matches(rule, cell)}
            if kept == cells:
                remedy = "correct or remove it"
                self._add(["exclude", index], "exclude rule matches nothing", remedy, rule.reason)
            cells = kept
        self._stop_at()
        if not cells:
            self._add(["exclude"], "exclude rules leave no cell", "exclude less", scenario.name)
        return list(cells.values())

    def _product(
        self, path: rules.Keys, matrix: schema.Matrix, include: schema.Include | None
    ) -> Iterator[Cell]:
        def axis(name: str) -> list[Any]:
            own: list[Any] = getattr(include, name) if include is not None else []
            return own or getattr(matrix, name) or [None]

        planned = {own.axis: getattr(self.scenario, own.key) for own in plans.SECTIONS}
        axes = {n: (planned[n] or [None]) if n in planned else axis(n) for n in AXES}
        meshes = sum(math.prod(map(len, choice.values())) for choice in axes["mesh"])
        count = meshes * math.prod(len(axes[name]) for name in AXES if name != "mesh")
        if count > MAX_CELLS:
            self._add(path, f"more than {MAX_CELLS:,} cells", "split the scenario", f"{count:,}")
            self._stop_at()
        sized = ((mesh, n) for mesh in axes["mesh"] for n in itertools.product(*mesh.values()))
        axes["mesh"] = [tuple(zip(mesh, sizes, strict=True)) for mesh, sizes in sized]
        tier = include.tier if include is not None else None
        for values in itertools.product(*axes.values()):
            yield Cell(**dict(zip(AXES, values, strict=True)), tier=tier)

    def _marks(self, cells: Sequence[Cell], section: str) -> dict[tuple[str, ...], Any]:
        """Key -> the first matching rule of ``section``, for every matched cell."""
        marks: dict[tuple[str, ...], Any] = {}
        for index, rule in enumerate(getattr(self.scenario, section)):
            found = {cell.key: rule for cell in cells if matches(rule, cell)}
            if not found:
                what, asked = f"{section} rule matches nothing", rule.model_dump(exclude_unset=True)
                value = asked.get("reason") or ", ".join(f"{k}: {v}" for k, v in asked.items())
                self._add([section, index], what, "correct or remove it", value)
            marks = found | marks
        return marks

    def _expect(self, cell: Cell) -> dict[str, Any]:
        """The scenario's expectations, overridden by the implementation's and the variant's."""
        expect = self.scenario.expect.model_dump(exclude_none=True)
        for own in (cell.implementation.expect, cell.workload and cell.workload.expect):
            if own is not None:
                expect |= own.model_dump(exclude_none=True)
        return expect

    def _optimizer(self, cell: Cell, traits: Iterable[str]) -> OptimizerSpec:
        if (choice := cell.optimizer) is None:
            return OptimizerSpec()
        fields = choice.model_dump(exclude={"label"}) | {"clip_norm": cell.clip}
        fields["lr"] = choice.lr or _DEFAULT_LR[choice.name]
        spec = from_plain(OptimizerSpec, fields)
        return dataclasses.replace(spec, groups=spec.groups or (*self.vocabulary.groups(traits),))

    def _case(
        self, cell: Cell, tier: str, skip: schema.Rule | None, xfail: schema.KnownFailure | None
    ) -> Case:
        scenario, choice = self.scenario, cell.implementation
        variant, system, backend, mesh, optimizer, clip, lane = cell.key
        if not self.has_several_clips:
            clip = "noclip" if cell.clip is None else "clip"
        workload = workload_of(scenario, cell.workload)
        name, policy = f"{scenario.name}{variant}", dict[str, str]()
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
            optimizer=self._optimizer(cell, workload.traits),
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
            **plans.fields(cell),
        )

    def _source(self, choice: schema.ImplementationChoice) -> str:
        """``file:line`` of ``choice``; paths of the suite's files start at ``scenarios/``."""
        line = self.file.node.locate(rules.keys_to(self.scenario, lambda one: one is choice))
        path = Path(self.file.file)
        if path.is_relative_to(SHIPPED):
            path = Path("scenarios", path.relative_to(SHIPPED))
        return f"{path}:{line}"


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
    seeded = []
    for case in cases:
        workload = dataclasses.replace(case.workload, seed=seed)
        name = case.id.replace("::", f"[seed{seed}]::", 1)
        seeded.append(dataclasses.replace(case, id=name, workload=workload))
    return seeded
