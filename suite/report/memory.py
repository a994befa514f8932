"""Rows of memory: how many times less model state is held than by whole copies.

Resident model state on the rank that holds most.  *whole copies* is data parallelism with the same
options; *theory* leaves padding and step counters out, *limit* is that of many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from shardproof.report.tables import Result, name_of, world_of

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


def memory_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Cells of :data:`HEADINGS`, one row per distinct cell, by world."""
    return [row for row, _ in with_figures(results)]


def with_figures(results: Iterable[Result]) -> list[tuple[tuple[str, ...], Result]]:
    """Every row beside the figures of the check that it tells."""
    found: dict[tuple[Any, ...], tuple[tuple[str, ...], Result]] = {}
    for result in results:
        told = next((c for c in result["checks"] if c["check"] == "memory"), None)
        if told is None or "ratio_measured" not in told["figures"]:
            continue
        case, figures = result["case"], told["figures"]
        name = name_of(case)
        policy = case.get("precision") or {}
        precision = ", ".join(f"{k} {v}" for k, v in policy.items()) or case["dtype"]
        theory, limit = figures["ratio_theory"], figures["ratio_limit"]
        most = "shard ranks" if limit is None else _ratio(limit)
        row = (
            name,
            case["optimizer"]["name"],
            precision,
            str(world_of(case)),
            figures["accounting"],
            f"{figures['bytes_held']:,}",
            f"{figures['bytes_whole']:,}",
            _times_less(figures, "held", "ratio_measured")
            + (FAILS if told["status"] == "fail" else ""),
            "-"
            if figures["ratio_promised"] is None
            else _times_less(figures, "promised", "ratio_promised"),
            "-" if theory is None else f"{_ratio(theory)} = {theory}",
            "-" if theory is None else most,
        )
        key = (name, row[1], row[2], world_of(case), *row[5:])
        found.setdefault(key, (row, figures))
    return [told for _, told in sorted(found.items(), key=lambda item: item[0][:4])]


def _times_less(figures: Result, what: str, ratio: str) -> str:
    """A ratio to the whole copies; where all is on the host there is none."""
    return _ratio(figures[ratio]) if figures[f"bytes_{what}"] else "nothing held"


def _ratio(text: str) -> str:
    return f"{float(Fraction(text)):.3f}x"
