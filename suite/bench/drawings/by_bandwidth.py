"""Efficiency by the bandwidth between nodes: one panel for each scaling scenario and world.

A filled mark with its 95 % interval is measured, against the plain program; a hollow one beside it
is modelled from what was probed over the same network.  Each system has a colour and a mark of its
own; the legend stands below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from shardproof.bench.drawings.bandwidth import LOOKS
from shardproof.bench.drawings.markers import marker
from shardproof.bench.lines import CellLine
from shardproof.launch.nodes import bits_per_second
from shardproof.report.drawings import svg
from shardproof.table import grouped

#: Units of a drawing, and from its edges to the plot.
WIDTH, LEFT, RIGHT, TOP = 330.0, 42.0, 12.0, 14.0
_MOST = 2.0


def scale(shares: Iterable[float], bottom: float) -> svg.PixelScale:
    """From 0 at ``bottom`` to the fifth above 1 and all ``shares``, at most 200 %."""
    top = min(-(-max([1.0, *shares]) * 5 // 1) / 5, _MOST)
    return svg.PixelScale(0.0, top, bottom, TOP)


def across(y: svg.PixelScale, target: float) -> list[Markup]:
    """The lines of the fifths with their labels, and the ``target``."""
    right, parts = WIDTH - RIGHT, []
    for fifth in range(round(y.high * 5) + 1):
        at = y(fifth / 5)
        parts.append(svg.line(LEFT, at, right, at, "grid"))
        parts.append(svg.text(LEFT - 6, at + 4, f"{fifth / 5:.0%}", "tick-label", "end"))
    return [*parts, svg.line(LEFT, y(target), right, y(target), "target")]


_MARKS = ("circle", "square", "diamond")
_PLOT, _ROW = 190.0, 15.0


def panels(lines: Iterable[CellLine]) -> list[tuple[str, Markup]]:
    """Headings and drawings of cells between nodes that were measured at several bandwidths."""
    found = (line for line in lines if line.cell.bandwidth and line.efficiency is not None)
    groups = grouped(((line.cell.name, line.world), line) for line in found)
    return [
        (f"{name}: efficiency of {world} ranks by bandwidth", _draw(name, world, members))
        for (name, world), members in sorted(groups.items())
        if len(rates(members)) > 1
    ]


def rates(lines: Iterable[CellLine]) -> list[str]:
    """The bandwidths of ``lines``, the least first."""
    found = {line.cell.bandwidth for line in lines}
    return sorted(found, key=lambda text: bits_per_second(text) or float("inf"))


def _draw(name: str, world: int, members: Sequence[CellLine]) -> Markup:
    ordered, bottom = rates(members), TOP + _PLOT
    systems = list(dict.fromkeys(line.title for line in members))
    ends = [line.efficiency["plain"].high for line in members if line.efficiency is not None]
    models = [m for line in members if (m := line.modelled_efficiency) is not None]
    y = scale([*ends, *models], bottom)
    room = (WIDTH - LEFT - RIGHT) / len(ordered)
    parts = across(y, members[0].target)
    for place, rate in enumerate(ordered):
        middle = LEFT + room * (place + 0.5)
        parts.append(svg.text(middle, bottom + 16, rate, "tick-label", "middle"))
    for number, system in enumerate(systems):
        look, mark = number % LOOKS, _MARKS[number % len(_MARKS)]
        shift = 12.0 * (number - (len(systems) - 1) / 2)
        for line in members:
            if line.title != system or line.efficiency is None:
                continue
            x = LEFT + room * (ordered.index(line.cell.bandwidth) + 0.5) + shift
            found = line.efficiency["plain"]
            parts.append(svg.line(x, y(found.low), x, y(found.high), f"w-{look}"))
            parts.append(marker(mark, x, y(found.ratio), f"v-{look}", 2.8))
            if (modelled := line.modelled_efficiency) is not None:
                height = y(min(modelled, y.high))
                parts.append(marker("diamond", x + 5, height, "m-modelled", 2.2))
        row = bottom + 36 + _ROW * (number // 2)
        left = LEFT - 34 + 160 * (number % 2)
        parts.append(marker(mark, left + 6, row - 4, f"v-{look}", 2.8))
        parts.append(svg.text(left + 16, row, system))
    text = " ".join(_sentence(line) for line in members)
    height = bottom + 40 + _ROW * ((len(systems) + 1) // 2)
    title = f"Efficiency of {world} ranks by bandwidth, {name}"
    return svg.drawing(title, text, (WIDTH, height), parts, "chart")


def _sentence(line: CellLine) -> str:
    found, modelled = (line.efficiency or {})["plain"], line.modelled_efficiency
    beside = "" if modelled is None else f", modelled {modelled:.1%}"
    interval = f"{found.ratio:.1%} ({found.low:.1%} to {found.high:.1%})"
    return f"{line.title} at {line.cell.bandwidth}: {interval}{beside}."
