"""Every call of a collective operation gives the exact answer, and touches nothing else.

Judged in cases of workload ``calls``: ranks make the calls of a sub-matrix that covers every
combination of a few factors (``workload.py``).  Values are small integers and powers of two, in
int32 and int64 spread over all bits, so the answer is exact in any order of adding: tolerance 0.
Results are poisoned first; inputs and the memory around every tensor are compared afterwards, on
every rank.  A work that says it is done before it can be, or whose result comes after the wait, is
told as such.

*Cannot see* a fault that takes a combination of more factors than the case covers, larger messages,
or another moment; nor what a call costs (``traffic``).
"""

from __future__ import annotations

from dataclasses import replace

from shardproof.cases.kinds import judged
from shardproof.checks import Needs, Outcome, Worst
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow
from shardproof.table import grouped

NEEDS: Needs = ("values",)


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """A row per call: what the ranks agree on, or what the first of them that differs says."""
    by_call = grouped((row.step, row) for record in evidence.records for row in record.calls)
    return [min(by_call[step], key=_gravity) for step in sorted(by_call)]


#: Phase of a call that raised though it is right.
RAISED = "raised"
#: Phase of a call in which a rank differs: one rank at least must say so.
DIFFERS = "differs"


#: What a rank raises because another one has ended.
_CONSEQUENCES = ("RankEnded", "Connection closed", "Connection reset", "TimeoutError")


def _gravity(row: ComparisonRow) -> tuple[bool, bool, bool]:
    """A wrong number comes before an error, and the first error before those that it caused."""
    caused = any(word in row.problem for word in _CONSEQUENCES)
    if row.phase == DIFFERS:
        return bool(row.problem), caused, False
    return not row.problem, caused, row.error is None


def decide(figures: Figures) -> Outcome:
    """By the rows alone."""
    nothing = "no call was made: it judges workload calls only"
    found = judged.outcome("collectives", figures, nothing, "calls")
    rows = figures.compared.get("collectives", [])
    if found.status == "pass" and any(row.error is None for row in rows):
        return replace(found, status="judge error", message="a call has no result")
    first = next((row for row in rows if row.problem), None)
    if first is None or first.error is None or first.bound is None:
        return found
    place = first.step, first.phase, first.owner
    return replace(found, worst=Worst(first.name, *place, first.error, first.bound))
