"""How a mutant is declared: ``@mutant("name", parent=..., summary=..., killed_by=...)`` on a class.

The class is a subclass of its parent, or of its parent's handle (then the parent is told to use it).
A mutant names the case that triggers it; the same case must pass on the unpatched parent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from suite.case import WorkloadSpec
from suite.contract import Implementation, OptimizerSpec

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Mutant:
    """One planted fault and the case that shows it.

    ``killed_by`` names checks of which at least one must fail, or the verdicts ``crash`` or ``hang``
    where the fault ends that way.  ``zoo`` are ids of collected faults that it stands for.
    ``delay``: reductions complete late, and their results are visible only after ``wait``.
    """

    name: str
    parent: str
    summary: str
    killed_by: tuple[str, ...]
    implementation: type[Implementation]
    zoo: tuple[str, ...] = ()
    workload: WorkloadSpec = field(default_factory=lambda: WorkloadSpec("gpt"))
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=lambda: {"replicate": 2})
    backend: str = "in_memory"
    lane: str = "fp64"
    dtype: str = "float64"
    steps: int = 3
    delay: bool = False

    @property
    def traits(self) -> tuple[str, ...]:
        """The trigger: conditions without which the fault does not show."""
        return self.workload.traits


def mutant(
    name: str, *, parent: type[Implementation], parent_name: str, **fields: Any
) -> Callable[[C], C]:
    """Declare the decorated class; it gets an attribute ``mutant``."""

    def declare(cls: C) -> C:
        implementation = cls
        if not issubclass(cls, Implementation):
            implementation = type(cls.__name__, (parent,), {"handle_type": cls})  # type: ignore[assignment]
            implementation.__module__ = cls.__module__
        cls.mutant = Mutant(name, parent_name, implementation=implementation, **fields)  # type: ignore[attr-defined]
        return cls

    return declare
