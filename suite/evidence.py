"""What the ranks left behind, put together again.

The judge never asks an implementation for a whole tensor: it assembles the pieces that the ranks
hold and checks on the way that every element is owned exactly once per replica, that shapes agree
and that no name was lost, renamed or invented.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from suite.case import DATA_AXES, Case


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
    for (name, replica), found in parts.items():
        tensor = _merge(name, replica, found, result.problems)
        if tensor is not None:
            result.tensors.setdefault(name, {})[replica] = tensor
    return result


def _merge(
    name: str, replica: int, found: list[tuple[int, Mapping[str, Any]]], problems: list[str]
) -> Tensor | None:
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
    """Views of the part of ``full`` and ``count`` that ``piece`` covers (``None``: out of range)."""
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


class Evidence:
    """Everything a check may look at: the case, the ranks' records and the oracle."""

    def __init__(
        self,
        case: Case,
        records: list[dict[str, Any]],
        oracle: dict[str, Any],
        workload: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        self.case = case
        self.records = records
        self.oracle = oracle
        #: Facts of the workload: ``zero_gradient``, ``parameter_names``, ``traits``.
        self.workload = workload
        #: Numbers that formulas may use, from model shapes and options only.
        self.facts = facts
        self.capabilities: Mapping[str, Any] = records[0]["capabilities"]
        self._assembled: dict[tuple[int, str, str], Assembled] = {}

    @property
    def steps(self) -> range:
        """Numbers of the steps that were run."""
        return range(self.case.steps)

    def initial(self, kind: str) -> Assembled:
        """State of ``kind`` right after ``setup``."""
        return self._assemble(-1, "initial", kind)

    def observed(self, step: int, point: str, kind: str) -> Assembled:
        """State of ``kind`` at an observation point of ``step``."""
        return self._assemble(step, point, kind)

    def has(self, step: int, point: str) -> bool:
        """Whether every rank observed ``point`` in ``step``."""
        return all(point in record["steps"][step]["observed"] for record in self.records)

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
