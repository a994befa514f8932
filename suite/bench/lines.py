"""The lines of ``cases.jsonl`` about times: what was measured, and what is judged from it.

A line is read by :func:`pairs` and :func:`cells` (or ``model_validate``) and written by
``to_dict``.  Loads neither torch nor scipy: reports and comparisons read lines, too.  ``a`` and
``b`` are sides of a comparison; ``plain``, ``wrapped`` and ``ranks`` those of a scaling cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import Field

from shardproof.bench.model.alpha_beta import Machine
from shardproof.bench.model.step_time import Scorecard
from shardproof.bench.ratios import Estimate
from shardproof.bench.subjects import Call, Cell, Pair, Room
from shardproof.errors import Problem, SelectionError
from shardproof.runs.run_folder import Run


class StoredModel(pydantic.BaseModel):
    """Part of a line of ``cases.jsonl``: a field that was neither given nor read is not written,
    and what other versions wrote besides is passed over.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; ``model_validate`` reads it."""
        return self.model_dump(exclude_unset=True)


class NoFigures(StoredModel):
    """Why there are no figures, where they would stand."""

    problem: str


#: A loss that is not finite is stored as text.
Losses = dict[str, list[float]]


class Interval(StoredModel):
    """A ratio with its 95 % interval; ``half_width`` as a share."""

    ratio: float
    low: float
    high: float
    half_width: float


class Twin(Interval):
    """A compared with its own twin; ``blocks_needed`` give a half-width of 5 %."""

    sd: float
    blocks: int
    blocks_needed: int

    @property
    def differs(self) -> bool:
        """Whether A differs from itself: an alarm of the machine."""
        return self.low > 1 or self.high < 1


class PairFigures(Interval):
    """A over B, from at least 2 whole blocks; 1.1 says that A takes 10 % longer.

    ``margin``: differences below it do not matter; ``smallest_effect``: what so many blocks find.
    ``launches_differ_p``: where it is below 0.01 the interval is too narrow.
    """

    sd: float
    launches: int
    p: float | None
    p_exact: bool
    margin: float
    smallest_effect: float
    aa: Twin | None
    median_seconds: dict[str, float]
    launches_differ_p: float | None
    log: Estimate


class Efficiency(Interval):
    """An efficiency, and the estimate of its logarithm."""

    log: Estimate


class InReport(StoredModel):
    """The verdict of a comparison among all others of a report (Holm)."""

    p: float
    p_holm: float
    verdict: str


class GpuFigures(StoredModel):
    """A GPU while ranks ran: means, and the most memory; ``None``: see ``missing``."""

    gpu: int
    name: str | None
    utilisation_percent: float | None
    memory_busy_percent: float | None
    memory_used_bytes: float | None
    missing: dict[str, str]


class Summary(StoredModel):
    """The telemetry of ranks and GPUs; ``resident_bytes`` are the most."""

    samples: int
    resident_bytes: int | None
    gpus: list[GpuFigures]
    problem: str | None


class SideSummary(StoredModel):
    """Of a side that ran alone, on its worst rank: bytes that became resident, and figures of
    torch's allocator on a GPU.
    """

    resident_bytes: int
    allocator: dict[str, int] | None


class Telemetry(StoredModel):
    """Of launches, and of each side alone; ``no_gpu`` is why there are no figures of GPUs."""

    launches: Summary | None
    sides: dict[str, SideSummary | NoFigures] = Field(default_factory=dict)
    no_gpu: str | None = None


class Memory(StoredModel):
    """Peak bytes of a step of each side on its worst rank: exact (``ledger``) or advisory.

    ``device`` and ``host``: by side, the most in either memory where a side uses host memory.
    """

    kind: Literal["ledger", "resident"]
    a: int
    b: int
    ratio: float
    device: dict[str, int] | None = None
    host: dict[str, int] | None = None


class Sent(StoredModel):
    """Bytes that a step of each side sends on the rank that sends most, by the traffic ledger."""

    a: int
    b: int


class Counted(StoredModel):
    """A figure of saves and loads that was counted: ``what`` is ``ratio``, at most ``limit`` (none:
    nothing is asked of it); ``bytes`` are those above and below the line.
    """

    what: str
    ratio: float
    bytes: tuple[int, int]
    limit: float | None = None

    @property
    def missed(self) -> bool:
        """Whether it is above its limit."""
        return self.limit is not None and self.ratio > self.limit


class ProbedStep(StoredModel):
    """A step of the slowest rank: seconds ``alone``, without traffic, and what it sends and does;
    ``elements`` are those that are trained.
    """

    alone: float
    calls: list[Call]
    flops: int
    elements: int


class SideProbes(ProbedStep):
    """A side's step, and seconds of it with traffic."""

    together: float


class Probes(StoredModel):
    """The machine as all ranks found it at once, and what a rank had of it."""

    machine: Machine
    cores_per_rank: int | None
    threads: int


class PairProbes(StoredModel):
    """The input of both scorecards; no ``machine`` where neither side can be scored."""

    sides: Mapping[str, SideProbes | NoFigures]
    machine: Machine | None = None
    cores_per_rank: int | None = None
    threads: int = 1

    @property
    def probes(self) -> Probes:
        """The machine, which was probed if a side can be scored.

        :raises ValueError: it was not.
        """
        return Probes.model_validate(dict(self))


class CellProbes(Probes, ProbedStep):
    """The probes of ``world`` ranks: seconds to the gradients by samples of a rank, those of the
    ``update`` after, and the step of a rank with its share of the batch. ``nodes``: over how many,
    of ``ranks_per_node`` consecutive ranks each (0: unknown). ``schedule``: of their pipeline
    (``None``: there is none, or it is unknown).
    """

    world: int
    nodes: int = 1
    ranks_per_node: int = 0
    schedule: dict[str, Any] | None = None
    gradients: dict[int, float]
    update: float


class Modelled(StoredModel):
    """A modelled efficiency, or the ``problem``; with the parts of its prediction."""

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")

    world: int
    efficiency: float | None
    problem: str = ""


class Line(StoredModel):
    """The fields that all lines about times have in common.

    ``problem`` is (verdict, reason) of what broke; ``losses`` are those of the first steps by side;
    ``times`` is the file of raw times.
    """

    id: str
    seconds: float = 0.0
    problem: tuple[str, str] | None = None
    losses: Losses = Field(default_factory=dict)
    targets_per_step: dict[str, int] = Field(default_factory=dict)
    times: str | None = None


class Judgement(StoredModel):
    """The figures judged from raw times; ``trained_alike`` is ``None`` where it is unknown."""

    verdict: str
    reason: str = ""
    blocks: int = 0
    trained_alike: bool | None = True


class MeasuredPair(Line):
    """A comparison before it is judged, as it is stored."""

    pair: Pair
    meshes: dict[str, dict[str, int]] = Field(default_factory=dict)
    memory: Memory | NoFigures | None = None
    sent: Sent | NoFigures | None = None
    strategies: dict[str, str] = Field(default_factory=dict)
    telemetry: Telemetry | None = None
    probed: PairProbes | NoFigures | None = None
    threads: int = 1
    cores: list[list[int]] = Field(default_factory=list)
    segment_steps: list[int] = Field(default_factory=list)
    counted: list[Counted] = Field(default_factory=list)

    @pydantic.field_serializer("pair")
    def _pair(self, pair: Pair) -> dict[str, Any]:
        return pair.to_dict()


class JudgedPair(Judgement):
    """Verdict and figures of a comparison; ``figures`` stand in the line itself."""

    figures: PairFigures | None = None
    scorecard: dict[str, Scorecard | NoFigures] | None = None
    goal_met: bool | None = None
    targets_per_second: dict[str, float] = Field(default_factory=dict)
    samples_per_second: dict[str, float] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_figures(cls, line: Any) -> Any:
        is_stored = isinstance(line, Mapping) and "ratio" in line
        return {**line, "figures": line} if is_stored else line

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without a level for the figures."""
        line = super().to_dict()
        return line | (line.pop("figures", None) or {})


class PairLine(MeasuredPair, JudgedPair):
    """A comparison, judged."""

    kind: ClassVar[Literal["bench"]] = "bench"

    @property
    def missed(self) -> bool:
        """Whether a goal, or the limit of what was counted, is missed."""
        return self.goal_met is False or any(one.missed for one in self.counted)


class MeasuredCell(Line):
    """A scaling cell before it is judged; ``measured_in`` names the cell in whose launches a
    refused cell's single rank was timed.  ``crowded``: all of its ranks were, sharing cores.
    """

    mode: str
    implementation: str
    backend: str
    world: int
    target: float
    cell: Cell
    mesh: dict[str, int] = Field(default_factory=dict)
    strategy: str = ""
    room: Room | None = None
    measured_in: str | None = None
    crowded: bool = False
    peak_bytes: int | None = None
    probed: CellProbes | None = None
    segment_steps: list[dict[str, int]] = Field(default_factory=list)

    @pydantic.field_serializer("cell")
    def _cell(self, cell: Cell) -> dict[str, Any]:
        return cell.to_dict()

    @property
    def refused(self) -> bool:
        """Whether there are fewer cores or GPUs than ranks."""
        return self.room is not None and self.room.oversubscribed(self.world)

    @property
    def together(self) -> bool:
        """Whether all of its ranks were timed."""
        return self.crowded or not self.refused


class CellFigures(StoredModel):
    """Efficiencies by base, from whole blocks; ``None`` below 2 of them, and where no more than
    one rank was timed.  ``wrapping`` is the wrapped system alone over the plain program.
    """

    blocks: int
    launches: int
    median_seconds: dict[str, float]
    efficiency: dict[str, Efficiency] | None
    wrapping: Efficiency | None
    launches_differ_p: float | None


class JudgedCell(CellFigures, Judgement):
    """Verdict and figures of a scaling cell."""

    tokens_per_second: dict[str, float] = Field(default_factory=dict)
    modelled: Modelled | None = None
    scorecard: Scorecard | None = None


class CellLine(MeasuredCell, JudgedCell):
    """A scaling cell, judged."""

    kind: ClassVar[Literal["scaling"]] = "scaling"

    @property
    def missed(self) -> bool:
        """Whether the target is missed for certain."""
        return self.verdict == "below"

    @property
    def title(self) -> str:
        """The system, with its label."""
        return self.cell.title

    @property
    def modelled_efficiency(self) -> float | None:
        """The modelled efficiency; ``None``: there is none."""
        return None if self.modelled is None else self.modelled.efficiency


L = TypeVar("L", PairLine, CellLine)


def pairs(run: Run) -> list[PairLine]:
    """The comparisons of a run, in the order of timing.

    :raises SelectionError: a line that cannot be read.
    """
    return _read(PairLine, run)


def cells(run: Run) -> list[CellLine]:
    """The scaling cells of a run, in the order of timing.

    :raises SelectionError: a line that cannot be read.
    """
    return _read(CellLine, run)


def _read(kind: type[L], run: Run) -> list[L]:
    lines = []
    for line in run.others.get(kind.kind, ()):
        try:
            lines.append(kind.model_validate(line))
        except pydantic.ValidationError as error:
            fault = error.errors()[0]
            what = f"a line about times cannot be read: {fault['loc']}: {fault['msg']}"
            remedy = "run `shardproof verify` to see whether the run was changed"
            file = str(run.path / "cases.jsonl")
            raise SelectionError(Problem(what, remedy, file=file)) from None
    return lines
