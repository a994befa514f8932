"""How a mutant is declared: ``@mutant("name", ...)`` on a class with one planted fault.

The class is a subclass of its parent, or of its parent's handle (the parent is told to use it).
A mutant names the case that triggers it; the same case must pass on the unpatched parent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardproof.case import Lane, WorkloadSpec
from shardproof.contract import Implementation, OptimizerSpec

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Mutant:
    """One planted fault and the case that shows it.

    Every check in ``killed_by`` must fail; the verdicts ``crash`` and ``hang`` may stand there
    where the fault ends that way; a crash counts if its reason holds ``crash_says``.
    ``zoo`` are ids of collected faults that the mutant stands for.
    """

    name: str
    parent: str
    summary: str
    killed_by: tuple[str, ...]
    implementation: type[Implementation]
    crash_says: str = ""
    zoo: tuple[str, ...] = ()
    workload: WorkloadSpec = field(default_factory=lambda: WorkloadSpec("charnames_gpt"))
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=lambda: {"replicate": 2})
    backend: str = "in_memory"
    lane: Lane = "fp64"
    dtype: str = "float64"
    precision: Mapping[str, str] = field(default_factory=dict)
    steps: int = 3
    #: What must come out, as in a scenario: ``relation`` for faults that only a second run shows.
    expect: Mapping[str, Any] = field(default_factory=dict)

    @property
    def traits(self) -> tuple[str, ...]:
        """The trigger: conditions without which the fault does not show."""
        return self.workload.traits


def mutant(
    name: str, *, parent: type[Implementation], parent_name: str, **fields: Any
) -> Callable[[C], C]:
    """Declare the decorated class, which gets an attribute ``mutant``."""

    def declare(cls: C) -> C:
        implementation: type = cls
        if not issubclass(cls, Implementation):
            body = {"handle_type": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
            implementation = type(cls.__name__, (parent,), body)
        declared = Mutant(name, parent_name, implementation=implementation, **fields)
        cls.mutant = declared  # type: ignore[attr-defined]
        return cls

    return declare
