"""The verdict matrix as rows: implementation and backend, a cell for every capability."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.report import capability_matrix
from shardproof.report.capability_matrix import CapabilityCell
from shardproof.runs.run_folder import Run
from shardproof.table import Table


@dataclass(frozen=True)
class MatrixRow:
    """One implementation on one backend; a cell for each column, ``None``: no case asked."""

    implementation: str
    backend: str
    cells: tuple[CapabilityCell | None, ...]


@dataclass(frozen=True)
class CapabilityMatrix:
    """Names of capabilities with what they say, and rows in the order of their names."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[MatrixRow, ...]

    def table(self) -> Table:
        """The matrix as a table of words; notes say what each capability is."""
        rows = [
            (row.implementation, row.backend, *("" if c is None else c.text for c in row.cells))
            for row in self.rows
        ]
        headings = ("implementation", "backend", *(name for name, _ in self.columns))
        notes = tuple(f"- {name}: {about}" for name, about in self.columns)
        return Table("Capabilities", headings, rows, notes=notes)


def cells(run: Run) -> list[CapabilityCell]:
    """Every cell that a case of ``run`` says something about."""
    return capability_matrix.cells(run.cases, run.left_out)


def matrix(run: Run) -> CapabilityMatrix:
    """The matrix of all cases of a run."""
    there = cells(run)
    names = capability_matrix.columns(there)
    by_place = {(cell.implementation, cell.backend, cell.capability): cell for cell in there}
    places = sorted({(cell.implementation, cell.backend) for cell in there})
    return CapabilityMatrix(
        tuple((name, capability_matrix.CAPABILITIES[name]) for name in names),
        tuple(
            MatrixRow(*place, tuple(by_place.get((*place, name)) for name in names))
            for place in places
        ),
    )
