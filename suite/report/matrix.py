"""The verdict matrix as rows: implementation and backend, a cell for every capability."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from suite import capability_matrix
from suite.capability_matrix import Cell
from suite.report.tables import Result


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


def matrix(results: Iterable[Result], left_out: Iterable[Result]) -> Matrix:
    """The matrix of all cases of a run."""
    found = capability_matrix.cells(results, left_out)
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
