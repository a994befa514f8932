"""System x capability over runs: the cells of each run, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from shardproof import verdicts
from shardproof.report.capability_matrix import CAPABILITIES, CapabilityCell
from shardproof.report.looks import look
from shardproof.runs.run_folder import Run

#: Implementation and backend.
Place = tuple[str, str]
#: A column of all cases, whatever they say something about.
EVERY = "every case"


@dataclass(frozen=True)
class SiteMatrix:
    """``rows`` have a cell (``None``: no case asked) for each of ``columns``: capabilities, or
    :data:`EVERY` and then the numbers of runs as texts.
    """

    columns: Sequence[str]
    rows: Mapping[Place, Sequence[CapabilityCell | None]]


def every_case(run: Run) -> list[CapabilityCell]:
    """A cell for each implementation and backend that counts all of its cases."""
    found: dict[Place, CapabilityCell] = {}

    def of(implementation: str, backend: str) -> CapabilityCell:
        cell = CapabilityCell(implementation, backend, EVERY)
        return found.setdefault((implementation, backend), cell)

    for result in run.cases:
        kind = verdicts.FLAKY if result.verdict == verdicts.FLAKY else verdicts.kind(result.verdict)
        of(result.case.implementation, result.case.backend).add(result, kind)
    for case in (line.case for line in run.left_out if line.case is not None):
        of(case.implementation, case.backend).left_out += 1
    return [found[place] for place in sorted(found)]


def added(cells: Iterable[CapabilityCell]) -> CapabilityCell | None:
    """One cell that counts what all of ``cells`` count; ``None``: there are none."""
    total: CapabilityCell | None = None
    for cell in cells:
        if total is None:
            total = CapabilityCell(cell.implementation, cell.backend, cell.capability, Counter())
        total.counts += cell.counts
        total.left_out += cell.left_out
        total.broken += cell.broken
        total.worlds |= cell.worlds
        total.depths |= cell.depths
        total.factors |= cell.factors
    return total


def by_capability(runs: Sequence[Sequence[CapabilityCell]]) -> SiteMatrix:
    """Capabilities as columns; a cell counts the cases of all ``runs``."""
    found: dict[tuple[Place, str], list[CapabilityCell]] = {}
    for cells in runs:
        for cell in cells:
            if cell.capability != EVERY:
                place = cell.implementation, cell.backend
                found.setdefault((place, cell.capability), []).append(cell)
    present = {name for _, name in found}
    columns = [name for name in CAPABILITIES if name in present]
    places = sorted({place for place, _ in found})
    rows = {p: [added(found.get((p, name), ())) for name in columns] for p in places}
    return SiteMatrix(columns, rows)


def by_run(runs: Sequence[Sequence[CapabilityCell]], capability: str) -> SiteMatrix:
    """Runs as columns, for one ``capability`` or :data:`EVERY`."""
    found = [
        {(cell.implementation, cell.backend): cell for cell in cells if cell.capability == name}
        for cells, name in ((cells, capability) for cells in runs)
    ]
    places = sorted({place for cells in found for place in cells})
    rows = {place: [cells.get(place) for cells in found] for place in places}
    return SiteMatrix([str(number) for number in range(len(runs))], rows)


def text(cell: CapabilityCell) -> str:
    """The number in a cell: cases that were judged, and before it those that broke."""
    style = look(cell.state)
    if style == "fail":
        return f"{len(cell.broken) or 1}/{cell.judged}"
    return str(cell.judged or cell.counts.total() or cell.left_out)


def link(implementation: str, backend: str = "", capability: str = "") -> str:
    """The address of these cases, from the top of the site."""
    given = {"system": implementation, "backend": backend, "capability": capability}
    asked = [f"{key}={quote(value, safe='/:')}" for key, value in given.items() if value]
    return f"cases.html#{'&'.join(asked)}"
