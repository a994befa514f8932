"""The part of a report about a cluster: bytes between nodes with their formula, memory by node."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shardproof.checks.results import CaseResult
from shardproof.report.drawings.bars import CLASSES
from shardproof.report.memory import precision_of
from shardproof.report.section import Section, rendered
from shardproof.report.tables import Figures, whole
from shardproof.runs.run_folder import Run
from shardproof.scenarios.cells import mesh_name
from shardproof.table import Mark, Table

_TRAFFIC = ("implementation", "mesh", "axis", "lies", "operation", "inside", "between", "formula")
_MEMORY = (
    *("implementation", "optimizer", "precision", "mesh"),
    *("node", "ranks", "held", "formula"),
)


@dataclass(frozen=True)
class Nodes(Section):
    """The memory on each node, and the bytes between nodes."""

    anchor, title = "nodes", "Nodes"

    tables: Sequence[Table]

    def html(self) -> Markup:
        return rendered(Path(__file__).parent / "templates/nodes.html", tables=self.tables)

    def markdown(self) -> Iterator[str]:
        yield from (table.section(2) for table in self.tables)


def sections(run: Run) -> list[Section]:
    """The section, if a case of ``run`` has anything to tell."""
    return [Nodes(found)] if (found := tables(run)) else []


def tables(run: Run) -> list[Table]:
    """Those that have rows."""
    return [table for table in (traffic(run.cases), memory(run)) if table.rows]


def traffic(results: Iterable[CaseResult]) -> Table:
    """A row for each system, mesh, axis and operation: bytes of the last step, over all ranks."""
    groups: dict[tuple[str, ...], list[Figures]] = defaultdict(list)
    for result in results:
        case = result.case
        for row in result.figures("traffic").get("between_nodes", ()):
            sizes = (case.mesh.get(axis, 1) for axis in row["axis"].split("+"))
            axis = f"{row['axis']} ({'x'.join(map(str, sizes))})"
            place = (case.system, mesh_name(case.mesh.items()), axis)
            groups[*place, row["lies"], row["operation"]].append(row)
    rows, marks = [], list[Mark]()
    for key, members in sorted(groups.items()):
        total, across = (
            sum(Fraction(row[name]) for row in members) for name in ("bytes", "across")
        )
        promised = [row["promised"] for row in members if row.get("promised") is not None]
        formula = sum(map(Fraction, promised)) if len(promised) == len(members) else None
        other = "not promised" if formula is None else whole(Fraction(formula))
        same = "= formula" if formula == across else other
        rows.append((*key, whole(Fraction(total - across)), whole(Fraction(across)), same))
        marks.append("bad" if formula not in (None, across) else "")
    note = (
        "Of N ranks on m nodes (m - 1)/(N - 1) of a collective's bytes have to cross; of messages "
        "those whose ends lie apart."
    )
    return Table("Bytes inside nodes and between them", _TRAFFIC, rows, marks, (note,), "lllllrrl")


def memory(run: Run) -> Table:
    """Resident bytes of model state on each node: those of its ranks, added up."""
    told: Any = run.header.last.cluster or {}
    nodes = [node for node in told.get("nodes", ()) if isinstance(node, dict) and "ranks" in node]
    rows: set[tuple[str, ...]] = set()
    for result, node in itertools.product(run.cases if len(nodes) > 1 else (), nodes):
        figures, case = result.figures("memory"), result.case
        ranks = [str(r) for r in node["ranks"] if str(r) in figures.get("resident", {})]
        if not ranks:
            continue
        held, promised = (_bytes(figures.get(name, {}), ranks) for name in ("resident", "promised"))
        other = f"{promised:,}" if promised else "not promised"
        system = case.system, case.optimizer.name, precision_of(case), mesh_name(case.mesh.items())
        place = node["name"], ", ".join(ranks)
        rows.add((*system, *place, f"{held:,}", "= formula" if held == promised else other))
    return Table("Resident bytes of model state by node", _MEMORY, sorted(rows), align="llllllrl")


def _bytes(by_rank: Figures, ranks: Iterable[str]) -> int:
    devices = [by_rank.get(rank, {}).get("device", {}) for rank in ranks]
    return sum(device.get(kind, 0) for device in devices for kind in CLASSES)
