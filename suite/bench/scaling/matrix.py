"""What a scaling scenario measures, and which of it fits on this machine.

A scaling scenario (``scenarios/scaling/strong.yaml``) says its ``mode``::

    name: strong
    about: why these systems
    mode: strong                  # weak: workload.batch_per_rank in place of global_batch
    base: [plain, wrapped]        # the cases that N ranks are compared with
    target: 0.8                   # efficiency, at least
    workload: {name: charnames_gpt, size: 1m, global_batch: 32}
    backends: [gloo]
    worlds: [2, 4, 8]             # measured where there is a core for every rank; else modelled
    implementations: [reference/ddp, {implementation: pytorch/ddp, label: views, options: {...}}]

With T1 the seconds of a step of one process and T_N those of N ranks, efficiency is T1 / (N T_N) in
strong scaling (the global batch stays) and T1 / T_N in weak scaling (the batch of a rank stays).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shardproof import registry
from shardproof.backends import BACKENDS
from shardproof.bench.sides import Side, SideModel, default_optimizer, spec_of
from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec
from shardproof.errors import InputError, Problem, ScenarioError, SelectionError, nearest
from shardproof.files import Stored
from shardproof.launch.process_control import physical_cores
from shardproof.scenarios import load
from shardproof.scenarios.schema import Label, Model, Size, Words

Mode = Literal["strong", "weak"]
#: The cases that N ranks are compared with: the ordinary program, and the system alone.
BASES = ("plain", "wrapped")
#: What runs as the plain program.
PLAIN = "plain"
#: Segments of a block, and what is left of them where N ranks do not fit.
ORDER = ("plain", "wrapped", "ranks", "ranks", "wrapped", "plain")
ALONE_ORDER = ("plain", "wrapped", "wrapped", "plain")
#: The name under which raw times are kept, where a comparison has its pairs.
PAIR = "scaling"
#: Blocks of a cell, and fresh sets of ranks over which they are spread: where blocks
#: vary by 10 %, 10 of them find a change of 10 % in 68 % of runs, 20 in 97 % (simulated).
BLOCKS = 20
LAUNCHES = 3
#: Computing threads of a rank: :mod:`shardproof.launch` gives every rank one.
THREADS = 1
#: Largest global batch of a workload.
MOST_SAMPLES = 4096


@dataclass(frozen=True)
class Cell(Stored):
    """One system on one backend at one world; plain data that travels to leaders as JSON.

    ``workload`` is that of a step of all ranks, ``base`` that of the single process.  ``blocks``
    and ``launches`` are those of a measured cell; ``deadline`` is in seconds, of a launch.
    """

    #: Its kind of line in ``cases.jsonl``.
    kind: ClassVar[Literal["scaling"]] = "scaling"

    name: str
    mode: Mode
    system: Side
    backend: str
    world: int
    workload: WorkloadSpec
    base: WorkloadSpec
    optimizer: OptimizerSpec
    target: float
    label: str = ""
    dtype: str = "float32"
    size: str = ""
    blocks: int = BLOCKS
    launches: int = LAUNCHES
    deadline: float = 600.0

    @property
    def title(self) -> str:
        """The implementation with the label of its options."""
        return self.system.implementation + (f"+{self.label}" if self.label else "")

    @property
    def id(self) -> str:
        """Names the cell in results."""
        words = "+".join((self.workload.name, *([self.size] if self.size else [])))
        return f"scaling::{self.name}::{self.title}::{self.backend}::{self.world}::{words}"

    @property
    def group(self) -> tuple[str, str, str]:
        """Cells that differ in nothing but their world share it."""
        return self.name, self.title, self.backend

    def progress_name(self, refused: bool) -> str:
        """What progress calls it; of a refused cell one rank is timed alone."""
        ranks = "alone" if refused else f"on {self.world} ranks"
        return f"{self.mode} {self.title} {ranks}, {self.backend}"

    def samples(self, world: int) -> int:
        """Samples of the rank that has most, in a step of ``world`` ranks."""
        if self.mode == "weak":
            return self.base.global_batch
        return math.ceil(self.base.global_batch / world)

    def to_dict(self) -> dict[str, Any]:
        """The stored form, beside the id."""
        return super().to_dict() | {"id": self.id}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        """The cell that :meth:`to_dict` described."""
        return super().from_dict({key: value for key, value in data.items() if key != "id"})


@dataclass(frozen=True)
class Room:
    """How many ``ranks`` of ``threads`` threads fit on this machine, and what they are counted by
    (``of``).
    """

    ranks: int
    of: str
    threads: int = THREADS

    @classmethod
    def here(cls, gpus: int | None) -> Room:
        """That of this machine: its ``gpus``, or (``None``) its physical cores."""
        if gpus is not None:
            return cls(gpus, "GPU" if gpus == 1 else "GPUs", 1)
        count = physical_cores()
        return cls(count, "physical core" if count == 1 else "physical cores")

    def oversubscribed(self, world: int) -> bool:
        """Whether so many ranks would take turns."""
        return world * self.threads > self.ranks


# ---------------------------------------------------------------------------- scenario files


def _system(value: Any) -> Any:
    return {"implementation": value} if isinstance(value, str) else value


class SystemModel(SideModel):
    """An implementation and its options; a bare name stands for `{implementation: ...}`."""

    label: Label | None = Field(None, description="tells option sets apart in ids and tables")

    @model_validator(mode="after")
    def _told_apart(self) -> SystemModel:
        if self.options and self.label is None:
            raise ValueError("options need a label, which tells them apart in ids")
        if self.mesh:
            raise ValueError("no mesh here: all ranks are put on the system's data axis")
        return self


SystemField = Annotated[
    SystemModel, BeforeValidator(_system, json_schema_input_type=str | SystemModel)
]


class ScaledWorkload(Model):
    """Model, data and batch shape; which of the two batches is given depends on the mode."""

    name: str = Field(min_length=1, description="a workload of the suite")
    size: str = Field("", description="a preset of the workload's parameters, e.g. 1m")
    seed: int = Field(0, ge=0, lt=2**31)
    global_batch: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="strong: samples in a step of all ranks"
    )
    batch_per_rank: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="weak: samples of each rank in a step"
    )
    micro_batches: int = Field(1, ge=1, le=64, description="per rank")
    params: dict[str, Any] = Field(default_factory=dict, description="knobs of the workload")


def _growing(worlds: list[int]) -> list[int]:
    if worlds != sorted(set(worlds)):
        raise ValueError("worlds must grow, each named once")
    if worlds and worlds[0] < 2:
        raise ValueError("worlds start at 2: one rank is the base case")
    return worlds


def _both(base: list[str]) -> list[str]:
    if tuple(base) != BASES:
        raise ValueError("both cases are stated: [plain, wrapped]")
    return base


class ScalingScenario(Model):
    """A file of systems that run on more and more ranks."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,59}$", description="unique, lower case")
    about: str = Field(min_length=3, description="why these systems")
    mode: Mode = Field(description="strong: the global batch stays; weak: that of a rank does")
    base: Annotated[list[Literal["plain", "wrapped"]], AfterValidator(_both)] = Field(
        ["plain", "wrapped"],
        description="what N ranks are compared with: the plain single-process program, which "
        "decides the verdict, and the wrapped system alone",
    )
    target: float = Field(0.8, gt=0, le=1, description="efficiency, at least")
    workload: ScaledWorkload = Field(description="model, data and batch shape")
    optimizer: Literal["sgd", "adamw"] = Field("adamw", description="sgd or adamw")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="of the model")
    backends: Words = Field(description="communication backend")
    worlds: Annotated[list[Size], AfterValidator(_growing)] = Field(
        min_length=1, description="numbers of ranks; beyond the physical cores they are modelled"
    )
    blocks: int = Field(BLOCKS, ge=2, le=100_000, description="blocks of a measured cell")
    implementations: list[SystemField] = Field(min_length=1, description="systems")


def read(paths: Iterable[Path]) -> list[Cell]:
    """The cells of scaling scenarios, those of one system and backend together, by world.

    :raises InputError: faulty files, each fault with its line.
    """
    cells: list[Cell] = []
    problems: list[Problem] = []
    for path in paths:
        model, node = load.read_as(path, ScalingScenario)
        try:
            base = _base(model)
        except InputError as error:
            line = node.locate(["workload"])
            problems += [replace(p, file=str(path), line=line) for p in error.problems]
            continue
        for index, item in enumerate(model.implementations):
            try:
                cells += _cells(model, item, base)
            except InputError as error:
                line = node.locate(["implementations", index])
                problems += [replace(p, file=str(path), line=line) for p in error.problems]
        for index, backend in enumerate(model.backends):
            if backend not in BACKENDS:
                remedy = nearest(backend, BACKENDS, "backends")
                line = node.locate(["backends", index])
                problems.append(Problem("unknown backend", remedy, backend, str(path), line))
    if not problems and len({cell.id for cell in cells}) < len(cells):
        twice = next(c.id for i, c in enumerate(cells) if c.id in {d.id for d in cells[:i]})
        problems.append(Problem("two cells of one id", "give one of them a label", twice))
    if problems:
        raise ScenarioError(dict.fromkeys(problems))
    return cells


def _base(model: ScalingScenario) -> WorkloadSpec:
    """The step of the single process.

    :raises SelectionError: the batch of the other mode, or a workload that does not exist.
    """
    work, batches = model.workload, ("global_batch", "batch_per_rank")
    own, other = batches if model.mode == "strong" else reversed(batches)
    batch = getattr(work, own)
    if batch is None or getattr(work, other) is not None:
        what = f"{model.mode} scaling takes workload.{own}, not {other}"
        raise SelectionError(Problem(what, f"write `{own}: ...`"))
    return spec_of(work.name, work.size, work.params, batch, work.micro_batches, work.seed)


def _cells(model: ScalingScenario, item: SystemModel, base: WorkloadSpec) -> list[Cell]:
    registry.check(item.implementation)
    return [
        Cell(
            name=model.name,
            mode=model.mode,
            system=Side(item.implementation, item.options),
            backend=backend,
            world=world,
            workload=_at(base, model.mode, world),
            base=base,
            optimizer=default_optimizer(model.optimizer),
            target=model.target,
            label=item.label or "",
            dtype=model.dtype,
            size=model.workload.size,
            blocks=model.blocks,
            launches=min(LAUNCHES, model.blocks),
        )
        for backend in model.backends
        for world in model.worlds
    ]


def _at(base: WorkloadSpec, mode: Mode, world: int) -> WorkloadSpec:
    samples = base.global_batch * (world if mode == "weak" else 1)
    return replace(base, global_batch=samples)


def on_ranks(cell: Cell, world: int) -> Cell:
    """``cell`` on another number of ranks."""
    return replace(cell, world=world, workload=_at(cell.base, cell.mode, world))


def with_worlds(cells: Sequence[Cell], worlds: Sequence[int]) -> list[Cell]:
    """The systems of ``cells`` on ``worlds`` in place of their own."""
    first = {cell.group: cell for cell in reversed(cells)}
    return [
        on_ranks(first[group], world)
        for group in dict.fromkeys(cell.group for cell in cells)
        for world in worlds
    ]


def check(cell: Cell) -> None:
    """What can be checked of a cell that options have changed.

    :raises SelectionError: a backend that does not exist, or a world of one.
    """
    if cell.backend not in BACKENDS:
        remedy = nearest(cell.backend, BACKENDS, "backends")
        raise SelectionError(Problem("unknown backend", remedy, cell.backend))
    if cell.world < 2:
        raise SelectionError(Problem("one rank is the base case", "worlds start at 2", "1"))
    if not 1 <= cell.launches <= cell.blocks:
        remedy = f"at most one launch a block, here {cell.blocks}"
        raise SelectionError(Problem("launches do not fit", remedy, str(cell.launches)))
