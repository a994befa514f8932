"""The subjects of timing, as plain data: pairs and cells, requests to ranks, and their answers.

    Pair, Cell     from scenarios or the command line
    SideRun        one side of them in training, as every rank of a launch knows it
    Launch         the blocks that fresh ranks time
    RankTimes, ... what a rank returns

Imports no torch: the lines of ``cases.jsonl`` (``lines.py``) are made of the same classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardproof.axes import sharing, size
from shardproof.bench.model.physical_cores import physical_cores
from shardproof.case import Case, WorkloadSpec
from shardproof.contract import OptimizerSpec, Options
from shardproof.files import Stored

if TYPE_CHECKING:
    from shardproof.costs import ModelFacts
    from shardproof.launch.nodes import Nodes

#: Letters of the sides of a comparison.
LETTERS = ("a", "b")
Mode = Literal["strong", "weak"]
#: What of a side is timed: a training step; a save until it is committed; a load; a save until
#: training can go on.
Action = Literal["step", "save", "load", "stall"]
#: The cases that N ranks are compared with: the ordinary program, and the system alone.
BASES = ("plain", "wrapped")
#: What runs as the plain program.
PLAIN = "plain"
#: Sides of a comparison, in the order of their set-up; ``twin`` is A once more.
SIDES = ("a", "twin", "b")
#: Order of the segments in a block of each pair.
ORDERS = {"ab": ("a", "b", "b", "a"), "aa": ("a", "twin", "twin", "a")}
#: Segments of a cell's block, and what is left of them where N ranks do not fit.
ORDER = ("plain", "wrapped", "ranks", "ranks", "wrapped", "plain")
ALONE_ORDER = ("plain", "wrapped", "wrapped", "plain")
#: The name under which a cell's raw times are kept, where a comparison has its pairs.
SCALING = "scaling"
#: Relative difference of the first losses from which two sides do not train the same: sums in
#: another order differ by 1e-6 in fp32.  Only a guard; numbers are what ``shardproof run`` judges.
LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
#: Blocks of a comparison: chosen beforehand, so that the A/A half-width on the machine of the
#: evidence is at most 5 % (results/evidence/bench-calibration.md).
BLOCKS = 24
#: Blocks of a cell: where blocks vary by 10 %, 10 of them find a change of 10 % in 68 % of runs,
#: 20 in 97 % (simulated).
CELL_BLOCKS = 20
#: Fresh sets of ranks over which the blocks are spread.
LAUNCHES = 3


@dataclass(frozen=True)
class Side:
    """One implementation and its options; an empty ``mesh`` is its natural axis, whole world."""

    implementation: str
    options: Options = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timed(Stored, ABC):
    """The common part of a pair and a cell; both travel to leaders as JSON.

    ``workload`` is that of a step of all ranks.  ``deadline`` is in seconds, of a launch.
    """

    #: Lines have an ``id`` besides.
    __pydantic_config__ = Stored.__pydantic_config__ | {"extra": "ignore"}

    name: str
    backend: str
    world: int
    workload: WorkloadSpec
    optimizer: OptimizerSpec
    dtype: str = "float32"
    size: str = ""
    launches: int = LAUNCHES

    @property
    @abstractmethod
    def id(self) -> str:
        """Names it in results."""

    @property
    def work(self) -> str:
        """The workload and its size, as ids name them."""
        return "+".join((self.workload.name, *([self.size] if self.size else [])))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with the id."""
        return super().to_dict() | {"id": self.id}


@dataclass(frozen=True, kw_only=True)
class Pair(Timed):
    """Two sides, A and B, that are compared."""

    #: Those that are declared and judged.
    own_sides: ClassVar[Sequence[str]] = LETTERS

    a: Side
    b: Side
    action: Action = "step"
    goal: float | None = None
    #: Of the first losses, relative; ``None``: by the dtype (``LOSS_TOLERANCE``).
    loss_tolerance: float | None = None
    blocks: int = BLOCKS
    deadline: float = 900.0

    @property
    def versus(self) -> str:
        """Both implementations."""
        return f"{self.a.implementation} v {self.b.implementation}"

    @property
    def id(self) -> str:
        """Names the comparison; two of one name differ in more than the machine."""
        return f"bench::{self.name}::{self.versus}::{self.backend}::{self.world}::{self.work}"

    @property
    def group(self) -> tuple[str, ...]:
        """Sides are examined for one comparison at a time."""
        return (self.id,)

    def side(self, letter: str) -> Side:
        """``a``, ``b``, or A's ``twin`` in the A/A pair."""
        return self.b if letter == "b" else self.a


def grown(mesh: Mapping[str, int], world: int) -> dict[str, int]:
    """The mesh of a cell on ``world`` ranks: its first axis grows, the sizes of others stay."""
    (axis, _), *inner = mesh.items()
    return {axis: world // math.prod(size for _, size in inner), **dict(inner)}


@dataclass(frozen=True, kw_only=True)
class Cell(Timed):
    """One system on one backend at one world; ``base`` is the workload of the single process.

    The mesh of ``system`` has the axes whose sizes stay; the ranks that it leaves are on the axis
    that ``grows`` (empty: a data axis of the system), outside of them.
    """

    #: The one that is declared; its bases follow from it.
    own_sides: ClassVar[Sequence[str]] = ("ranks",)

    mode: Mode
    system: Side
    base: WorkloadSpec
    target: float
    label: str = ""
    #: What a node of a cluster sends with, as scenarios write it; empty: wherever it is timed.
    bandwidth: str = ""
    grows: str = ""
    blocks: int = CELL_BLOCKS
    deadline: float = 600.0

    @property
    def title(self) -> str:
        """The system, with its label."""
        return self.system.implementation + (f"+{self.label}" if self.label else "")

    @property
    def id(self) -> str:
        """Names the cell in results."""
        where = f"{self.backend}::{self.world}::{self.work}"
        between = f"::{self.bandwidth}" if self.bandwidth else ""
        return f"scaling::{self.name}::{self.title}::{where}{between}"

    @property
    def group(self) -> tuple[str, ...]:
        """Cells that differ in nothing but their world share it."""
        return self.name, self.title, self.network

    @property
    def network(self) -> str:
        """Backend, and what nodes send with."""
        return ", ".join(filter(None, (self.backend, self.bandwidth)))

    def side(self, side: str) -> Side:
        """The system: all sides of a cell are made of it."""
        return self.system

    @property
    def inner(self) -> int:
        """Ranks on the axes whose sizes stay."""
        return math.prod(self.system.mesh.values())

    def data_coordinates(self, world: int) -> int:
        """Among how many ``world`` ranks share the batch of a step."""
        stays = size(self.system.mesh, sharing(self.system.mesh))
        return stays * (world // self.inner if not self.grows or sharing([self.grows]) else 1)

    def samples(self, world: int) -> int:
        """Samples of the rank that has most, in a step of ``world`` ranks."""
        return math.ceil(self.at(world).workload.global_batch / self.data_coordinates(world))

    def at(self, world: int) -> Cell:
        """The cell on ``world`` ranks."""
        samples = self.base.global_batch * (world if self.mode == "weak" else 1)
        return replace(self, world=world, workload=replace(self.base, global_batch=samples))


Subject = Pair | Cell


@dataclass(frozen=True)
class Room:
    """How many ``ranks`` of ``threads`` threads fit on this machine, counted in ``of``."""

    ranks: int
    of: str
    threads: int = 1  # shardproof.launch gives every rank one

    @classmethod
    def here(cls, gpus: int | None, nodes: Nodes | None = None) -> Room:
        """That of this machine: its ``gpus``, or (``None``) its physical cores; of its ``nodes``,
        where these have less.
        """
        count, of = (physical_cores(), "physical core") if gpus is None else (gpus, "GPU")
        if nodes is not None and nodes.places < count:
            count, of = nodes.places, "node place"
        return cls(count, of if count == 1 else f"{of}s")

    def oversubscribed(self, world: int) -> bool:
        """Whether ``world`` ranks need more than there is."""
        return world * self.threads > self.ranks


# ------------------------------------------------------------------------- asked of ranks


@dataclass(frozen=True)
class SideRun:
    """One implementation in training on the mesh ``axes``, as every rank of a launch knows it.

    ``world`` is that of the launch.  With ``first_rank_only`` the mesh is that of rank 0 alone.
    ``deadline`` is in seconds, of a launch.
    """

    name: str
    side: Side
    axes: dict[str, int]
    backend: str
    world: int
    workload: WorkloadSpec
    optimizer: OptimizerSpec
    dtype: str
    deadline: float
    first_rank_only: bool = False

    def case(self) -> Case:
        """The case that cost formulas know it by."""
        shared = ("backend", "workload", "optimizer", "dtype")
        return Case(
            **{name: getattr(self, name) for name in shared},
            id=self.name,
            scenario=self.name,
            implementation=self.side.implementation,
            options=self.side.options,
            mesh=self.axes,
            lane="working_precision",
            checks=(),
            steps=1,
        )

    def facts(self) -> ModelFacts:
        """The facts that cost formulas may know of it (imports torch)."""
        from shardproof.costs.expression import facts_of

        return facts_of(self.case()).model_facts

    def formula_bytes(self, strategy: str) -> int | None:
        """Bytes of model states on the rank that holds most; ``None``: no formula."""
        from shardproof.costs import NoCostModel, cost_model_of

        try:
            model = cost_model_of(strategy, self.facts())
            return None if model is None or model.why_not_measured() else model.total()
        except NoCostModel:
            return None


@dataclass(frozen=True)
class Launch:
    """Blocks that fresh ranks time: of each pair of ``orders``, segments of ``sides`` in turn, each
    of steps or of one other ``action``.

    ``number`` is that of the launch, ``blocks`` those of its blocks.  ``pace`` is the side whose
    time sets the steps of every segment; without one each side has its own number of steps.
    ``probed``: samples of a rank -> the run whose compute is measured between blocks; the calls of
    the first one are, too (empty: nothing is probed).  So many ranks compute ``at_once`` then, for
    there are no cores for more (0: all).
    """

    sides: dict[str, SideRun]
    orders: Mapping[str, tuple[str, ...]]
    number: int
    blocks: list[int]
    pace: str = ""
    probed: dict[int, SideRun] = field(default_factory=dict)
    action: Action = "step"
    at_once: int = 0

    @property
    def first(self) -> SideRun:
        """A side whose backend, world and deadline are those of all."""
        return next(iter(self.sides.values()))


def side_run(subject: Subject, side: str, axes: Mapping[str, int]) -> SideRun:
    """A side of ``subject`` in training on the mesh ``axes``."""
    return SideRun(
        *(subject.name, subject.side(side), dict(axes), subject.backend, subject.world),
        *(subject.workload, subject.optimizer, subject.dtype, subject.deadline),
    )


# --------------------------------------------------------------------- returned by ranks


@dataclass(frozen=True)
class AloneSteps:
    """Seconds without traffic of whole ``steps`` and to the ``gradients``, by segment and step."""

    steps: list[list[float]]
    gradients: list[list[float]]


@dataclass(frozen=True)
class GroupRecord:
    """The probes of one rank in one of its groups, of so many ``ranks``.

    ``collectives`` are (operation, payload bytes, seconds of each sweep), ``used`` wall and CPU
    seconds by operation.
    """

    ranks: int
    collectives: list[tuple[str, int, list[float]]]
    used: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class ProbeRecord:
    """The probes of one rank, sweep by sweep: in its groups, by axis (of all ranks under ``""``;
    all groups of an axis were measured at once), and rates in FLOP/s and bytes/s.
    """

    groups: dict[str, GroupRecord]
    flop_rates: list[float]
    byte_rates: list[float]


@dataclass(frozen=True)
class Call:
    """``count`` calls of ``operation`` that a rank makes in a step, in groups of ``ranks`` ranks;
    ``bytes`` is the payload of each (the mean: the model is linear). ``axis``: as the traffic
    ledger names it; empty: unknown.
    """

    operation: str
    ranks: int
    bytes: float
    count: float = 1
    floating: bool = True
    axis: str = ""


@dataclass(frozen=True)
class WatchedStep:
    """A step that the traffic ledger watched on one rank, and the work of the plain model.

    ``flops`` are those of products of matrices, ``products`` the shapes of most FLOPs with how
    often a step makes each, ``elements`` those that are trained; ``schedule`` is that of a pipeline
    with one window a step, as :meth:`~shardproof.schedules.Schedule.to_dict` gives it.
    """

    calls: list[Call]
    flops: int
    products: list[tuple[tuple[int, int, int, int], int]]
    elements: int
    schedule: dict[str, Any] | None = None


@dataclass(frozen=True)
class RankRounds:
    """The measurements of a rank for some runs in rounds: each without traffic and with it.

    ``together`` are seconds by run, round and step.
    """

    rank: int
    cores: list[int]
    threads: int
    alone: list[AloneSteps]
    together: list[list[list[float]]]
    probes: ProbeRecord


@dataclass(frozen=True)
class Rounds:
    """The measurements of all ranks, and the watched step of each run (of rank 0)."""

    watched: list[WatchedStep]
    measured: list[RankRounds]


@dataclass(frozen=True)
class RankCounts:
    """The bytes that a rank counted where saves or loads were timed.

    ``above``: by side, the most resident memory during a save above that before it (none where the
    system does not tell).  ``largest``: a whole tensor of A.  ``needed`` and ``read``: what this
    rank of a smaller world holds of what A saved, and what it read for that (``None``: nobody
    tells).
    """

    above: dict[str, int] = field(default_factory=dict)
    largest: int = 0
    needed: int = 0
    read: int | None = None


@dataclass(frozen=True)
class RankTimes:
    """The result of a rank at the end of a timed launch, by side; step times are in its file.

    ``losses`` are those of the first steps (``None``: this rank does not learn it),
    ``coordinates`` data coordinates (``None``: it has no part in the side), ``targets`` those of
    one step.  ``alone``: the compute of each run that the launch probed; ``probes``:
    :meth:`shardproof.bench.model.probes.Probes.record`; ``counts``: those of a launch of saves.
    """

    rank: int
    segment_steps: dict[str, int]
    losses: dict[str, list[float | None]]
    coordinates: dict[str, int | None]
    targets: dict[str, int]
    threads: int
    cores: list[int]
    pci: dict[str, int] | None = None
    alone: list[AloneSteps] = field(default_factory=list)
    probes: ProbeRecord | None = None
    counts: RankCounts | None = None


@dataclass(frozen=True)
class StepBytes:
    """The bytes of one step on a rank, as ledgers count them.

    ``held``: the most at once; ``device`` and ``host``: the most in either memory.
    ``sent``: by the model of :mod:`shardproof.ledgers.traffic`, rounded up.
    """

    sent: int
    held: int = 0
    device: int = 0
    host: int = 0

    def or_more(self, other: StepBytes) -> StepBytes:
        """The larger figure of both, one by one."""
        names = [field.name for field in fields(self)]
        return StepBytes(**{n: max(getattr(self, n), getattr(other, n)) for n in names})


@dataclass(frozen=True)
class AloneRecord:
    """The resources that one side took of a rank that ran nothing else.

    ``resident`` is the growth of resident memory (bytes) since before the set-up, allocators,
    groups and libraries included; ``allocator`` is ``None`` without a GPU.
    """

    resident: int
    allocator: dict[str, int] | None
