"""The verdict matrix as rows: implementation and backend, a cell for every capability."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.report import capability_matrix
from shardproof.report.capability_matrix import Cell
from shardproof.runs.run_folder import Run


@dataclass(frozen=True)
class MatrixRow:
    """One implementation on one backend; a cell for each column, ``None``: no case asked."""

    implementation: str
    backend: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Matrix:
    """Names of capabilities with what they say, and rows in the order of their names."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[MatrixRow, ...]


def cells(run: Run) -> list[Cell]:
    """Every cell that a case of ``run`` says something about."""
    return capability_matrix.cells(run.cases, run.left_out)


def matrix(run: Run) -> Matrix:
    """The matrix of all cases of a run."""
    found = cells(run)
    names = capability_matrix.columns(found)
    by_place = {(cell.implementation, cell.backend, cell.capability): cell for cell in found}
    places = sorted({(cell.implementation, cell.backend) for cell in found})
    return Matrix(
        tuple((name, capability_matrix.CAPABILITIES[name]) for name in names),
        tuple(
            MatrixRow(*place, tuple(by_place.get((*place, name)) for name in names))
            for place in places
        ),
    )
