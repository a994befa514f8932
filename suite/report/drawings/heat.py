"""Heat maps of failures: error over bound, tensor by tensor and step by step, from the records.

A check stops at the moment of its first failure, so what comes after it is blank.  Of several
comparisons of one tensor in a step the worst counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shardproof.checks.results import CaseResult
from shardproof.report.drawings import svg
from shardproof.report.tables import share
from shardproof.runs import records

#: At most so many maps in a report, and tensors in one.
MOST, TENSORS = 24, 24
_NAME, _CELL, _ROW, _TOP = 300.0, 74.0, 20.0, 24.0
#: Shares of the bound above which the next shade begins: from the second on it is broken.
_SHADES = (0.1, 1.0, 10.0, 1e3, 1e6)


@dataclass(frozen=True)
class Map:
    """A drawing, with what it leaves out; ``problem`` where there is none."""

    image: Markup | None
    note: str
    problem: str = ""


def heat_map(folder: Path, result: CaseResult) -> Map | None:
    """The map of the first failing check that compared tensors; ``None``: none did."""
    failing = [outcome.check for outcome in result.checks if outcome.status == "fail"]
    if not failing or not result.record:
        return None
    try:
        rows = records.sections(folder / result.record, "comparison")["comparison"]
    except records.RecordError as error:
        return Map(None, "", str(error))
    found = ((check, _cells(r for r in rows if r.get("check") == check)) for check in failing)
    return next((_map(result.id, check, cells) for check, cells in found if cells), None)


#: Tensor -> step -> (share of the bound, error, where).
Cells = dict[str, dict[int, tuple[float, float, str]]]


def _cells(rows: Any) -> Cells:
    worst: Cells = defaultdict(dict)
    for row in rows:
        if any(row.get(column) is None for column in ("error", "bound", "name", "step")):
            continue
        found = share(row["error"], row["bound"]), row["error"]
        steps, step = worst[row["name"]], int(row["step"])
        if step not in steps or found[0] > steps[step][0]:
            steps[step] = *found, f"{row.get('phase')}, {row.get('owner')}"
    return worst


def _map(case_id: str, check: str, cells: Cells) -> Map:
    worst = {name: max(used for used, *_ in steps.values()) for name, steps in cells.items()}
    ordered = sorted(cells, key=lambda name: (-worst[name], name))
    shown = ordered[:TENSORS]
    steps = sorted({step for by_step in cells.values() for step in by_step})
    beyond = [name for name in ordered if worst[name] > 1]
    parts = []
    for column, step in enumerate(steps):
        at = _NAME + _CELL * (column + 0.5)
        label = "initial" if step < 0 else f"step {step}"
        parts.append(svg.text(at, _TOP - 8, label, "tick-label", "middle"))
    for number, name in enumerate(shown):
        top = _TOP + _ROW * number
        parts.append(svg.text(_NAME - 8, top + 14, _short(name), "lane-label", "end"))
        for column, step in enumerate(steps):
            parts += _cell(_NAME + _CELL * column, top, name, step, cells[name])
    told = ((name, *item) for name in beyond[:6] for item in sorted(cells[name].items()))
    listed = "; ".join(
        f"{name}: {_number(error)} at {'start' if step < 0 else f'step {step}'}, {where}"
        for name, step, (used, error, where) in told
        if used > 1
    )
    title = f"Errors against their bounds by tensor and step, check {check}: {case_id}"
    text = f"Beyond their bound: {listed or 'none'}."
    size = _NAME + _CELL * len(steps) + 4, _TOP + _ROW * len(shown) + 4
    image = svg.drawing(title, text, size, parts, "heat", fixed=True)
    note = f"Check {check}; {len(cells)} tensors compared, {len(beyond)} beyond their bound."
    if len(shown) < len(ordered):
        note += f" Shown: the {len(shown)} that are furthest."
    return Map(image, note)


def _cell(
    left: float, top: float, name: str, step: int, by_step: Mapping[int, tuple[float, float, str]]
) -> list[Markup]:
    if step not in by_step:
        hint = f"{name}: not compared in this step"
        return [svg.rect(left + 1, top + 1, _CELL - 2, _ROW - 2, "h-none", hint)]
    used, error, where = by_step[step]
    look = f"h-{sum(used > least for least in _SHADES)}"
    hint = f"{name}, {where}: error {_number(error)}, {_number(used)} of its bound"
    text = svg.text(left + _CELL / 2, top + 14, _number(error), f"{look}-text", "middle")
    return [svg.rect(left + 1, top + 1, _CELL - 2, _ROW - 2, look, hint), text]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return "0" if value == 0 else f"{value:.1e}"


def _short(name: str, most: int = 44) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"
