"""What the ranks left behind, put together again.

The judge never asks an implementation for a whole tensor: it assembles the pieces that the ranks
hold and checks on the way that every element is owned exactly once per replica, that shapes agree
and that no name was lost, renamed or invented.

:class:`Evidence` holds the tensors and lives as long as a case; its :class:`Figures` are what is
left when they are gone: digests, norms, comparisons, calls and losses.  Checks measure the first
and decide from the second, so that a stored run is judged by the code that judged it when it ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardproof import tensor_bytes
from shardproof.case import DATA_AXES, Case
from shardproof.schedules import Schedule


@dataclass
class Assembled:
    """All copies of one kind of state at one moment: ``tensors[name][replica]``."""

    tensors: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    owners: dict[str, list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def replica(self, name: str, replica: int = 0) -> Tensor:
        """The assembled tensor ``name`` of one replica."""
        return self.tensors[name][replica]

    def first(self) -> dict[str, Tensor]:
        """One copy of every tensor: that of the lowest replica."""
        return {name: copies[min(copies)] for name, copies in self.tensors.items()}


def assemble(per_rank: Mapping[int, Iterable[Mapping[str, Any]]]) -> Assembled:
    """Put pieces of all ranks together (``per_rank[rank]`` lists that rank's pieces)."""
    result = Assembled()
    parts: dict[tuple[str, int], list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
    for rank, pieces in per_rank.items():
        for piece in pieces:
            parts[piece["name"], int(piece["replica"])].append((rank, piece))
            owners = result.owners.setdefault(piece["name"], [])
            if rank not in owners:
                owners.append(rank)
    for (name, replica), found in sorted(parts.items(), key=lambda item: item[0][1]):
        first = result.tensors.get(name, {}).get(0)
        tensor = _merge(name, replica, found, result.problems, first)
        if tensor is not None:
            result.tensors.setdefault(name, {})[replica] = tensor
    return result


def _merge(
    name: str,
    replica: int,
    found: list[tuple[int, Mapping[str, Any]]],
    problems: list[str],
    first: Tensor | None,
) -> Tensor | None:
    """The tensor that the pieces ``found`` make; an incomplete copy is filled up from ``first``."""
    shape = tuple(found[0][1]["global_shape"])
    where = f"{name!r} (replica {replica})"
    if any(tuple(piece["global_shape"]) != shape for _, piece in found):
        shapes = {rank: tuple(piece["global_shape"]) for rank, piece in found}
        problems.append(f"{where}: ranks disagree on the global shape: {shapes}")
        return None
    if len(found) == 1 and tuple(found[0][1]["tensor"].shape) == shape:
        return found[0][1]["tensor"]
    full = torch.zeros(shape, dtype=found[0][1]["tensor"].dtype)
    count = torch.zeros(shape, dtype=torch.int16)
    for rank, piece in found:
        tensor = piece["tensor"]
        target, tally, expected = _region(full, count, piece)
        if target is None:
            problems.append(f"{where}: rank {rank} claims {expected}, outside shape {shape}")
            return None
        if tuple(tensor.shape) != tuple(target.shape):
            problems.append(
                f"{where}: rank {rank} holds shape {tuple(tensor.shape)} for {expected}, "
                f"which has shape {tuple(target.shape)}"
            )
            return None
        target.copy_(tensor)
        tally.add_(1)
    if first is not None and any(piece.get("incomplete") for _, piece in found):
        full = torch.where(count > 0, full, first.to(full.dtype))
        count.clamp_(min=1)
    if full.numel() and (int(count.min()) != 1 or int(count.max()) != 1):
        missing, double = int((count == 0).sum()), int((count > 1).sum())
        ranks = sorted({rank for rank, _ in found})
        if missing:
            problems.append(f"{where}: {missing} of {full.numel()} elements owned by no rank")
        if double:
            problems.append(f"{where}: {double} elements owned more than once, by ranks {ranks}")
        return None
    return full


def _region(full: Tensor, count: Tensor, piece: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """Views of the part of ``full`` and ``count`` that ``piece`` covers (None: out of range)."""
    if piece.get("flat_range") is not None:
        start, stop = piece["flat_range"]
        text = f"flat range {start}:{stop}"
        if not 0 <= start <= stop <= full.numel():
            return None, None, text
        return full.view(-1)[start:stop], count.view(-1)[start:stop], text
    bounds = piece["slices"] if piece.get("slices") is not None else [(0, n) for n in full.shape]
    text = "[" + ", ".join(f"{start}:{stop}" for start, stop in bounds) + "]"
    inside = len(bounds) == full.dim() and all(
        0 <= a <= b <= n for (a, b), n in zip(bounds, full.shape, strict=True)
    )
    if not inside:
        return None, None, text
    index = tuple(slice(start, stop) for start, stop in bounds)
    return full[index], count[index], text


Row = dict[str, Any]


class Figures(ABC):
    """What a verdict is made of, as plain data: the case and everything but the tensors."""

    def __init__(
        self,
        case: Case,
        records: list[dict[str, Any]],
        oracle: Mapping[str, Any],
        workload: Mapping[str, Any],
        facts: Mapping[str, Any],
        compared: dict[str, list[Row]] | None = None,
        schedules: Mapping[int, Schedule] | None = None,
    ) -> None:
        self.case = case
        self.records = records
        self.oracle = oracle
        #: Facts of the workload: ``zero_gradient``, ``parameter_names``, ``traits``.
        self.workload = workload
        #: Numbers that formulas may use, from model shapes and options only.
        self.facts = facts
        #: Check -> what it measured, a row per comparison (see :mod:`shardproof.checks`).
        self.compared = compared if compared is not None else {}
        #: What a pipeline claimed before its ranks were started, by micro-batches of a window.
        self.schedules: Mapping[int, Schedule] = schedules or {}
        self.capabilities: Mapping[str, Any] = records[0]["capabilities"]

    @property
    def steps(self) -> range:
        """Numbers of the steps that were run."""
        return range(self.case.steps)

    @property
    @abstractmethod
    def tensors(self) -> list[Row]:
        """A row per moment, kind, name and replica; see :func:`describe`."""

    def has(self, step: int, point: str) -> bool:
        """Whether every rank observed ``point`` in ``step``."""
        return all(point in record["steps"][step]["observed"] for record in self.records)

    @cached_property
    def data_coordinate(self) -> dict[int, int]:
        """Global rank -> index of its data coordinate (data axes in mesh order)."""
        result = {}
        for record in self.records:
            index = 0
            for axis, size in self.case.mesh.items():
                if axis in DATA_AXES:
                    index = index * size + record["coordinate"].get(axis, 0)
            result[record["rank"]] = index
        return result

    @cached_property
    def loss_shares(self) -> list[list[float | None]]:
        """``loss_shares[step][rank]``: the loss that each rank reported, ``None`` if none."""
        return [[record["steps"][s]["loss"] for record in self.records] for s in self.steps]


class StoredFigures(Figures):
    """Figures as they were read back."""

    def __init__(self, *arguments: Any, tensors: list[Row], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tensors = tensors

    @property
    def tensors(self) -> list[Row]:
        """A row per moment, kind, name and replica."""
        return self._tensors


class Evidence(Figures):
    """Everything a check may look at: the case, the ranks' records and the oracle."""

    def __init__(
        self,
        case: Case,
        records: list[dict[str, Any]],
        oracle: dict[str, Any],
        workload: Mapping[str, Any],
        facts: Mapping[str, Any],
        schedules: Mapping[int, Schedule] | None = None,
    ) -> None:
        super().__init__(case, records, oracle, workload, facts, schedules=schedules)
        self._assembled: dict[tuple[int, str, str], Assembled] = {}
        #: The second run of a relation, or what went wrong in it; ``unrelated``: why there is none.
        self.derived_run: Evidence | str | None = None
        self.no_derived_run_because = ""

    def initial(self, kind: str) -> Assembled:
        """State of ``kind`` right after ``setup``."""
        return self._assemble(-1, "initial", kind)

    def observed(self, step: int, point: str, kind: str) -> Assembled:
        """State of ``kind`` at an observation point of ``step``."""
        return self._assemble(step, point, kind)

    def final(self, kind: str) -> Assembled:
        """State of ``kind`` after the last step and ``drain`` (systems judged by a replay)."""
        return assemble({r["rank"]: r.get("final", {}).get(kind, ()) for r in self.records})

    def moments(self) -> Iterator[tuple[int, str, str]]:
        """``(step, point, kind)`` of everything that some rank observed, in program order."""
        for kind in _kinds(record["initial"] for record in self.records):
            yield -1, "initial", kind
        for step in self.steps:
            told = [record["steps"][step]["observed"] for record in self.records]
            for point in dict.fromkeys(point for points in told for point in points):
                for kind in _kinds(points.get(point, {}) for points in told):
                    yield step, point, kind

    @cached_property
    def tensors(self) -> list[Row]:
        """A row per moment, kind, name and replica; see :func:`describe`."""
        rows: list[Row] = []
        norms: dict[str, tuple[float, float]] = {}
        for step, point, kind in self.moments():
            if not all(self._holds(record, step, point) for record in self.records):
                continue
            state = self._assemble(step, point, kind)
            for name, copies in state.tensors.items():
                first: Tensor | None = None
                for replica in sorted(copies):
                    row = describe(copies[replica], first, rows[-1] if first is not None else {})
                    first = copies[replica] if first is None else first
                    if row["digest"] not in norms:
                        norms[row["digest"]] = sizes(copies[replica])
                    norm, largest = norms[row["digest"]]
                    place = {"step": step, "point": point, "kind": kind, "name": name}
                    ranks = state.owners.get(name, [])
                    more = {"replica": replica, "owners": ranks, "norm": norm, "largest": largest}
                    rows.append(place | more | row)
        return rows

    @staticmethod
    def _holds(record: Mapping[str, Any], step: int, point: str) -> bool:
        return step < 0 or point in record["steps"][step]["observed"]

    def _assemble(self, step: int, point: str, kind: str) -> Assembled:
        key = (step, point, kind)
        if key not in self._assembled:
            per_rank = {
                record["rank"]: (
                    record["initial"] if step < 0 else record["steps"][step]["observed"][point]
                ).get(kind, ())
                for record in self.records
            }
            self._assembled[key] = assemble(per_rank)
        return self._assembled[key]


def _kinds(states: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(kind for state in states for kind in state))


def describe(tensor: Tensor, first: Tensor | None, before: Mapping[str, Any]) -> Row:
    """Digest (SHA-256 of the bytes), shape and dtype of one copy; ``differs``: how many elements
    are not those of ``first``, the lowest replica's copy (0 if it is that copy; -0 equals 0, NaN
    equals NaN). ``before`` is the row above, of the same tensor.
    """
    digest = tensor_bytes.digest(tensor)
    differs = 0
    if first is not None and not (digest == before["digest"] and before["differs"] == 0):
        if first.shape != tensor.shape or first.dtype != tensor.dtype:
            differs = max(1, tensor.numel())
        elif not torch.equal(tensor, first):
            differs = int((~((tensor == first) | (tensor.isnan() & first.isnan()))).sum())
    return {
        "digest": digest,
        "shape": list(tensor.shape),
        "dtype": tensor_bytes.dtype_name(tensor),
        "differs": differs,
    }


def sizes(tensor: Tensor) -> tuple[float, float]:
    """Frobenius norm and largest magnitude, both in fp64 (0 for an empty tensor)."""
    if not tensor.numel():
        return 0.0, 0.0
    wide = tensor.detach().to(torch.float64)
    return float(torch.linalg.vector_norm(wide)), float(wide.abs().max())
