"""Rows of memory: how many times less model state is held than by whole copies.

Resident model state on the rank that holds most.  *whole copies* is data parallelism with the same
options; *theory* leaves out padding and step counters; *limit* is the theory for many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.report.tables import Figures
from shardproof.table import Mark, Table

HEADINGS = (
    *("implementation", "optimizer", "precision", "world", "accounting"),
    *("bytes held", "whole copies", "measured", "promised", "theory", "limit"),
)
TITLE = "Resident bytes of model state on the rank that holds most, against whole copies"
ALLOCATOR = "Most bytes of the last step on a GPU: torch's allocator, and the ledger"
MEASURED = HEADINGS.index("measured")
#: Beside a measured ratio where the check found other bytes than promised.
FAILS = " (fail)"
#: What the accounting ids mean.
ACCOUNTING = (
    "bytes of a parameter, its gradient, its masters and optimizer state: A32 4+4+8, A16 2+2+12, "
    "M18 2+4+12, B8 2+2+4, S4 2+2+0"
)


def table(results: Iterable[CaseResult]) -> Table:
    rows = [row for row, _ in with_figures(results)]
    marks: list[Mark] = ["bad" if FAILS in row[MEASURED] else "" for row in rows]
    return Table(TITLE, HEADINGS, rows, marks, (f"Accounting, in {ACCOUNTING}.",), "lllrlrrrrll")


def table_of_scenarios(results: Iterable[CaseResult]) -> Table:
    """The rows of scenarios that are named after memory."""
    return table(result for result in results if result.case.scenario.startswith("memory"))


def allocator(results: Iterable[CaseResult]) -> Table:
    """A GPU's allocator next to the ledger, a row for each case that ran on one."""
    rows = []
    for result in results:
        if by_rank := result.figures("memory").get("allocator"):
            fullest = max(by_rank.values(), key=lambda rank: rank["allocated"])
            held, counted, case = fullest["allocated"], fullest["ledger"], result.case
            ratio = f"{held / counted:.3f}x" if counted else "-"
            system = case.system, case.optimizer.name, str(case.world)
            rows.append((*system, f"{held:,}", f"{counted:,}", ratio))
    headings = ("implementation", "optimizer", "world", "allocator", "ledger", "ratio")
    note = "Nothing is judged by the allocator: it rounds up, and holds the suite's tensors, too."
    return Table(ALLOCATOR, headings, rows, notes=(note,), align="lllrrr")


def precision_of(case: Case) -> str:
    """In words: ``float64``, or ``parameters bfloat16, reduce float32``."""
    return ", ".join(f"{kind} {dtype}" for kind, dtype in case.precision.items()) or case.dtype


def with_figures(results: Iterable[CaseResult]) -> list[tuple[tuple[str, ...], Figures]]:
    """Texts of :data:`HEADINGS` for each row, with their figures."""
    rows: dict[tuple[Any, ...], tuple[tuple[str, ...], Figures]] = {}
    for result in results:
        check = result.check("memory")
        if check is None or "ratio_measured" not in check.figures:
            continue
        case, figures = result.case, check.figures
        theory, limit, promised = (figures[f"ratio_{k}"] for k in ("theory", "limit", "promised"))
        failed = FAILS if check.status == "fail" else ""
        system = case.system, case.optimizer.name, precision_of(case)
        row = (
            *(*system, str(case.world), figures["accounting"]),
            *(f"{figures[name]:,}" for name in ("bytes_held", "bytes_whole")),
            _times_less(figures, "held", "ratio_measured") + failed,
            "-" if promised is None else _times_less(figures, "promised", "ratio_promised"),
            "-" if theory is None else f"{_ratio(theory)} = {theory}",
            "-" if theory is None else "N (shard ranks)" if limit is None else _ratio(limit),
        )
        key = (*system, case.world, *row[5:])
        rows.setdefault(key, (row, figures))
    return [row for _, row in sorted(rows.items(), key=lambda item: item[0][:4])]


def _times_less(figures: Figures, what: str, ratio: str) -> str:
    """A ratio to the whole copies; where all is on the host there is none."""
    return _ratio(figures[ratio]) if figures[f"bytes_{what}"] else "nothing held"


def _ratio(text: str) -> str:
    return f"{float(Fraction(text)):.3f}x"
