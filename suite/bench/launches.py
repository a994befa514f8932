"""What a session asks of its ranks: sides in training that take turns.  Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardproof.axes import replicas
from shardproof.bench.model import alpha_beta
from shardproof.bench.model.records import AloneSteps, ProbeRecord
from shardproof.bench.subjects import (
    ALONE_ORDER,
    ORDER,
    PLAIN,
    SCALING,
    Action,
    Cell,
    Side,
    Subject,
    grown,
)
from shardproof.case import Case, WorkloadSpec
from shardproof.contract import OptimizerSpec
from shardproof.costs import ModelFacts, NoCostModel, cost_model_of

Meshes = Mapping[str, Mapping[str, int]]


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
        return Case(
            id=self.name,
            scenario=self.name,
            implementation=self.side.implementation,
            backend=self.backend,
            mesh=self.axes,
            workload=self.workload,
            optimizer=self.optimizer,
            lane="working_precision",
            checks=(),
            options=self.side.options,
            dtype=self.dtype,
            steps=1,
        )

    def facts(self) -> ModelFacts:
        """What cost formulas may know of it (imports torch)."""
        from shardproof.costs.expression import facts_of

        return facts_of(self.case()).model_facts

    def formula_bytes(self, strategy: str) -> int | None:
        """Bytes of model states on the rank that holds most; ``None``: no formula."""
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
    return SideRun(
        *(subject.name, subject.side(side), dict(axes), subject.backend, subject.world),
        *(subject.workload, subject.optimizer, subject.dtype, subject.deadline),
    )


def cell_launch(
    cell: Cell,
    mesh: Mapping[str, int],
    number: int,
    blocks: Sequence[int],
    together: bool,
    at_once: int = 0,
) -> Launch:
    """One rank and N ranks on ``mesh``; without ``together`` one rank alone, beside an idle second
    one (or as many as the axes have whose sizes stay).

    The model is probed in the first launch, where its formulas know the backend; ``at_once`` of the
    ranks compute at once there (0: all).
    """
    if not together:
        cell = cell.at(max(2, cell.inner))
    ranks = side_run(cell, "ranks", grown(mesh, cell.world))
    alone = dict.fromkeys(mesh, 1)
    wrapped = replace(ranks, axes=alone, workload=cell.base, first_rank_only=True)
    plain = replace(wrapped, axes=replicas(1), side=Side(PLAIN))
    sides = {"plain": plain, "wrapped": wrapped} | ({"ranks": ranks} if together else {})
    probed: dict[int, SideRun] = {}
    if number == 0 and alpha_beta.algorithms_of(cell.backend):
        probed[cell.samples(cell.world)] = ranks
        if cell.mode == "strong":  # a rank's batch shrinks: one sample gives the fixed part
            single = replace(cell.workload, global_batch=cell.data_coordinates(cell.world))
            probed.setdefault(1, replace(ranks, workload=single))
    orders = {SCALING: ORDER if together else ALONE_ORDER}
    return Launch(sides, orders, number, list(blocks), probed=probed, at_once=at_once)


@dataclass(frozen=True)
class RankCounts:
    """What a rank counted where saves or loads were timed, in bytes.

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
    """What a rank returns at the end of a timed launch, by side; step times are in its file.

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
class AloneRecord:
    """What one side took of a rank that ran nothing else.

    ``resident`` is the growth of resident memory (bytes) since before the set-up, allocators,
    groups and libraries included; ``allocator`` and ``pci`` are ``None`` without a GPU.  Energy is
    taken from the ``steps`` between ``began`` and ``ended`` (``time.monotonic``).
    """

    rank: int
    resident: int
    allocator: dict[str, int] | None
    pci: dict[str, int] | None
    began: float
    ended: float
    steps: int
