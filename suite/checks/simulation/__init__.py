"""Every rank holds the same bytes and makes the same calls as its simulation.

Simulated tensors have no values, so a difference depends on values, on other ranks or on time.
Calls are compared in their order.  If the backend frees memory when the program does, bytes of each
class at each mark and peaks of each phase are compared, too.  Tolerance 0.

*Cannot see* values, nor a fault that the simulated rank has as well: ``memory`` and ``traffic``
compare both with formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardproof.checks import Needs, Outcome
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow
from shardproof.registry.stand_ins import needed
from shardproof.wings import first

NEEDS: Needs = ("calls", "every rank")

#: Most differences that are kept.
_MOST = 20


class WithSimulated(Protocol):
    """How many ``figures`` were compared, a sentence for each that differs, and why none was."""

    figures: int
    wrong: Sequence[str]
    skip: str
    error: str


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """A row with the number of equal figures, or one for each that differs."""
    if needed(evidence.case) or ":" in evidence.case.workload.name:
        why = "the judge does not load code of your own: use `shardproof simulate --against RUN`"
        return [ComparisonRow(skip=why)]
    made = first(lambda wing: wing.compared_with_simulation(evidence.case, evidence.records))
    if made is None:
        return [ComparisonRow(skip="suite/simulate is missing here")]
    if made.skip:
        return [ComparisonRow(skip=made.skip)]
    if wrong := [made.error] if made.error else [*made.wrong]:
        return [ComparisonRow(problem=text) for text in wrong[:_MOST]]
    return [ComparisonRow(name="figures", error=float(made.figures))]


def decide(evidence: Figures) -> Outcome:
    """Fail on the first difference."""
    rows = evidence.compared["simulation"]
    if reason := next((row.skip for row in rows if row.skip), ""):
        return Outcome("simulation", "skip", reason)
    if wrong := [row.problem for row in rows if row.problem]:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Outcome("simulation", "fail", wrong[0] + more)
    equal = sum(int(row.error or 0) for row in rows)
    return Outcome("simulation", "pass", figures={"equal figures": equal})
