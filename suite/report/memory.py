"""Rows of memory: how many times less model state is held than by whole copies.

Resident model state on the rank that holds most.  *whole copies* is data parallelism with the same
options; *theory* leaves out padding and step counters; *limit* is the theory for many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from shardproof.report.tables import Result, name_of, world_of
from shardproof.table import Mark, Table

HEADINGS = (
    "implementation",
    "optimizer",
    "precision",
    "world",
    "accounting",
    "bytes held",
    "whole copies",
    "measured",
    "promised",
    "theory",
    "limit",
)
TITLE = "Resident bytes of model state on the rank that holds most, against whole copies"
MEASURED = HEADINGS.index("measured")
#: Beside a measured ratio where the check found other bytes than promised.
FAILS = " (fail)"
#: What the accounting ids mean.
ACCOUNTING = (
    "bytes a parameter, its gradient, its masters and optimizer state: A32 4+4+8, A16 2+2+12, "
    "M18 2+4+12, B8 2+2+4, S4 2+2+0"
)


def table(results: Iterable[Result]) -> Table | None:
    """One row per distinct cell, by world; ``None``: no case measured memory."""
    rows = [row for row, _ in with_figures(results)]
    if not rows:
        return None
    marks: list[Mark] = ["bad" if FAILS in row[MEASURED] else "" for row in rows]
    return Table(TITLE, HEADINGS, rows, marks, (f"Accounting, in {ACCOUNTING}.",), "lllrlrrrrll")


def with_figures(results: Iterable[Result]) -> list[tuple[tuple[str, ...], Result]]:
    """Texts of :data:`HEADINGS` for each row, beside the figures that they come from."""
    rows: dict[tuple[Any, ...], tuple[tuple[str, ...], Result]] = {}
    for result in results:
        check = next((c for c in result["checks"] if c["check"] == "memory"), None)
        if check is None or "ratio_measured" not in check["figures"]:
            continue
        case, figures = result["case"], check["figures"]
        name = name_of(case)
        policy = case.get("precision") or {}
        precision = ", ".join(f"{k} {v}" for k, v in policy.items()) or case["dtype"]
        theory, limit, promised = (figures[f"ratio_{k}"] for k in ("theory", "limit", "promised"))
        failed = FAILS if check["status"] == "fail" else ""
        row = (
            name,
            case["optimizer"]["name"],
            precision,
            str(world_of(case)),
            figures["accounting"],
            f"{figures['bytes_held']:,}",
            f"{figures['bytes_whole']:,}",
            _times_less(figures, "held", "ratio_measured") + failed,
            "-" if promised is None else _times_less(figures, "promised", "ratio_promised"),
            "-" if theory is None else f"{_ratio(theory)} = {theory}",
            "-" if theory is None else "N (shard ranks)" if limit is None else _ratio(limit),
        )
        key = (name, row[1], row[2], world_of(case), *row[5:])
        rows.setdefault(key, (row, figures))
    return [row for _, row in sorted(rows.items(), key=lambda item: item[0][:4])]


def _times_less(figures: Result, what: str, ratio: str) -> str:
    """A ratio to the whole copies; where all is on the host there is none."""
    return _ratio(figures[ratio]) if figures[f"bytes_{what}"] else "nothing held"


def _ratio(text: str) -> str:
    return f"{float(Fraction(text)):.3f}x"
