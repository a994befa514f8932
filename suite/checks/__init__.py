"""Checks turn records into verdicts.  They are pure functions of the evidence: a stored run can be
judged again.  One file each, whose docstring says what the check can and cannot see."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from suite.evidence import Evidence

Status = Literal["pass", "fail", "skip", "undecidable", "precondition"]

#: Every check and the module that holds it (``judge(evidence) -> Outcome``).
CHECKS: dict[str, str] = {
    name: f"suite.checks.{name}"
    for name in (
        "equivalence",
        "replicas",
        "norm",
        "traffic",
        "overlap",
        "engagement",
        "refusals",
    )
}


@dataclass(frozen=True)
class Worst:
    """The tensor that is furthest from (or first beyond) its bound."""

    name: str
    step: int
    phase: str
    owner: str
    error: float
    bound: float

    def __str__(self) -> str:
        return (
            f"{self.name!r} at step {self.step}, {self.phase}, {self.owner}: "
            f"error {self.error:.3g} against bound {self.bound:.3g}"
        )


@dataclass
class Outcome:
    """What one check says of one case."""

    check: str
    status: Status
    message: str = ""
    worst: Worst | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def load(name: str) -> Callable[[Evidence], Outcome]:
    """The ``judge`` function of check ``name``."""
    judge: Callable[[Evidence], Outcome] = importlib.import_module(CHECKS[name]).judge
    return judge


def summaries() -> Mapping[str, str]:
    """Name -> first paragraph of the check's docstring."""
    return {
        name: (importlib.import_module(module).__doc__ or "").strip().split("\n\n")[0]
        for name, module in CHECKS.items()
    }
