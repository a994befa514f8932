"""Where a planted fault lies in the source, and whether a finding names it."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardproof import registry
from shardproof.contract import Untrained
from shardproof.locate.finding import Finding, Place, spelt

#: Lines on either side of a fault that count as it.
BESIDE = 3
#: ``line``: the named line lies in the fault, or beside it; ``origin``: so does the named line that
#: gave the operation its number, its settings or its values; ``operation``: what is named was
#: called by the planted function, or by the one that it replaces; ``miss``: neither.
Named = Literal["line", "origin", "operation", "miss"]
#: Classes of faults: what they change.
Changes = Literal["numbers", "calls", "other"]


@dataclass(frozen=True)
class Range:
    """Lines ``first`` to ``last`` of a function, with its name."""

    file: str
    first: int
    last: int
    function: str

    def has(self, place: Place, beside: int = BESIDE) -> bool:
        """Whether ``place`` lies in the range, or near it."""
        return place.file == self.file and (self.first - beside <= place.line <= self.last + beside)


def sample(size: int) -> list[Any]:
    """The ``size`` faults whose names have the lowest digests, of all that are planted."""
    mutants = [registry.load_mutant(name) for name in registry.mutant_names()]
    return sorted(mutants, key=lambda m: hashlib.sha256(m.name.encode()).hexdigest())[:size]


def changes(mutant: Any) -> Changes:
    """The kind of thing that a fault changes, by the checks that must catch it.

    ``other``: what is neither a number of training nor a call: memory, order, checkpoints, ends of
    ranks, systems that train nothing, and faults of the judge.
    """
    if (
        issubclass(mutant.implementation, Untrained)
        or ".judge." in mutant.implementation.__module__
    ):
        return "other"
    numbers = {"equivalence", "replicas", "norm", "loss_scale", "compression", "relations"}
    if "checkpoint" in mutant.killed_by or mutant.checkpoint is not None:
        return "other"
    if numbers & {*mutant.killed_by}:
        return "numbers"
    return "calls" if "traffic" in mutant.killed_by else "other"


def ranges(mutant: Any) -> list[Range]:
    """The source of a fault: its class, what that comes from in the folder of planted faults, and
    the functions of the parent that it replaces.
    """
    cls = _declared(mutant)
    found: list[Range] = []
    names: set[str] = set()
    for owner in cls.__mro__:
        if not owner.__module__.startswith("shardproof.impls.mutants."):
            continue
        found += [*_range(owner, owner.__name__)]
        names |= {n for n, value in vars(owner).items() if _function(value) is not None}
    for owner in cls.__mro__:
        if owner.__module__.startswith("shardproof.impls.mutants."):
            continue
        own = {n: _function(v) for n, v in vars(owner).items() if n in names}
        for name, function in own.items():
            if function is not None and owner.__module__.startswith("shardproof.impls."):
                found += [*_range(function, name)]
    return found


def named(finding: Finding, mutant: Any) -> Named:
    """How a finding names the fault."""
    own = ranges(mutant)
    if finding.place is not None and any(one.has(finding.place) for one in own):
        return "line"
    if finding.origin is not None and any(one.has(finding.origin) for one in own):
        return "origin"
    if any(one.has(place, 0) for one in own for place in finding.calls):
        return "operation"
    return "miss"


def _declared(mutant: Any) -> type:
    """The class that was decorated."""
    module = sys.modules[mutant.implementation.__module__]
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and vars(value).get("mutant") is mutant
    )


def _function(value: Any) -> Any:
    value = getattr(value, "__func__", getattr(value, "fget", value))
    return value if inspect.isfunction(value) else None


def _range(code: Any, name: str) -> Iterator[Range]:
    try:
        lines, first = inspect.getsourcelines(code)
        file = inspect.getsourcefile(code)
    except (OSError, TypeError):
        return
    if file is not None:
        yield Range(spelt(file), first, first + len(lines) - 1, name)


def counted(outcomes: Sequence[tuple[Changes, Named]]) -> dict[Changes, dict[Named, int]]:
    """Outcomes by what the faults change."""
    table: dict[Changes, dict[Named, int]] = {}
    for kind, how in outcomes:
        row = table.setdefault(kind, {"line": 0, "origin": 0, "operation": 0, "miss": 0})
        row[how] += 1
    return table
