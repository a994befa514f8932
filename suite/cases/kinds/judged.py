"""Rows and outcomes of checks of workloads that train no model: sentences of what is wrong."""

from __future__ import annotations

from shardproof.checks import Outcome
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import ComparisonRow


def row(step: int, phase: str, name: str, problem: str, tested: bool = True) -> ComparisonRow:
    """A comparison of all ranks together; ``problem``: what is wrong, empty: nothing."""
    error = float(bool(problem))
    return ComparisonRow(step, phase, name, "all ranks", error, 0.0, tested, problem=problem)


def outcome(check: str, figures: Figures, nothing: str, noun: str = "comparisons") -> Outcome:
    """Pass, or the first problem among the rows of ``check``, which are ``noun``.

    ``nothing``: why there may be no rows.
    """
    if not (rows := figures.compared.get(check, [])):
        return Outcome(check, "skip", nothing)
    wrong = [one for one in rows if one.problem]
    numbers = {noun: len(rows), "wrong": len(wrong)}
    if not wrong:
        return Outcome(check, "pass", f"{len(rows)} {noun}", figures=numbers)
    more = f" (and {len(wrong) - 1} more of {len(rows)} {noun})" if len(wrong) > 1 else ""
    return Outcome(check, "fail", wrong[0].problem + more, figures=numbers)
