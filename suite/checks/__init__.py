"""Checks turn evidence into outcomes, one file each, which says what its check cannot see.

A check has ``decide(figures) -> Outcome``, a pure function of what is stored of a case, and, where
it looks at tensors, ``measure(evidence) -> rows`` before it: one row per comparison with ``step``,
``phase``, ``name``, ``owner``, ``error``, ``bound``; ``tested: False`` where a spoilt copy passed
(``error`` is ``None``); or ``problem``, a sentence, where nothing could be compared.  The rows go
into the run's records, so that ``shardproof verify`` decides again by the same code.

Each check declares in ``NEEDS`` what it can say nothing without, and is skipped there:

    values      tensors have values, so an oracle has something to compare with
    calls       ledgers are on: calls, phases and events are logged
    memory      a ledger weighs what ranks hold, and sees it freed where the program frees it
    every rank  each rank of the world has run; none stands for others
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from shardproof import axes
from shardproof.backends import BACKENDS, USUAL
from shardproof.files import Number, Stored

if TYPE_CHECKING:
    from shardproof.case import Case
    from shardproof.evidence.assembled import Evidence, Figures
    from shardproof.evidence.records import ComparisonRow, RankRecord
    from shardproof.registry.declaration import Declaration

Need = Literal["values", "calls", "memory", "every rank"]
Needs = Sequence[Need]

Status = Literal["pass", "fail", "skip", "judge error", "undecidable", "precondition"]

#: Checks for any case: each skips what does not apply.  ``prove``, planted faults and the campaign
#: ask all of them.
GENERAL = (
    *("equivalence", "replicas", "norm", "loss_scale", "compression"),
    *("traffic", "memory", "overlap", "active", "schedule"),
)
#: Checks of something that the scenario names under ``expect``, or of what it plans.
EXPECTED = ("refusals", "relations", "checkpoint", "faults", "membership")
#: Checks that cost as much as the case, so that a scenario has to name them.
COSTLY = ("simulation",)
#: The checks of workloads that train nothing (``calls``, ``epochs``, ``votes``): of others only
#: ``faults`` applies there.
OF_UNTRAINED = {
    "collectives": "shardproof.cases.kinds.calls.check",
    "data": "shardproof.cases.kinds.samples.check",
    "stopping": "shardproof.cases.kinds.votes.check",
}
#: Every check and the module that holds it.
CHECKS: dict[str, str] = {
    **{name: f"shardproof.checks.{name}" for name in (*GENERAL, *EXPECTED, *COSTLY)},
    **OF_UNTRAINED,
}


@dataclass(frozen=True)
class Worst:
    """The tensor that is furthest from (or first beyond) its bound."""

    name: str
    step: int
    phase: str
    owner: str
    error: Number
    bound: Number

    @property
    def place(self) -> str:
        """``'w' at step 0, gradients_final, rank 1``."""
        return f"{self.name!r} at step {self.step}, {self.phase}, {self.owner}"

    def __str__(self) -> str:
        return f"{self.place}: {against(self.error, self.bound)}"


def against(error: float, bound: float, unit: str = "") -> str:
    """An error with its bound; a bound of 0 without a unit counts elements of other bits."""
    if not bound and not unit:
        return f"{error:.0f} elements differ, expected equal bits"
    return f"error {error:.3g} against bound {bound:.3g} {unit}".rstrip()


@dataclass
class Outcome(Stored):
    """The outcome of one check of one case; ``figures`` are for people, in their stored form."""

    check: str
    status: Status
    message: str = ""
    worst: Worst | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def lacking(needs: Needs, case: Case, declaration: Declaration) -> str:
    """Why a check with ``needs`` can say nothing of ``case``; empty: it can."""
    backend = BACKENDS[case.backend]
    for need in needs:
        if need == "values" and not backend.has_values:
            return f"tensors have no values on {case.backend}"
        if need in ("calls", "memory") and not case.ledgers:
            return "ledgers are off"
        # A system that needs processes is weighed where memory is freed late: nowhere else runs it.
        if need == "memory" and not backend.exact_memory and declaration.runs_on_threads:
            return f"{case.backend} frees memory late: measure memory on {USUAL}"
        if need == "every rank" and len(backend.ranks(case.world)) < case.world:
            return f"not every rank runs on {case.backend}"
    return ""


def weighs(case: Case, declaration: Declaration) -> bool:
    """Whether ranks weigh what they hold: it takes time, so the check must be asked for."""
    return "memory" in case.checks and not lacking(("memory",), case, declaration)


def attends(case: Case, declaration: Declaration) -> bool:
    """Whether ranks count the work of attention: of the suite's models, whose masks are known, at
    the one depth that has a formula of it.
    """
    is_known = ":" not in case.workload.name and (case.depth or declaration.depth) == "layout"
    return "active" in case.checks and is_known and axes.parts(case.mesh, "positions") > 1


def measure(name: str, evidence: Evidence) -> list[ComparisonRow]:
    """The rows that check ``name`` measures of the tensors (nothing, for most)."""
    check = _module(name)
    if lacking(check.NEEDS, evidence.case, evidence.declaration):
        return []
    rows: Iterable[ComparisonRow] = getattr(check, "measure", lambda _: ())(evidence)
    return list(rows)


def decide(name: str, figures: Figures) -> Outcome:
    """The outcome of check ``name`` on figures whose ``compared`` holds its rows."""
    check = _module(name)
    if reason := lacking(check.NEEDS, figures.case, figures.declaration):
        return Outcome(name, "skip", reason)
    outcome: Outcome = check.decide(figures)
    return outcome


def judge(name: str, evidence: Evidence) -> Outcome:
    """Measure, then decide."""
    evidence.compared[name] = measure(name, evidence)
    return decide(name, evidence)


def first_problem(figures: Figures, wrong: Callable[[RankRecord, int], str]) -> str:
    """The first problem that ``wrong`` finds, by rank and step."""
    for record in figures.records:
        for step in figures.steps:
            if problem := wrong(record, step):
                return f"rank {record.rank}, step {step}: {problem}"
    return ""


def _module(name: str) -> ModuleType:
    return importlib.import_module(CHECKS[name])


def summaries() -> Mapping[str, str]:
    """Name -> first paragraph of the check's docstring."""
    return {name: explanation(name).split("\n\n")[0] for name in CHECKS}


def explanation(name: str) -> str:
    """All that check ``name`` says of itself."""
    return (_module(name).__doc__ or "").strip()
