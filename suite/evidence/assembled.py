"""The state that the ranks left behind, put together again.

The judge never asks an implementation for a whole tensor: it assembles the pieces that the ranks
hold and checks on the way that every element is owned exactly once per replica, that shapes agree
and that no name was lost, renamed or invented.

:class:`Evidence` holds the tensors and lives as long as a case; its :class:`Figures` are what is
left when they are gone: digests, norms, comparisons, calls and losses.  Checks measure the first
and decide from the second, so that a stored run is judged by the code that judged it when it ran.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from shardproof import tensor_bytes
from shardproof.axes import cutting, sharing
from shardproof.axes import parts as cut_into
from shardproof.case import Case
from shardproof.contract import Batch, Depth, Meeting, Piece
from shardproof.costs import CostModel, ModelFacts, cost_model_of
from shardproof.costs.expression import CaseFacts
from shardproof.costs.families import Family, family_of
from shardproof.costs.own import Answered, OwnCosts
from shardproof.evidence.held import part
from shardproof.evidence.records import (
    ComparisonRow,
    OracleFacts,
    RankRecord,
    TensorRow,
    WorkloadFacts,
)
from shardproof.files import from_plain, to_plain
from shardproof.oracle import members
from shardproof.oracle.members import StepMembers
from shardproof.oracle.truth import Truth, frobenius
from shardproof.registry.declaration import Declaration
from shardproof.schedules import Schedule
from shardproof.workloads import for_case

#: In names of slots that are no optimizer's, but kept by what reduces gradients.
KEPT = "@"


@dataclass
class Assembled:
    """All copies of one kind of state at one moment: ``tensors[name][replica]``."""

    tensors: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    owners: dict[str, list[int]] = field(default_factory=dict)
    #: The ranks that hold a piece of one copy, by name and replica.
    holders: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def first(self) -> dict[str, Tensor]:
        """One copy of every tensor: that of the lowest replica."""
        return {name: copies[min(copies)] for name, copies in self.tensors.items()}


def assemble(per_rank: Mapping[int, Iterable[Piece]]) -> Assembled:
    """Put pieces of all ranks together (``per_rank[rank]`` lists that rank's pieces)."""
    result = Assembled()
    parts: dict[tuple[str, int], list[tuple[int, Piece]]] = defaultdict(list)
    for rank, pieces in per_rank.items():
        for piece in pieces:
            parts[piece.name, piece.replica].append((rank, piece))
            if rank not in (owners := result.owners.setdefault(piece.name, [])):
                owners.append(rank)
    for (name, replica), own in sorted(parts.items(), key=lambda item: item[0][1]):
        first = result.tensors.get(name, {}).get(0)
        try:
            tensor = _merge(own, first)
        except _Unsound as error:
            result.problems += [f"{name!r} (replica {replica}): {text}" for text in error.args]
            continue
        result.tensors.setdefault(name, {})[replica] = tensor
        result.holders[name, replica] = sorted({rank for rank, _ in own})
    return result


class _Unsound(Exception):
    """Pieces make no tensor; the arguments say why, each in a sentence."""


def _merge(pieces: list[tuple[int, Piece]], first: Tensor | None) -> Tensor:
    """The tensor that ``pieces`` make; an incomplete copy is filled up from ``first``."""
    shape = tuple(pieces[0][1].global_shape)
    if len(pieces) == 1 and tuple(pieces[0][1].tensor.shape) == shape:
        return pieces[0][1].tensor
    shapes = {rank: tuple(piece.global_shape) for rank, piece in pieces}
    if any(tuple(piece.global_shape) != shape for _, piece in pieces):
        raise _Unsound(f"ranks report different global shapes: {shapes}")
    full = torch.zeros(shape, dtype=pieces[0][1].tensor.dtype)
    count = torch.zeros(shape, dtype=torch.int16)
    for rank, piece in pieces:
        expected, is_inside = _region(piece, shape)
        if not is_inside:
            raise _Unsound(f"rank {rank} reports {expected}, which is outside shape {shape}")
        target, tally = part(piece, full), part(piece, count)
        held, due = tuple(piece.tensor.shape), tuple(target.shape)
        if held != due:
            raise _Unsound(f"rank {rank}: piece {expected} must have shape {due}, not {held}")
        target.copy_(piece.tensor)
        tally.add_(1)
    if first is not None and any(piece.incomplete for _, piece in pieces):
        full = torch.where(count > 0, full, first.to(full.dtype))
        count.clamp_(min=1)
    if full.numel() and (int(count.min()) != 1 or int(count.max()) != 1):
        missing, double = int((count == 0).sum()), int((count > 1).sum())
        lost = f"{missing} of {full.numel()} elements are owned by no rank"
        twice = f"{double} elements are owned more than once, by ranks {sorted(shapes)}: number "
        twice += "copies by Piece.replica, from 0"
        raise _Unsound(*([lost] if missing else []), *([twice] if double else []))
    return full


def _region(piece: Piece, shape: tuple[int, ...]) -> tuple[str, bool]:
    """The part of a tensor of ``shape`` that ``piece`` covers, in words, and whether it
    lies in it.
    """
    if piece.flat_range is not None:
        start, stop = piece.flat_range
        return f"flat range {start}:{stop}", 0 <= start <= stop <= math.prod(shape)
    bounds = piece.slices if piece.slices is not None else [(0, n) for n in shape]
    text = ", ".join(f"{start}:{stop}" for start, stop in bounds)
    pairs = zip(bounds, shape, strict=False)
    inside = len(bounds) == len(shape) and all(0 <= a <= b <= n for (a, b), n in pairs)
    return f"[{text}]", inside


@dataclass(eq=False, repr=False)
class Figures(ABC):
    """The input of a verdict, as plain data: the case and everything but the tensors."""

    case: Case
    records: list[RankRecord]
    oracle: OracleFacts
    workload: WorkloadFacts
    #: Numbers that formulas may use, from model shapes and options only.
    facts: Mapping[str, int | Fraction]
    #: Check -> what it measured, a row per comparison (see :mod:`shardproof.checks`).
    compared: dict[str, list[ComparisonRow]] = field(default_factory=dict)
    #: What a pipeline claimed before its ranks were started, by micro-batches of a window.
    schedules: Mapping[int, Schedule] = field(default_factory=dict)
    #: What the cost model that the class brings answered, at depth ``own``.
    own_costs: OwnCosts | None = None

    @property
    def declaration(self) -> Declaration:
        """The declaration of the implementation, as the ranks saw it."""
        return self.records[0].declaration

    @property
    def ranks(self) -> dict[int, RankRecord]:
        """Every rank that a record speaks for, with that record, in rank order."""
        return dict(sorted((rank, each) for each in self.records for rank in each.ranks))

    @cached_property
    def model_facts(self) -> ModelFacts | None:
        """Shapes, modules and options that cost models ask; ``None`` in records without them."""
        if not isinstance(self.facts, CaseFacts):
            return None
        return self.facts.model_facts.after_skips(self.skipped)

    @property
    def skipped(self) -> set[int]:
        """Steps whose update every rank left out."""
        own = [{n for n, step in enumerate(r.steps) if step.skipped} for r in self.records]
        return set.intersection(*own)

    @property
    def depth(self) -> Depth:
        """How closely the system is held to its strategy: as asked for, else as it declares."""
        return self.case.depth or self.declaration.depth

    def cost_model(self, facts: ModelFacts | None = None) -> CostModel | None:
        """The system's promises to the byte (``None``: none), for ``facts`` or the case's."""
        facts = facts or self.model_facts
        if self.depth == "family" or facts is None:
            return None
        if self.depth == "own":
            return None if self.own_costs is None else Answered(facts, self.own_costs)
        return cost_model_of(self.declaration.strategy, facts)

    @property
    def family(self) -> Family | None:
        """The promises of every system of its strategy, where it is judged by no more than that."""
        if self.depth != "family":
            return None
        declared = self.declaration
        return family_of(declared.strategy, self.case.options, declared.features)

    @property
    def steps(self) -> range:
        """Numbers of the steps that were run."""
        return range(self.case.steps)

    @property
    def updated_before(self) -> int:
        """The last step before these that made an update; -1: none did."""
        return -1

    @cached_property
    def members(self) -> list[StepMembers]:
        """The members of each step, and its batch."""
        return members.of(self.case, self.declaration.batch)

    @property
    @abstractmethod
    def tensors(self) -> list[TensorRow]:
        """A row per moment, kind, name and replica."""

    def has(self, step: int, point: str) -> bool:
        """Whether every rank observed ``point`` in ``step``."""
        return all(point in record.steps[step].observed for record in self.records)

    @cached_property
    def data_coordinate(self) -> dict[int, int]:
        """Global rank -> index of its data coordinate (data axes in mesh order)."""
        result, along = {}, sharing(self.case.mesh)
        for record in self.records:
            index = 0
            for axis, size in self.case.mesh.items():
                if axis in along:
                    index = index * size + record.coordinate.get(axis, 0)
            result[record.rank] = index
        return result

    def whole_losses(
        self,
        by_rank: Mapping[int, tuple[int | None, float]],
        bound: float,
        truth: float | None = None,
    ) -> dict[int | None, float]:
        """The loss of every data coordinate, from the coordinate and the loss of each rank.

        Ranks that have other positions each tell a part; others agree up to ``bound``, relative to
        ``truth``, or to what the first one tells.

        :raises ValueError: they disagree, or a part is missing.
        """
        along = cutting("positions")
        parts: dict[tuple[int | None, int], float] = {}
        for rank, (share, loss) in by_rank.items():
            place = self.ranks[rank].coordinate.get(along, 0)
            known = parts.setdefault((share, place), loss)
            if not abs(known - loss) <= bound * abs(known if truth is None else truth):
                of = f"data coordinate {share}" + f", {along} {place}" * (along in self.case.mesh)
                message = (
                    f"ranks report different losses for {of}: {known!r}, {loss!r} on rank {rank}"
                )
                raise ValueError(message)
        shares: dict[int | None, float] = {}
        for (share, _), loss in parts.items():
            shares[share] = shares.get(share, 0.0) + loss
        every = itertools.product(shares, range(cut_into(self.case.mesh, "positions")))
        if missing := sorted(f"{share}, {along} {at}" for share, at in {*every} - {*parts}):
            raise ValueError(f"no rank reported a loss for data coordinate {missing[0]}")
        return shares

    def to_dict(self) -> dict[str, Any]:
        """The stored form, without tensors; :meth:`StoredFigures.from_dict` reads it."""
        facts, own = self.model_facts, self.own_costs
        rows = {check: [row.to_dict() for row in found] for check, found in self.compared.items()}
        return {
            "records": [record.without_tensors().to_dict() for record in self.records],
            "oracle": self.oracle.to_dict(),
            "workload": self.workload.to_dict(),
            "facts": {name: str(value) for name, value in self.facts.items()},
            "plan": None if facts is None else facts.to_dict(),
            "own_costs": None if own is None else own.to_dict(),
            "compared": rows,
            "schedules": {str(size): plan.to_dict() for size, plan in self.schedules.items()},
            "tensors": to_plain(self.tensors, list[TensorRow]),
        }


class StoredFigures(Figures):
    """Figures as they were read back."""

    def __init__(self, *arguments: Any, tensors: list[TensorRow], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tensors = tensors

    @property
    def tensors(self) -> list[TensorRow]:
        """A row per moment, kind, name and replica."""
        return self._tensors

    @classmethod
    def from_dict(cls, case: Case, data: Mapping[str, Any]) -> StoredFigures:
        """The figures of ``case`` that :meth:`Figures.to_dict` described."""
        numbers = {name: Fraction(value) for name, value in data["facts"].items()}
        plan, schedules = data["plan"], data.get("schedules", {})
        own = data.get("own_costs")
        return cls(
            case,
            [RankRecord.from_dict(record) for record in data["records"]],
            OracleFacts.from_dict(data["oracle"]),
            WorkloadFacts.from_dict(data["workload"]),
            numbers if plan is None else CaseFacts(numbers, ModelFacts.from_dict(plan)),
            compared=from_plain(dict[str, list[ComparisonRow]], data["compared"]),
            schedules={int(size): Schedule.from_dict(row) for size, row in schedules.items()},
            own_costs=None if own is None else OwnCosts.from_dict(own),
            tensors=from_plain(list[TensorRow], data["tensors"]),
        )


class Evidence(Figures):
    """Everything a check may look at: the case, the ranks' records and the oracle."""

    def __init__(
        self,
        case: Case,
        records: list[RankRecord],
        truth: Truth,
        workload: WorkloadFacts,
        facts: Mapping[str, int | Fraction],
        schedules: Mapping[int, Schedule] | None = None,
    ) -> None:
        oracle = OracleFacts.of(truth)
        super().__init__(case, records, oracle, workload, facts, schedules=schedules or {})
        #: The oracle with its tensors.
        self.truth = truth
        self._assembled: dict[tuple[int, str, str], Assembled] = {}
        #: What else was run of the case: ``relation``, ``unsaved``, ``loaded``.
        self.beside: dict[str, Beside] = {}
        #: How many checkpoints are left of a case that saved.
        self.checkpoints_left: int | None = None
        #: Records of the runs that went on where this one stopped (workload ``epochs``).
        self.later_legs: list[list[RankRecord]] = []
        #: When and how data coordinates that train alone meet.
        self.meeting: Meeting | None = None
        #: Trains an emulated oracle with gradients that are off by a round-off.
        self.train_rounded: Callable[[], Truth] | None = None

    @cached_property
    def rounded(self) -> Truth | None:
        """The emulated oracle of gradients that are off by a round-off; ``None``: there is none."""
        return self.train_rounded() if self.train_rounded else None

    @cached_property
    def trajectories(self) -> Sequence[Evidence]:
        """The state of each data coordinate with its own oracle, where they train alone.

        Elsewhere there is one trajectory, this one.
        """
        steps = self.truth.steps
        if not steps or not steps[0].apart:
            return [self]
        return [CoordinateEvidence(self, coordinate) for coordinate in range(len(steps[0].apart))]

    def shares(self, step: int) -> list[Batch]:
        """The batch of each data coordinate in ``step``."""
        workload = for_case(self.case)
        if not self.case.changes_members:
            return workload.batch(step, self.case.data_coordinates)
        now = self.members[step]
        return workload.at(now.first, now.size).batch(step, len(now.members))

    def initial(self, kind: str) -> Assembled:
        """State of ``kind`` right after ``setup``."""
        return self._assemble(-1, "initial", kind)

    def observed(self, step: int, point: str, kind: str) -> Assembled:
        """State of ``kind`` at an observation point of ``step``, less what :meth:`kept` gives."""
        state = self._assemble(step, point, kind)
        if kind != "optimizer" or not any(KEPT in name for name in state.tensors):
            return state
        shared = {name: copies for name, copies in state.tensors.items() if KEPT not in name}
        return replace(state, tensors=shared)

    def kept(self, step: int) -> dict[str, Tensor]:
        """The residuals from ``step`` to the next: optimizer slots named ``...@...``."""
        state = self._assemble(step, "after_update", "optimizer")
        return {name: tensor for name, tensor in state.first().items() if KEPT in name}

    def final(self, kind: str) -> Assembled:
        """State of ``kind`` after the last step and ``drain`` (systems judged by a replay)."""
        return assemble({record.rank: record.final.get(kind, ()) for record in self.records})

    def moments(self) -> Iterator[tuple[int, str, str]]:
        """``(step, point, kind)`` of everything that some rank observed, in program order."""
        for kind in dict.fromkeys(kind for record in self.records for kind in record.initial):
            yield -1, "initial", kind
        for step in self.steps:
            by_rank = [record.steps[step].observed for record in self.records]
            for point in dict.fromkeys(point for points in by_rank for point in points):
                kinds = (kind for points in by_rank for kind in points.get(point, ()))
                yield from ((step, point, kind) for kind in dict.fromkeys(kinds))

    @cached_property
    def tensors(self) -> list[TensorRow]:
        """A row per moment, kind, name and replica."""
        rows: list[TensorRow] = []
        digests: dict[int, str] = {}  # by id: equal copies of a rank's are one object
        norms: dict[str, tuple[float, float]] = {}
        for step, point, kind in self.moments():
            if step >= 0 and not self.has(step, point):
                continue
            state = self._assemble(step, point, kind)
            for name, copies in state.tensors.items():
                row = partial(TensorRow, step, point, kind, name)
                owners = state.owners.get(name, [])
                first: tuple[Tensor, str] | None = None
                for replica in sorted(copies):
                    tensor = copies[replica]
                    digest = digests.get(id(tensor)) or tensor_bytes.digest(tensor)
                    digests[id(tensor)] = digest
                    # Replicas are equal as a rule: each content is measured once.
                    if digest not in norms:
                        norms[digest] = sizes(tensor)
                    norm, largest = norms[digest]
                    shape, dtype = list(tensor.shape), tensor_bytes.dtype_name(tensor)
                    differs = 0 if first is None else differing(tensor, digest, *first)
                    rows.append(row(replica, owners, norm, largest, digest, shape, dtype, differs))
                    first = (tensor, digest) if first is None else first
        return rows

    def _assemble(self, step: int, point: str, kind: str) -> Assembled:
        key = (step, point, kind)
        if key not in self._assembled:
            kinds = {
                record.rank: record.initial if step < 0 else record.steps[step].observed[point]
                for record in self.records
            }
            self._assembled[key] = assemble({r: own.get(kind, ()) for r, own in kinds.items()})
        return self._assembled[key]


class Continued(Evidence):
    """Evidence of training that resumed from a checkpoint of ``base``: earlier steps are its own.

    In the place of the last of these is what was loaded.
    """

    def __init__(self, base: Evidence, *arguments: Any) -> None:
        super().__init__(*arguments)
        loaded = self.records[0].loaded
        assert loaded is not None
        self.base, self.first_step = base, loaded.step

    @property
    def steps(self) -> range:
        """Numbers of the steps that were run after the load."""
        return range(self.first_step, self.case.steps)

    @property
    def skipped(self) -> set[int]:
        """Those of the steps before the load as well."""
        return super().skipped | self.base.skipped

    @property
    def updated_before(self) -> int:
        """The part of the ranks that saved."""
        trained = self.base.records[0].steps
        before = [s for s in self.base.steps if s < self.first_step and not trained[s].skipped]
        return max(before, default=self.base.updated_before)

    def _assemble(self, step: int, point: str, kind: str) -> Assembled:
        if 0 <= step < self.first_step - 1:
            return self.base.observed(step, point, kind)
        return super()._assemble(step, point, kind)


class CoordinateEvidence(Evidence):
    """Of ``base``, the copies of one data coordinate that trains alone, and its oracle."""

    def __init__(self, base: Evidence, coordinate: int) -> None:
        own = [step.apart[coordinate] for step in base.truth.steps]
        truth = replace(base.truth, steps=own)
        records = [r for r in base.records if base.data_coordinate[r.rank] == coordinate]
        super().__init__(base.case, records, truth, base.workload, base.facts, base.schedules)
        self.base, self.coordinate, self.meeting = base, coordinate, base.meeting

    @property
    def steps(self) -> range:
        """Those of all."""
        return self.base.steps


@dataclass(frozen=True)
class Beside:
    """Another run of a case: its evidence; or what went wrong in it; or why there is none."""

    evidence: Evidence | None = None
    problem: str = ""
    skip: str = ""


def differing(tensor: Tensor, digest: str, first: Tensor, first_digest: str) -> int:
    """How many elements are not those of ``first``; -0 equals 0, NaN equals NaN."""
    if first.shape != tensor.shape or first.dtype != tensor.dtype:
        return max(1, tensor.numel())
    if digest == first_digest or torch.equal(tensor, first):
        return 0
    return int((~((tensor == first) | (tensor.isnan() & first.isnan()))).sum())


def sizes(tensor: Tensor) -> tuple[float, float]:
    """Frobenius norm and largest magnitude, both in fp64 (0 for an empty tensor)."""
    if not tensor.numel():
        return 0.0, 0.0
    return frobenius(tensor), float(tensor.detach().to(torch.float64).abs().max())
