"""A cell of a scenario's matrix: one value of each axis; and whether a rule matches it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from shardproof.scenarios import schema

#: The outermost first: the order of the cases.
AXES = (
    *("workload", "implementation", "backend", "mesh"),
    *("optimizer", "clip", "lane", "precision", "fault", "checkpoint"),
)


@dataclass(frozen=True)
class Cell:
    """One value of each axis."""

    implementation: schema.ImplementationChoice
    backend: str
    mesh: tuple[tuple[str, int], ...]
    optimizer: schema.OptimizerChoice | None
    clip: float | None
    lane: str
    precision: schema.PrecisionChoice | None
    workload: schema.WorkloadChoice | None
    fault: schema.FaultPlan | None = None
    checkpoint: schema.CheckpointPlan | None = None
    tier: str | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.mesh)

    @property
    def system(self) -> str:
        label = self.implementation.label
        return self.implementation.name + (f"+{label}" if label else "")

    @cached_property
    def key(self) -> tuple[str, ...]:
        """What distinguishes cells; the middle of the id."""
        variant = f"[{self.workload.label}]" if self.workload else ""
        variant += f"[{self.fault.name}]" if self.fault else ""
        variant += f"[{self.checkpoint.label}]" if self.checkpoint else ""
        optimizer = "none"
        if self.optimizer is not None:
            optimizer = self.optimizer.label or self.optimizer.name
        clip = "noclip" if self.clip is None else f"clip{self.clip:g}"
        return (
            variant,
            self.system,
            self.backend,
            mesh_name(self.mesh),
            optimizer,
            clip,
            self.lane + (f"-{self.precision.label}" if self.precision else ""),
        )


def mesh_name(mesh: Iterable[tuple[str, int]]) -> str:
    """``replicate4``, ``shard2xtensor2``."""
    return "x".join(f"{axis}{size}" for axis, size in mesh)


def matches(rule: schema.Match, cell: Cell) -> bool:
    """Whether every key that ``rule`` gives holds for ``cell``."""
    label = cell.implementation.label or ""
    words = {
        "implementation": (cell.implementation.name, cell.system),
        "label": (label,),
        "backend": (cell.backend,),
        "mesh": (mesh_name(cell.mesh),),
        "workload": (cell.workload.label if cell.workload else "",),
        "optimizer": (cell.key[4],),
        "lane": (cell.lane,),
        "precision": (cell.precision.label if cell.precision else "",),
        "fault": (cell.fault.name if cell.fault else "",),
        "checkpoint": (cell.checkpoint.label if cell.checkpoint else "",),
    }
    for key, names in words.items():
        patterns = getattr(rule, key)
        if patterns and not any(
            fnmatchcase(name, pattern) for name in names for pattern in patterns
        ):
            return False
    if rule.world and cell.world not in rule.world:
        return False
    return not rule.clip or cell.clip in rule.clip
