"""Pairs from speed scenarios (``scenarios/speed/*.yaml``), and the procedure's constants."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shardproof import registry, workloads
from shardproof.axes import growing, names
from shardproof.backends import BACKENDS, USUAL_PROCESSES
from shardproof.bench.subjects import LOSS_TOLERANCE, Action, Pair, Side, Subject
from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec, Options
from shardproof.errors import InputError, Problem, ScenarioError, SelectionError, nearest
from shardproof.scenarios import load
from shardproof.scenarios.schema import AxisName, Label, Model, Size
from shardproof.scenarios.source import Node

COMMAND = "shardproof bench"
#: A segment (one letter of A B B A) is at least this long and has at least this many steps.
SEGMENT_SECONDS = 0.2
SEGMENT_STEPS = 2
#: Each side warms up until one of these: so many steps, or so many seconds after ``WARM_LEAST``.
#: Every first time is in steps 0 to 2 (optimizer state is born in step 0; DDP rebuilds its buckets
#: before step 1; step 2 is the first like all others), so a model whose step takes long need not
#: warm up for 20 of them.
WARM_STEPS = 20
WARM_SECONDS = 2.0
WARM_LEAST = 4
#: Name of a pair that was given on the command line.
ON_COMMAND_LINE = "pair"
DTYPES = tuple(LOSS_TOLERANCE)


def default_optimizer(name: str) -> OptimizerSpec:
    """The common input of both sides; every side runs the same kernel (``foreach=False``)."""
    return OptimizerSpec(name=name, lr=0.1 if name == "sgd" else 1e-3)  # type: ignore[arg-type]


def natural_mesh(axes: Sequence[str], world: int) -> dict[str, int]:
    """The whole world along the first data axis that the implementation has, or its only axis.

    :raises SelectionError: it has several, and no data axis.
    """
    if able := growing(axes) or (axes if len(axes) == 1 else ()):
        return {able[0]: world}
    remedy = "give the mesh, e.g. --mesh-b pipe=2"
    raise SelectionError(Problem("the system has no data axis", remedy, ", ".join(axes)))


def spec_of(
    name: str, size: str, params: Options, global_batch: int, micro_batches: int, seed: int
) -> WorkloadSpec:
    """A workload whose ``params`` are those of preset ``size``, changed by ``params``.

    :raises SelectionError: unknown workload, size or parameter, or values that do not fit.
    """
    family = workloads.WORKLOADS.get(name)
    if family is None:
        remedy = nearest(name, workloads.WORKLOADS, "workloads")
        raise SelectionError(Problem("unknown workload", remedy, name))
    if size and size not in family.sizes:
        remedy = nearest(size, family.sizes, f"sizes of {name}")
        raise SelectionError(Problem("unknown size", remedy, size))
    params = {**family.sizes.get(size, {}), **params}
    spec = WorkloadSpec(
        name, seed=seed, global_batch=global_batch, micro_batches=micro_batches, params=params
    )
    try:
        workloads.check(spec)
    except workloads.WorkloadError as error:
        what, _, remedy = str(error).partition(": ")
        raise SelectionError(Problem(what, remedy or "correct it")) from None
    return spec


def check(pair: Pair) -> None:
    """Everything that can be checked without importing an implementation.

    :raises InputError: a name that does not exist, or a value that does not fit.
    """
    for side in (pair.a, pair.b):
        registry.check(side.implementation)
        if side.mesh and math.prod(side.mesh.values()) != pair.world:
            shape = " x ".join(f"{axis}={n}" for axis, n in side.mesh.items())
            remedy = f"choose axis sizes with the product {pair.world}"
            raise SelectionError(Problem("the mesh does not match the world size", remedy, shape))
    check_backend(pair.backend)
    if pair.dtype not in DTYPES:
        raise SelectionError(Problem("unknown dtype", nearest(pair.dtype, DTYPES), pair.dtype))
    check_launches(pair)


def check_backend(backend: str) -> None:
    """:raises SelectionError: there is no such backend."""
    if backend not in BACKENDS:
        remedy = nearest(backend, BACKENDS, "backends")
        raise SelectionError(Problem("unknown backend", remedy, backend))


def check_launches(subject: Subject) -> None:
    """:raises SelectionError: more launches than blocks."""
    if not 1 <= subject.launches <= subject.blocks:
        remedy = f"choose 1 to {subject.blocks}: at most one launch per block"
        raise SelectionError(Problem("launches: invalid number", remedy, str(subject.launches)))


_NUMBER = re.compile(r"[-+]?[0-9]+$")


def parse_assignments(texts: Sequence[str], option: str) -> Options:
    """``["a=1", "b.c=true"]`` -> ``{"a": 1, "b": {"c": True}}``; values are YAML.

    :raises SelectionError: no ``=``, or a value that is no YAML.
    """
    from shardproof.scenarios.source import parse

    assigned: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise SelectionError(Problem(f"{option} needs a value", "write key=value", text))
        try:
            node = parse(f"value: {value}", option).plain()
        except ScenarioError as error:
            what = f"{option}: {error.problems[0].what}"
            raise SelectionError(Problem(what, "quote the value", text)) from None
        *parents, last = key.split(".")
        place = assigned
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                remedy = f"give {parent!r} either a value or keys of its own"
                raise SelectionError(Problem(f"{option}: {parent} has two values", remedy, text))
            place = inner
        place[last] = node["value"]
    return assigned


def parse_mesh(text: str, option: str) -> dict[str, int]:
    """``"replicate=2,shard=2"`` -> axes; empty text: none."""
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in names() or not _NUMBER.match(size):
            remedy = f"axes are {', '.join(names())}; write e.g. replicate=2,shard=2"
            raise SelectionError(Problem(f"{option} is not of the form axis=size", remedy, part))
        axes[axis] = int(size)
    return axes


def named(value: Any) -> Any:
    """A bare name as the mapping that it stands for."""
    return {"implementation": value} if isinstance(value, str) else value


class SideModel(Model):
    """An implementation and its options; a bare name stands for `{implementation: ...}`."""

    implementation: str = Field(min_length=1, description="family/name, or package.module:Class")
    options: Options = Field(default_factory=dict, description="handed to setup()")
    mesh: dict[AxisName, Size] = Field(
        default_factory=dict, description="axes; default: one, whole"
    )


SideField = Annotated[SideModel, BeforeValidator(named, json_schema_input_type=str | SideModel)]


class PairModel(Model):
    """One comparison."""

    name: Label = Field(description="names the pair in ids and tables")
    a: SideField = Field(description="the side that is judged")
    b: SideField = Field(description="the side that it is compared with")
    world: int | None = Field(None, ge=1, le=1024, description="instead of the file's")
    micro_batches: int | None = Field(None, ge=1, le=64, description="instead of the file's")
    action: Action = Field("step", description="what is timed: a step, or of checkpoints")
    goal: float | None = Field(None, gt=0, description="instead of the file's")
    loss_tolerance: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="relative difference of the first losses up to which the sides train the same "
        "(default: rounding of the dtype); more where each loses precision in its own way",
    )


class WorkloadModel(Model):
    """Model, data and batch shape."""

    name: str = Field(min_length=1, description="a workload of the suite")
    size: str = Field("", description="a preset of the workload's parameters, e.g. 20m")
    seed: int = Field(0, ge=0, lt=2**31)
    micro_batches: int = Field(1, ge=1, le=64, description="per data coordinate")
    params: Options = Field(default_factory=dict, description="parameters of the workload")

    def spec(self, global_batch: int, micro_batches: int | None = None) -> WorkloadSpec:
        """The workload with a batch.

        :raises SelectionError: unknown workload, size or parameter, or values that do not fit.
        """
        micro_batches = micro_batches or self.micro_batches
        return spec_of(self.name, self.size, self.params, global_batch, micro_batches, self.seed)


class BatchModel(WorkloadModel):
    """A workload with one batch for all ranks."""

    global_batch: int = Field(16, ge=1, le=4096, description="samples in one optimizer step")


class TimedScenario(Model):
    """A file that ``shardproof bench`` times."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,59}$", description="unique, lower case")
    about: str = Field(min_length=3, description="why these systems")
    optimizer: Literal["sgd", "adamw"] = Field("adamw", description="sgd or adamw")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="of the model")


class SpeedScenario(TimedScenario):
    """A file of pairs."""

    workload: BatchModel = Field(description="model, data and batch shape")
    backend: str = Field(USUAL_PROCESSES, description="communication backend")
    world: int = Field(2, ge=1, le=1024, description="number of ranks")
    goal: float | None = Field(None, gt=0, description="highest allowed upper end of A over B")
    pairs: list[PairModel] = Field(min_length=1, description="comparisons")


class Faults(list[Problem]):
    """The faults of files, with their places, raised together."""

    @contextmanager
    def at(self, path: Path, node: Node, *place: str | int) -> Iterator[None]:
        """Errors that the block raises about input get the ``place`` in the file."""
        try:
            yield
        except InputError as error:
            line = node.locate(list(place))
            self += [replace(p, file=str(path), line=line) for p in error.problems]

    def end(self) -> None:
        """Raise :class:`ScenarioError` if there were any."""
        if self:
            raise ScenarioError(dict.fromkeys(self))


def read(names: Sequence[str]) -> list[Pair]:
    """The pairs of the speed scenarios that ``names`` name (files, folders, names; none: all).

    :raises InputError: faulty files, or a name that no file has.
    """
    pairs: list[Pair] = []
    faults = Faults()
    for path in files(names):
        model, node = load.read_as(path, SpeedScenario)
        for index, item in enumerate(model.pairs):
            with faults.at(path, node, "pairs", index):
                pairs.append(_pair(model, item))
                check(pairs[-1])
    faults.end()
    return pairs


def _pair(model: SpeedScenario, item: PairModel) -> Pair:
    return Pair(
        name=item.name,
        a=Side(**item.a.model_dump()),
        b=Side(**item.b.model_dump()),
        backend=model.backend,
        world=item.world or model.world,
        workload=model.workload.spec(model.workload.global_batch, item.micro_batches),
        optimizer=default_optimizer(model.optimizer),
        dtype=model.dtype,
        size=model.workload.size,
        action=item.action,
        goal=item.goal or model.goal,
        loss_tolerance=item.loss_tolerance,
    )


def kind_of(path: Path) -> str:
    """``speed``, ``scaling``, or empty for a file that is not timed."""
    kind = load.kind_of(path)
    return kind.name if kind is not None and kind.command == COMMAND else ""


def timed_files(folder: Path) -> list[Path]:
    """The files below ``folder`` that ``shardproof bench`` reads."""
    found = load.files_of_wings(folder)
    return [path for path, kind in found.items() if kind.command == COMMAND]


def known() -> dict[str, Path]:
    """Timed scenarios of the default folder, as ``ddp`` and as ``speed/ddp``."""
    paths = timed_files(load.default_folder())
    whole = {f"{path.parent.name}/{path.stem}": path for path in paths}
    return {path.stem: path for path in reversed(paths)} | whole


def files(names: Sequence[str]) -> list[Path]:
    """The timed scenarios that ``names`` name: files, folders, names; none: all that pair sides.

    :raises SelectionError: a name that no file has, or a folder without timed scenarios.
    """
    root, there = load.default_folder(), known()
    paths: dict[Path, None] = {}
    for name in names or [str(root / "speed")]:
        path = load.named(name)
        folder = path if path.is_dir() else root / name
        if name in there:
            paths.setdefault(there[name])
        elif folder.is_dir():
            if not (inside := timed_files(folder)):
                remedy = "name a file, or two implementations"
                raise SelectionError(Problem("no timed scenarios here", remedy, str(folder)))
            paths |= dict.fromkeys(inside)
        elif path.suffix in (".yaml", ".yml"):
            paths.setdefault(path)
        else:
            remedy = nearest(name, there, "timed scenarios") + "; or name two implementations"
            raise SelectionError(Problem("unknown timed scenario", remedy, name))
    return list(paths)


#: The workload whose knobs are known here, its layers as far as they can be chosen, and what the
#: width is a multiple of: that of a head.
WORKLOAD, LAYERS, HEAD = "charnames_gpt", 16, 64
#: Parameters of a block over the square of its width: attention has 4, the MLP 8.
_SQUARES = 12
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_MOST = 10**11


def parse_parameters(text: str) -> int:
    """``200M``, ``1.5B``, ``300000``.

    :raises SelectionError: none of these.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([KMB]?)", text)
    count = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    least = _SQUARES * HEAD**2
    if not least <= count <= _MOST:
        remedy = f"write at least {least:,}, e.g. 20M, 200M or 1.5B"
        raise SelectionError(Problem("--parameters: not a valid number", remedy, text))
    return count


def sized(pairs: Sequence[Pair], text: str) -> list[Pair]:
    """Pairs of checkpoints of a model of about so many parameters.

    :raises SelectionError: no number, or pairs of which it is no option.
    """
    count = parse_parameters(text)
    width = max(HEAD, HEAD * round(math.sqrt(count / (_SQUARES * LAYERS)) / HEAD))
    layers = max(1, round(count / (_SQUARES * width**2)))
    changed = []
    for pair in pairs:
        if pair.action == "step" or pair.workload.name != WORKLOAD:
            what = f"--parameters is only for checkpoints of {WORKLOAD}"
            raise SelectionError(Problem(what, "use `bench checkpoint`", pair.name))
        knobs = {**pair.workload.params, "width": width, "heads": width // HEAD, "layers": layers}
        workload = replace(pair.workload, params=knobs)
        changed.append(replace(pair, workload=workload, size=text))
    return changed
