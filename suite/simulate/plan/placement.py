"""A picture of the placement in text: rank to node, and to its place along each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from shardproof.table import Table

#: Lines of the picture; the rest is counted.
_MOST_LINES = 12


def placement(mesh: Mapping[str, int], node: int) -> Table:
    """A line for each node, or for several in a row that differ along one axis only.

    ``2-5`` of an axis: the ranks of the node have these places, in this order, the last axis
    fastest.
    """
    names = [name for name, size in mesh.items() if size > 1] or [*mesh][-1:]
    world = math.prod(mesh.values())
    nodes = [
        [_places(mesh, rank) for rank in range(first, min(first + node, world))]
        for first in range(0, world, node)
    ]
    # The places of a node along each axis, in order and once each.
    lines = [
        tuple(tuple(dict.fromkeys(place[name] for place in of)) for name in names) for of in nodes
    ]
    rows = []
    for first, last, spans in _runs(lines):
        ranks = f"{first * node}-{min((last + 1) * node, world) - 1}"
        numbers = f"{first}" if first == last else f"{first}-{last}"
        rows.append((numbers, ranks, *map(_span, spans)))
    left = len(rows) - _MOST_LINES
    notes = [f"and {left} more lines, alike"] if left > 0 else []
    notes.append("a-b: places a to b; nodes on one line take them in turn, the last axis fastest")
    title = f"Placement: {world:,} ranks, {node} to a node"
    align = "r" * (2 + len(names))
    return Table(title, ("node", "ranks", *names), rows[:_MOST_LINES], notes=notes, align=align)


def _places(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    found = {}
    for name, size in reversed([*mesh.items()]):
        rank, found[name] = divmod(rank, size)
    return found


_Line = Sequence[Sequence[int]]


def _runs(lines: Sequence[_Line]) -> Iterator[tuple[int, int, list[list[int]]]]:
    """First and last node of neighbours that differ along one axis only, and their places."""
    first = 0
    while first < len(lines):
        spans, last, along = [list(places) for places in lines[first]], first, -1
        while last + 1 < len(lines):
            differ = [n for n, own in enumerate(lines[last + 1]) if own != lines[last][n]]
            # An axis that begins again, or a second one that moves, begins a line.
            if len(differ) != 1 or along not in (-1, differ[0]):
                break
            new = lines[last + 1][differ[0]]
            if new[0] != spans[differ[0]][-1] + 1:
                break
            along = differ[0]
            spans[along] += new
            last += 1
        yield first, last, spans
        first = last + 1


def _span(places: Sequence[int]) -> str:
    return f"{places[0]}" if len(places) == 1 else f"{places[0]}-{places[-1]}"
