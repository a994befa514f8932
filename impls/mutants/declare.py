"""How to declare a mutant: ``@mutant("name", killed_by=...)`` on a class with one planted fault.

The class's docstring says what goes wrong.  The class comes from its parent, or from a part that
the parent is built of.  A mutant names the case that triggers it; the same case must pass on the
parent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shardproof.case import CheckpointPlan, Death, Fault, Lane, WorkloadSpec
from shardproof.contract import Implementation, OptimizerSpec
from shardproof.impls.mutants.triggers import gpt

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Mutant:
    """One planted fault and the case that shows it.

    Every check in ``killed_by`` must fail; the verdicts ``crash`` and ``hang`` may stand there
    where the fault ends that way; a crash counts if its reason holds ``crash_says``.
    ``says``: a regular expression of what names the fault; it is searched in what the judge says.
    ``zoo`` are ids of collected faults that the mutant stands for.
    """

    name: str
    parent: str
    summary: str
    killed_by: tuple[str, ...]
    implementation: type[Implementation]
    says: str
    crash_says: str = ""
    zoo: tuple[str, ...] = ()
    workload: WorkloadSpec = field(default_factory=gpt)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=lambda: {"replicate": 2})
    backend: str = "in_memory"
    lane: Lane = "fp64"
    dtype: str = "float64"
    precision: Mapping[str, str] = field(default_factory=dict)
    steps: int = 2
    #: What must come out, as in a scenario: ``relation`` for faults that only a second run shows.
    expect: Mapping[str, Any] = field(default_factory=dict)
    #: What the suite does to a rank: of faults in the judge, whose sentences it is held to.
    fault: Fault | None = None
    #: When the case saves, and who loads.
    checkpoint: CheckpointPlan | None = None
    #: Whether memory is weighed though no check in ``killed_by`` is known to need that.
    weighed: bool = False
    #: Members from a step on, and those that die inside one.
    membership: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    deaths: tuple[Death, ...] = ()

    @property
    def traits(self) -> tuple[str, ...]:
        """The trigger: traits without which the fault does not show."""
        return self.workload.traits


class Declare(Protocol):
    """The type of the decorator ``mutant`` of one family."""

    def __call__(self, name: str, **fields: Any) -> Callable[[C], C]: ...


def family(*parents: type[Implementation], **usual: Any) -> Declare:
    """The decorator for faults of ``parents``; ``usual`` holds default fields of :class:`Mutant`.

    It sets the attribute ``mutant`` of the decorated class.  A class that comes from a part that
    several parents are built of belongs to the first of them, or to the field ``parent``.
    """

    def mutant(name: str, *, parent: type[Implementation] | None = None, **fields: Any) -> Any:
        def declare(cls: C) -> C:
            candidates = parents if parent is None else (parent,)
            clean, made = next((p, made) for p in candidates if (made := planted(cls, p)))
            # ``overlap`` looks at steps after the second: buckets may be built anew until then.
            asked = (usual | fields).get("killed_by", ())
            settled = {"steps": 3} if "overlap" in asked else {}
            summary = " ".join(str(cls.__doc__).split()).removesuffix(".")
            home = clean.__module__.rpartition("impls.")[2].replace(".", "/")
            fault = Mutant(name, home, summary, implementation=made, **(settled | usual | fields))
            cls.mutant = fault  # type: ignore[attr-defined]
            return cls

        return declare

    return mutant


def planted(fault: type, owner: type) -> Any:
    """``owner`` with its ``*_type``, at any depth, replaced by the ``fault`` that inherits from
    it.
    """
    if issubclass(fault, owner):
        return fault
    parts = {name: getattr(owner, name) for name in dir(owner) if name.endswith("_type")}
    made = {name: planted(fault, part) for name, part in parts.items()}
    # In all of them: what formats of checkpoints share is a part of each.
    body = {name: part for name, part in made.items() if part is not None}
    if not body:
        return None
    body |= {"__module__": fault.__module__, "__doc__": fault.__doc__}
    return type(fault.__name__, (owner,), body)
