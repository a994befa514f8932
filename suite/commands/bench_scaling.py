"""``shardproof bench scaling/strong``: which cells options choose, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardproof.bench import sides
from shardproof.bench.scaling import matrix
from shardproof.bench.subjects import Cell
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.scenarios.load import timed
from shardproof.scenarios.select import compile_expression


def files(names: Sequence[str]) -> list[Path]:
    """The scaling scenarios that ``names`` name; none if they are all of pairs.

    :raises SelectionError: an unknown name, or scenarios of both kinds.
    """
    paths = sides.files(names)
    scaling = [path for path in paths if timed(path) == "scaling"]
    if scaling and len(scaling) < len(paths):
        remedy = "name scenarios of pairs in one command and those of scaling in another"
        raise SelectionError(Problem("two kinds of scenario", remedy, " ".join(names)))
    return scaling


def chosen(
    paths: Sequence[Path],
    expression: str,
    backend: str,
    world: int | None,
    blocks: int | None,
    launches: int | None,
    deadline: float,
) -> list[Cell]:
    """The cells of scaling scenarios, as options change and filter them.

    :raises InputError: faulty files, options that do not fit, or nothing that matches.
    """
    cells = matrix.read(paths)
    if backend:
        moved = [replace(cell, backend=backend) for cell in cells]
        cells = list({cell.id: cell for cell in moved}.values())
    if world is not None:
        cells = matrix.with_worlds(cells, [world])
    changed = []
    for cell in cells:
        count = blocks or cell.blocks
        many = launches or min(cell.launches, count)
        changed.append(replace(cell, blocks=count, launches=many, deadline=deadline))
        matrix.check(changed[-1])
    matches = compile_expression(expression)
    matching = [cell for cell in changed if matches(cell.id)]
    if not matching:
        remedy = nearest(expression, [cell.title for cell in changed], "systems")
        raise SelectionError(Problem("-k matches no cell", remedy, expression))
    return matching
