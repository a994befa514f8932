"""A cell of a scenario's matrix: one value of each axis; and whether a rule matches it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from shardproof.case import WorkloadSpec
from shardproof.files import from_plain
from shardproof.scenarios import schema

#: The outermost first: the order of the cases.
AXES = (
    *("workload", "implementation", "backend", "mesh"),
    *("optimizer", "clip", "lane", "precision", "fault", "checkpoint"),
    "membership",
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
    checkpoint: schema.CheckpointKeys | None = None
    membership: schema.MembershipPlan | None = None
    tier: str | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.mesh)

    @property
    def system(self) -> str:
        """The implementation with the label of its options."""
        label = self.implementation.label
        return self.implementation.name + (f"+{label}" if label else "")

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The part of a cell that distinguishes it; the middle of the id."""
        variant = f"[{self.workload.label}]" if self.workload else ""
        plans = self.fault, self.checkpoint, self.membership
        variant += "".join(f"[{plan_name(plan)}]" for plan in plans if plan)
        optimizer = (self.optimizer.label or self.optimizer.name) if self.optimizer else "none"
        clip = "noclip" if self.clip is None else f"clip{self.clip:g}"
        lane = self.lane + (f"-{self.precision.label}" if self.precision else "")
        mesh = mesh_name(self.mesh)
        return variant, self.system, self.backend, mesh, optimizer, clip, lane


def workload_of(
    scenario: schema.Scenario,
    variant: schema.WorkloadChoice | None,
    size: schema.QuickSize | None = None,
) -> WorkloadSpec:
    """The scenario's workload with the changes of ``variant``, in the ``size`` of the quick tier.

    What a variant gives itself stays, and one of another name keeps its size.
    """
    values = scenario.workload.model_dump()
    changes = [size] if size and (variant is None or variant.name is None) else []
    for change in (*changes, *filter(None, [variant])):
        own = change.model_dump(exclude={"label", "expect", "steps"}, exclude_none=True)
        values |= {**own, "params": {**values["params"], **own.get("params", {})}}
    return from_plain(WorkloadSpec, values)


def plan_name(plan: Any) -> str:
    """The label of a plan of any kind; of a fault plan without one its kind; empty: no plan."""
    return (plan.label or plan.kind) if plan else ""


def mesh_name(mesh: Iterable[tuple[str, int]]) -> str:
    """``replicate4``, ``shard2xtensor2``."""
    return "x".join(f"{axis}{size}" for axis, size in mesh)


#: Key of a rule -> the names of a cell that its patterns are held against.
_NAMES: Mapping[str, Callable[[Cell], tuple[object, ...]]] = {
    "implementation": lambda cell: (cell.implementation.name, cell.system),
    "label": lambda cell: (cell.implementation.label or "",),
    "backend": lambda cell: (cell.backend,),
    "mesh": lambda cell: (mesh_name(cell.mesh),),
    "world": lambda cell: (cell.world,),
    "clip": lambda cell: (cell.clip,),
    "workload": lambda cell: (plan_name(cell.workload),),
    "optimizer": lambda cell: (cell.key[4],),
    "lane": lambda cell: (cell.lane,),
    "precision": lambda cell: (plan_name(cell.precision),),
    "fault": lambda cell: (plan_name(cell.fault),),
    "checkpoint": lambda cell: (plan_name(cell.checkpoint),),
    "membership": lambda cell: (plan_name(cell.membership),),
}


def matches(rule: schema.Match, cell: Cell) -> bool:
    """Whether every key that ``rule`` gives holds for ``cell``."""

    def holds(key: str) -> bool:
        pairs = itertools.product(_NAMES[key](cell), getattr(rule, key))
        return any(name == form or fnmatchcase(str(name), str(form)) for name, form in pairs)

    return all(map(holds, rule.model_fields_set & _NAMES.keys()))
