"""The records of a case's ranks, and the measurements of the leader: the rows of the evidence.

Names of fields are those of the stored files: docs/evidence.md tells each.  ``to_dict`` gives the
stored form, ``from_dict`` reads it again; a field that it lacks and that has no default raises
:class:`TypeError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from shardproof.contract import Event
from shardproof.evidence.held import Held
from shardproof.files import Form, SparselyStored, Stored
from shardproof.ledgers.memory.summary import MemoryRow
from shardproof.ledgers.program_order import Done
from shardproof.ledgers.traffic import LoggedCall
from shardproof.oracle.exactness import Budget
from shardproof.oracle.truth import Truth, TruthStep
from shardproof.registry.declaration import Declaration

#: Pieces of a rank by kind of state.
Pieces = Mapping[str, Annotated[Held, Form(Held.from_dict, Held.to_dict)]]
#: Number, kind and name of an entry of the program-order log.
LoggedEvent = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """SHA-256 of a tensor's bytes, its shape and its dtype."""

    digest: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of the batch of ``step`` on one rank, and the kinds of state it changed.

    ``share``: the data coordinate; ``loss`` is ``None`` where a rank does not know it.  ``retold``:
    kinds of which the rank tells more or fewer elements since, with the same values.
    """

    step: int
    share: int | None
    loss: float | None
    changed: list[str]
    retold: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded(Stored):
    """The state that a rank loaded before its first step, apart from its pieces.

    ``step``: number of that step; ``extra``: what ``load`` returned; ``before``: digests of
    generators after ``setup``; ``parted``: names that were one parameter until the load.
    """

    step: int
    extra: Mapping[str, Any]
    before: Mapping[str, str]
    parted: list[list[str]]


#: Kind of state -> the point at which its sizes are compared.
SHOWN_AT: Mapping[str, str] = {
    "parameters": "after_update",
    "gradients": "gradients_final",
    "optimizer": "after_update",
}


@dataclass(slots=True)
class StepRecord(Stored):
    """One step of one rank.

    ``present``: it was a member.  ``share``: the number of its data coordinate, ``None`` without
    data.  ``windows``: micro-batches of each window.  ``outputs``: dtypes that losses were taken
    of.  ``observed``: pieces by observation point and kind, which the account leaves out.
    ``held``: elements by point, kind and name.  ``places``: where the pieces of each parameter lie
    after the last update, as a digest.  ``calls``, ``events``: the step's range in
    :attr:`RankRecord.traffic`, and that of its event numbers.  ``draws``, ``samples``: digests of
    generators after the step, by name, and the ids of its samples, in cases that save; these also
    where members change.  ``attempt``: of a step that a member died in, how it ended on this rank
    before it was taken again: ``died``, ``stopped``, ``committed``, or ``lived`` (it was to die).
    ``attended``: floating-point operations of attention; ``None``: not counted.
    """

    step: int
    share: int | None
    loss: float | None
    norm: float | None
    present: bool = True
    windows: Sequence[int] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    observed: Mapping[str, Pieces] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    calls: Sequence[int] = (0, 0)
    events: Sequence[int] = (0, 0)
    draws: Mapping[str, str] = field(default_factory=dict)
    samples: Sequence[int] = ()
    attempt: str = ""
    attended: int | None = None

    @property
    def skipped(self) -> bool:
        """Whether the update was left out, because gradients overflowed."""
        return bool(self.metrics.get("skipped"))

    def shown(self) -> dict[str, Mapping[str, int]]:
        """Kind of state -> name -> elements of the pieces, at the point where they are compared."""
        return {
            kind: self.held[point][kind]
            for kind, point in SHOWN_AT.items()
            if kind in self.held.get(point, {})
        }


@dataclass(frozen=True, slots=True)
class Drawn(Stored):
    """Samples of ``epoch`` that a sampler gave a rank, in order (workload ``epochs``).

    ``asked``: ``whole`` (a run that nothing interrupts), ``again`` (a second time), ``seed`` (of
    another seed), ``leg`` (what was trained on in the leg) and ``before`` (before the epoch that it
    stops in), ``ahead`` (what a loader had read by then).  ``state``: what the sampler told at the
    stop, as JSON.  ``moved``: the global generators that drawing moved on.
    """

    asked: str
    epoch: int
    samples: list[int]
    state: str = ""
    moved: str = ""


@dataclass(frozen=True, slots=True)
class Voted(Stored):
    """The answer to a rank in vote ``step`` of a script (workload ``votes``): whether training is
    over, the step of the best checkpoint so far, and the metric over all data.
    """

    script: int
    step: int
    ends: bool
    best: int | None
    metric: float


@dataclass
class RankRecord(Stored):
    """The actions and state of one rank in one case.

    ``cores``: how many it could run on.  ``initial``: pieces after ``setup``; ``final``: after the
    last step, of systems that are judged by a replay.  ``history``: its updates, of systems without
    a common step.  ``unmatched``: pieces that lie in no storage of the rank.  ``full_state``:
    parameters as the system gathers them; ``None``, as no ``evaluations``: refused, or not asked.
    ``calls``: the calls that it judged, of workload ``calls``; ``drawn``: what its sampler gave, of
    workload ``epochs``; ``voted``: of workload ``votes``; the account leaves all three out.
    ``loaded``: of a run that goes on from a checkpoint.  ``node``: the number of the node that it
    ran on; ``None``: there are no nodes.  ``stands_for``: the ranks that did the same, itself among
    them, where not every rank of the world ran; empty: itself alone.  ``seal``: that of the case
    that it was given.
    """

    rank: int
    cores: int
    declaration: Declaration
    coordinate: Mapping[str, int] = field(default_factory=dict)
    initial: Pieces = field(default_factory=dict)
    final: Pieces = field(default_factory=dict)
    history: list[Event] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    traffic: list[LoggedCall] = field(default_factory=list)
    events: list[LoggedEvent] = field(default_factory=list)
    actions: list[Done] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    full_state: Mapping[str, TensorDigest] | None = None
    calls: list[Compared] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    voted: list[Voted] = field(default_factory=list)
    loaded: Loaded | None = None
    node: int | None = None
    stands_for: tuple[int, ...] = ()
    seal: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this record speaks for."""
        return self.stands_for or (self.rank,)

    def calls_of(self, step: int) -> list[LoggedCall]:
        """The calls that the rank made in ``step``."""
        start, stop = self.steps[step].calls
        return self.traffic[start:stop]

    def events_of(self, step: int) -> list[LoggedEvent]:
        """The entries of the program-order log that were made in ``step``."""
        first, last = self.steps[step].events
        return [event for event in self.events if first <= event[0] < last]

    @property
    def told_state(self) -> str:
        """The state that its sampler reported at the end of the leg, as JSON; empty: nothing was
        stopped.
        """
        return next((drawn.state for drawn in self.drawn if drawn.state), "")

    def held(self) -> Iterator[Held]:
        """All that was seen of the rank's state, in program order."""
        moments = [self.initial, *(m for s in self.steps for m in s.observed.values()), self.final]
        return (held for kinds in moments for held in kinds.values())

    def without_tensors(self) -> RankRecord:
        """This record without tensors: observation points stay, what was held there goes."""
        steps = [
            replace(step, observed={point: {} for point in step.observed}) for step in self.steps
        ]
        return replace(self, initial={}, final={}, steps=steps, calls=[], drawn=[], voted=[])

    def to_dict(self) -> dict[str, Any]:
        """The stored form, in which the declaration is called ``capabilities``."""
        data = Stored.to_dict(self)
        if not self.stands_for:
            del data["stands_for"]
        return data | {"capabilities": data.pop("declaration")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankRecord:
        """The record that :meth:`to_dict` described."""
        fields = {**data}
        fields["declaration"] = fields.pop("capabilities")
        return super().from_dict(fields)


@dataclass(frozen=True, slots=True)
class TensorRow(Stored):
    """One copy of one tensor at one moment; ``step`` -1 is the moment after ``setup``.

    ``differs``: elements that are not those of the lowest replica's copy (-0 equals 0, NaN equals
    NaN).  ``norm``, ``largest``: Frobenius norm and largest magnitude, in fp64.
    """

    step: int
    point: str
    kind: str
    name: str
    replica: int
    owners: list[int]
    norm: float
    largest: float
    digest: str
    shape: list[int]
    dtype: str
    differs: int


@dataclass(frozen=True, slots=True)
class ComparisonRow(Stored):
    """One comparison of a check: ``error`` against ``bound``.

    ``tested`` is ``False`` where a spoilt copy passed.  Alone in a row stand ``problem`` (nothing
    could be compared, as a sentence), ``skip`` (there is nothing to compare, and why) and ``broke``
    (the check raised an error); but a judged call's problem has its place beside it.
    """

    step: int = 0
    phase: str = ""
    name: str = ""
    owner: str = ""
    error: float | None = None
    bound: float | None = None
    tested: bool = True
    problem: str = ""
    skip: str = ""
    broke: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The stored form: what is not set is left out."""
        place = {"step": self.step, "phase": self.phase, "name": self.name}
        numbers = {"owner": self.owner, "error": self.error, "bound": self.bound}
        if self.problem and self.owner:
            return place | numbers | {"problem": self.problem}
        for name in ("problem", "skip", "broke"):
            if getattr(self, name):
                return {name: getattr(self, name)}
        return place | (numbers if self.tested else {"tested": False})


#: A row as records keep it.
Compared = Annotated[ComparisonRow, Form(write=ComparisonRow.to_dict)]


@dataclass(frozen=True, slots=True)
class WorkloadFacts(Stored):
    """The facts about the workload that checks need.

    ``zero_gradient``: regions of parameters whose true gradient is 0, one ``(start, stop)`` per
    dimension.  ``widest``: the widest dtype that the model computes in.  ``beside_loss``: a
    parameter whose gradient holds more than that of the loss.
    """

    zero_gradient: Mapping[str, list[tuple[tuple[int, int], ...]]]
    parameter_names: Sequence[str]
    trainable_names: Sequence[str]
    unused_possible: bool
    traits: Sequence[str]
    widest: str = "float64"
    beside_loss: str = ""

    @property
    def frozen(self) -> set[str]:
        """Parameters that are not trained."""
        return {*self.parameter_names} - {*self.trainable_names}


@dataclass(frozen=True, slots=True)
class OracleStep:
    """Loss and norm of one step of the oracle, its loss scale, and whether it overflowed.

    ``norms``: the Frobenius norms of its tensors, by phase of the comparison and name.  Where data
    coordinates train alone, ``apart`` has the step of each; ``met``: it ended in a meeting;
    ``parted``: after it their parameters differ.
    """

    loss: float
    norm: float
    scale: float | None
    skipped: bool
    norms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    apart: Sequence[OracleStep] = ()
    met: bool = False
    parted: bool = False

    @classmethod
    def of(cls, step: TruthStep) -> OracleStep:
        """The facts of ``step``."""
        numbers = (step.loss, float(step.norm), step.scale, step.skipped, step.norms())
        apart = [cls.of(one) for one in step.apart]
        return cls(*numbers, apart=apart, met=step.met, parted=step.parted)

    def of_share(self, share: int | None) -> OracleStep:
        """The step of one data coordinate, or of all together."""
        return self.apart[share] if self.apart and share is not None else self


@dataclass(frozen=True)
class OracleFacts(SparselyStored):
    """The stored part of the oracle (:class:`shardproof.oracle.truth.Truth`), without its
    tensors.
    """

    steps: Sequence[OracleStep] = ()
    budget: Budget | None = None
    problem: str | None = None
    updates: int | None = None
    stale: int | None = None
    behind: int | None = None

    @classmethod
    def of(cls, truth: Truth) -> OracleFacts:
        """The facts of ``truth``."""
        steps = [OracleStep.of(step) for step in truth.steps]
        return cls(steps, truth.budget, truth.problem, truth.updates, truth.stale, truth.behind)

    def diverges(self) -> str:
        """The first of its numbers that is infinite or NaN, as a sentence; empty: none is.

        No comparison with such a number can fail: NaN beside NaN is equal bits.  Buffers are not
        asked: one may be a mask of infinities.
        """
        steps = [(n, one) for n, step in enumerate(self.steps) for one in step.apart or (step,)]
        for number, step in steps:
            norms = ((phase, *one) for phase, own in step.norms.items() for one in own.items())
            for phase, name, _ in (each for each in norms if not math.isfinite(each[2])):
                place = f"{name!r} at step {number} ({phase})"
                what = f"{place} is not finite"
                return f"the oracle itself diverges: {what}"
            if not math.isfinite(step.loss) and not step.skipped:
                return f"the oracle itself diverges: its loss at step {number} is {step.loss}"
        return ""
