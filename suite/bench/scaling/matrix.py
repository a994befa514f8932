"""The cells of scaling scenarios, which have a ``mode`` (``scenarios/scaling/strong.yaml``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shardproof import registry
from shardproof.bench import sides
from shardproof.bench.subjects import BASES, CELL_BLOCKS, LAUNCHES, Cell, Mode, Side
from shardproof.case import WorkloadSpec
from shardproof.errors import Problem, ScenarioError, SelectionError
from shardproof.launch.nodes import bits_per_second
from shardproof.scenarios import load
from shardproof.scenarios.schema import AxisName, Label, Size, Words

#: Largest global batch of a workload.
MOST_SAMPLES = 4096


def _growing(worlds: list[int]) -> list[int]:
    if worlds != sorted(set(worlds)):
        raise ValueError("list worlds in ascending order, each once")
    if worlds and worlds[0] < 2:
        raise ValueError("each world size must be 2 or more: 1 rank is always timed, as the base")
    return worlds


class SystemModel(sides.SideModel):
    """An implementation and its options; a bare name stands for `{implementation: ...}`."""

    #: Whether a mesh may be given.
    takes_mesh: ClassVar[bool] = False

    label: Label | None = Field(None, description="distinguishes option sets in ids and tables")

    @model_validator(mode="after")
    def _has_label(self) -> SystemModel:
        if self.options and self.label is None:
            raise ValueError("a system with options needs a unique label: add e.g. `label: mine`")
        return self

    @model_validator(mode="after")
    def _has_a_mesh_that_is_read(self) -> SystemModel:
        if self.mesh and not self.takes_mesh:
            raise ValueError("leave `mesh` out: all ranks are on the system's data axis")
        return self


class ScaledSystem(SystemModel):
    """A system that runs on more and more ranks; `mesh` has the axes whose sizes stay."""

    takes_mesh: ClassVar[bool] = True

    grows: AxisName | None = Field(
        None,
        description="axis outside of `mesh` for the ranks that `mesh` does not use (default: a "
        "data axis of the system)",
    )
    worlds: Annotated[list[Size], AfterValidator(_growing)] = Field(
        default_factory=list, description="instead of the file's"
    )
    micro_batches: int | None = Field(
        None, ge=1, le=64, description="instead of the workload's, of the single process as well"
    )

    @model_validator(mode="after")
    def _names_its_mesh(self) -> ScaledSystem:
        if (self.mesh or self.micro_batches) and self.label is None:
            raise ValueError("a system with mesh or micro_batches needs a label: add `label: ...`")
        if self.grows in self.mesh:
            raise ValueError(f"remove {self.grows} from `mesh`: `grows` already names this axis")
        return self


SystemField = Annotated[
    ScaledSystem, BeforeValidator(sides.named, json_schema_input_type=str | ScaledSystem)
]


class ScaledWorkload(sides.WorkloadModel):
    """Model, data and batch shape; which of the two batches is given depends on the mode."""

    global_batch: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="strong: samples in a step of all ranks"
    )
    batch_per_rank: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description="weak: samples of each rank in a step"
    )


def _rate(text: str) -> str:
    bits_per_second(text)
    return text


def _both(base: list[str]) -> list[str]:
    if tuple(base) != BASES:
        raise ValueError("list both base cases in this order: [plain, wrapped]")
    return base


class ScalingScenario(sides.TimedScenario):
    """A file of systems that run on more and more ranks."""

    mode: Mode = Field(description="strong: the global batch stays; weak: that of a rank does")
    base: Annotated[list[Literal["plain", "wrapped"]], AfterValidator(_both)] = Field(
        ["plain", "wrapped"],
        description="what N ranks are compared with: the plain single-process program, which "
        "decides the verdict, and the wrapped system alone",
    )
    target: float = Field(0.8, gt=0, le=1, description="efficiency, at least")
    workload: ScaledWorkload = Field(description="model, data and batch shape")
    backends: Words = Field(description="communication backend")
    worlds: Annotated[list[Size], AfterValidator(_growing)] = Field(
        min_length=1, description="numbers of ranks; beyond the physical cores they are modelled"
    )
    bandwidths: list[Annotated[str, AfterValidator(_rate)]] = Field(
        default_factory=list,
        description="rates at which nodes send: unlimited, 100mbit, 1gbit; `shardproof "
        "cluster bench` measures each (default: the network as it is)",
    )
    blocks: int = Field(CELL_BLOCKS, ge=2, le=100_000, description="blocks of a measured cell")
    implementations: list[SystemField] = Field(min_length=1, description="systems")


def read(paths: Iterable[Path]) -> list[Cell]:
    """The cells of scaling scenarios, those of one system and backend together, by world.

    :raises InputError: faulty files, each fault with its line.
    """
    cells: list[Cell] = []
    faults = sides.Faults()
    for path in paths:
        model, node = load.read_as(path, ScalingScenario)
        base = None
        with faults.at(path, node, "workload"):
            base = _base(model)
        if base is None:
            continue
        for index, item in enumerate(model.implementations):
            with faults.at(path, node, "implementations", index):
                cells += _cells(model, item)
        for index, backend in enumerate(model.backends):
            with faults.at(path, node, "backends", index):
                sides.check_backend(backend)
    faults.end()
    ids = [cell.id for cell in cells]
    if twice := [name for name in ids if ids.count(name) > 1]:
        raise ScenarioError(
            [Problem("two cells have the same id", "give one of these cells a label", twice[0])]
        )
    return cells


def _base(model: ScalingScenario, micro_batches: int | None = None) -> WorkloadSpec:
    """The step of the single process; ``micro_batches``: instead of the file's.

    :raises SelectionError: the batch of the other mode, or a workload that does not exist.
    """
    work, batches = model.workload, ("global_batch", "batch_per_rank")
    own, other = batches if model.mode == "strong" else reversed(batches)
    batch = getattr(work, own)
    if batch is None or getattr(work, other) is not None:
        what = f"{model.mode} scaling needs workload.{own}, not {other}"
        raise SelectionError(Problem(what, f"write `{own}: ...`"))
    return work.spec(batch, micro_batches)


def _cells(model: ScalingScenario, item: ScaledSystem) -> list[Cell]:
    registry.check(item.implementation)
    base = _base(model, item.micro_batches)
    mesh = {str(axis): size for axis, size in item.mesh.items()}
    cells = [
        Cell(
            name=model.name,
            mode=model.mode,
            system=Side(item.implementation, item.options, mesh),
            backend=backend,
            world=world,
            workload=base,
            base=base,
            optimizer=sides.default_optimizer(model.optimizer),
            target=model.target,
            label=item.label or "",
            bandwidth=bandwidth,
            grows=item.grows or "",
            dtype=model.dtype,
            size=model.workload.size,
            blocks=model.blocks,
            launches=min(LAUNCHES, model.blocks),
        ).at(world)
        for bandwidth in model.bandwidths or [""]
        for backend in model.backends
        for world in item.worlds or model.worlds
    ]
    for cell in cells:
        _require_whole_mesh(cell)
    return cells


def _require_whole_mesh(cell: Cell) -> None:
    """:raises SelectionError: the axes whose sizes stay do not divide the world."""
    if cell.world % cell.inner:
        inner = " x ".join(f"{axis} {size}" for axis, size in cell.system.mesh.items())
        what = f"{cell.title}: {cell.world} ranks cannot be divided into groups of {inner}"
        remedy = f"choose multiples of {cell.inner} as `worlds` of this system or --world"
        raise SelectionError(Problem(what, remedy, str(cell.world)))


def with_worlds(cells: Sequence[Cell], worlds: Sequence[int]) -> list[Cell]:
    """The systems of ``cells`` on ``worlds`` in place of their own."""
    first = {cell.group: cell for cell in reversed(cells)}
    groups = dict.fromkeys(cell.group for cell in cells)
    return [first[group].at(world) for group in groups for world in worlds]


def check(cell: Cell) -> None:
    """The rules for a cell that options have changed.

    :raises SelectionError: a backend that does not exist, or a world of one.
    """
    sides.check_backend(cell.backend)
    if cell.world < 2:
        what = "1 rank is always timed, as the base"
        raise SelectionError(Problem(what, "choose --world 2 or more", "1"))
    _require_whole_mesh(cell)
    sides.check_launches(cell)
