"""Convergence scenarios (``plans/*.yaml``): systems, workload and target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardproof import registry
from shardproof.backends import BACKENDS
from shardproof.bench import sides
from shardproof.bench.scaling.matrix import SystemModel
from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec, Refused
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.launch.nodes import Nodes
from shardproof.registry.declaration import Declaration
from shardproof.scenarios import load
from shardproof.scenarios.schema import Model
from tools.studies.convergence.training import Run

#: Fewer seeds decide little, and an interval needs two.
FEWEST_SEEDS = 2
Expected = Literal["non-inferior", "not non-inferior", "inferior"]


class MethodModel(SystemModel):
    """A system that trains next to the dense one, and its expected result."""

    expect: Expected = Field("non-inferior", description="what must come of it")
    reason: str = Field("", description="why non-inferior is not expected")

    @model_validator(mode="after")
    def _has_reason(self) -> MethodModel:
        if (self.expect == "non-inferior") == bool(self.reason):
            raise ValueError(
                "`expect: inferior` (or `not non-inferior`) and a reason belong together"
            )
        return self


class SGD(Model):
    """SGD, plain or with momentum: the one optimizer shared by all methods."""

    lr: float = Field(gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)


class ConvergenceScenario(Model):
    """A file of methods that train one workload to one target, with a dense system for
    comparison.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,59}$", description="unique, lower case")
    about: str = Field(min_length=3, description="why these methods")
    workload: sides.BatchModel = Field(description="model, data and batch shape")
    optimizer: SGD = Field(description="of all methods")
    world: int = Field(3, ge=1, le=64, description="number of ranks")
    backend: str = Field(
        "in_memory",
        description="communication backend; in_memory: ranks are threads, and no seconds are given",
    )
    target: float = Field(gt=0, description="loss of the fixed batch")
    steps: int = Field(ge=1, le=100_000, description="who needs more misses the target")
    every: int = Field(4, ge=1, description="steps between two evaluations")
    judged_on: int = Field(192, ge=1, le=4096, description="samples of the fixed batch")
    seeds: int = Field(8, ge=FEWEST_SEEDS, le=1000, description="trainings of each method")
    margin: float = Field(1.25, gt=1, description="steps to the target, at most so many times")
    dense: Annotated[
        SystemModel, BeforeValidator(sides.named, json_schema_input_type=str | SystemModel)
    ] = Field(description="what all methods are compared with")
    methods: list[MethodModel] = Field(min_length=1, description="systems")

    @model_validator(mode="after")
    def _fits(self) -> ConvergenceScenario:
        if self.steps < 2 * self.every:
            raise ValueError(f"steps: two evaluations at least, so {2 * self.every} or more")
        return self


#: The convergence scenarios of this checkout.
SCENARIOS = Path(__file__).with_name("plans")


@dataclass(frozen=True)
class Method:
    """One named system, with its trainings by seed."""

    name: str
    runs: Sequence[Run]
    expect: Expected = "non-inferior"
    reason: str = ""


@dataclass(frozen=True)
class Study:
    """The trainings of a scenario; ``dense`` and ``methods`` have the same seeds."""

    name: str
    about: str
    margin: float
    dense: Method
    methods: Sequence[Method]

    @property
    def every(self) -> list[Method]:
        """The dense system, then the methods."""
        return [self.dense, *self.methods]

    @property
    def first(self) -> Run:
        """A run of the dense system, with the values that all have in common."""
        return self.dense.runs[0]

    def only(self, names: Sequence[str]) -> Study:
        """Only the named methods (none: all).

        :raises SelectionError: a method that there is not.
        """
        known = [method.name for method in self.methods]
        for name in names:
            if name not in known:
                remedy = nearest(name, known, f"methods of {self.name}")
                raise SelectionError(Problem("unknown method", remedy, name))
        methods = [method for method in self.methods if not names or method.name in names]
        return replace(self, methods=methods)


def chosen(
    names: Sequence[str], methods: Sequence[str] | None, seeds: int | None, backend: str
) -> list[Study]:
    """The studies that a command line names, with some ``methods`` (none: all).

    :raises InputError: as :func:`read`, or a name that there is not.
    """
    return [one.only(methods or ()) for one in read(files(names), seeds, backend)]


def read(paths: Iterable[Path], seeds: int | None = None, backend: str = "") -> list[Study]:
    """The studies in the files; ``seeds`` and ``backend`` replace theirs.

    :raises InputError: faulty files, each fault with its line; or a backend that cannot be used.
    """
    if backend:
        _require_backend(backend)
    studies: list[Study] = []
    faults = sides.Faults()
    for path in paths:
        model, node = load.read_as(path, ConvergenceScenario)
        base = None
        with faults.at(path, node, "workload"):
            base = model.workload.spec(model.workload.global_batch)
        if base is None:
            continue
        with faults.at(path, node, "backend"):
            _require_backend(model.backend)
        model = model.model_copy(update={"backend": backend or model.backend})
        count = seeds or model.seeds
        with faults.at(path, node, "dense"):
            _require_taken(model.dense, model)
        every = [Method(_name(model.dense), _runs(model, model.dense, base, count))]
        for index, item in enumerate(model.methods):
            with faults.at(path, node, "methods", index):
                _require_taken(item, model)
                if (name := _name(item)) in {method.name for method in every}:
                    what = "two methods of one name (the dense system is one)"
                    raise SelectionError(Problem(what, "give a label", name))
                runs = _runs(model, item, base, count)
                every.append(Method(name, runs, item.expect, item.reason))
        dense, *methods = every
        studies.append(Study(model.name, model.about.strip(), model.margin, dense, methods))
    faults.end()
    return studies


def require_room(studies: Iterable[Study], nodes: Nodes) -> None:
    """:raises SelectionError: ranks are threads, or do not fit on ``nodes``."""
    for run, name in ((study.first, study.name) for study in studies):
        if not run.timed:
            what = f"{name}: ranks of {run.backend} are threads, which cannot be on nodes"
            raise SelectionError(Problem(what, "choose another --backend, such as gloo"))
        if not nodes.has_room(run.backend, run.world):
            what = f"{name}: {run.world} ranks do not fit on {nodes}"
            raise SelectionError(Problem(what, "raise --nodes or --ranks-per-node"))


def _require_backend(name: str) -> None:
    """:raises SelectionError: there is no such backend, or its ranks compute elsewhere."""
    sides.check_backend(name)
    if BACKENDS[name].device != "cpu":
        remedy = "choose in_memory, gloo or mpi"
        raise SelectionError(Problem("trainings to a target are on CPUs", remedy, name))


def _require_taken(item: SystemModel, model: ConvergenceScenario) -> None:
    """:raises SelectionError: the system does not exist, refuses its options, or cannot run this
    way.

    A user's own is asked where it trains: it is not imported here.
    """
    registry.check(item.implementation)
    if ":" in item.implementation:
        return
    try:
        declared = Declaration.of(registry.load(item.implementation), item.options)
    except Refused as refusal:
        raise SelectionError(Problem(str(refusal), "correct the option", _name(item))) from None
    if model.backend in BACKENDS and (reason := declared.denied(model.backend)):
        remedy = f"choose one of {', '.join(declared.usable())}"
        raise SelectionError(Problem(f"{_name(item)} {reason}", remedy, model.backend))


def _name(item: SystemModel) -> str:
    return item.implementation + (f"+{item.label}" if item.label else "")


#: Fields of a scenario that each of its runs has as well.
_OF_RUNS = {"world", "target", "steps", "every", "judged_on", "backend"}


def _runs(
    model: ConvergenceScenario, item: SystemModel, base: WorkloadSpec, seeds: int
) -> list[Run]:
    return [
        Run(
            system=item.implementation,
            options=item.options,
            workload=replace(base, seed=base.seed + seed),
            optimizer=OptimizerSpec("sgd", **model.optimizer.model_dump()),
            **model.model_dump(include=_OF_RUNS),
        )
        for seed in range(seeds)
    ]


def files(names: Sequence[str]) -> list[Path]:
    """The convergence scenarios in ``names``: files, or names; none: all.

    :raises SelectionError: a name that no file has.
    """
    known = {path.stem: path for path in sorted(SCENARIOS.glob("*.yaml"))}
    if not names:
        return [*known.values()]
    for name in names:
        if Path(name).suffix not in (".yaml", ".yml") and name not in known:
            remedy = nearest(name, known, "convergence scenarios")
            raise SelectionError(Problem("unknown convergence scenario", remedy, name))
    return [known.get(name, Path(name)) for name in names]
