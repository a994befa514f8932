"""Bus bandwidth over bytes, both on logarithmic axes: one panel for each operation and place.

Each algorithm has a colour, a dash and a mark of its own; the legend stands below each drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from shardproof.bench.collective_times import Timed, text
from shardproof.bench.drawings.markers import marker
from shardproof.report.drawings import svg
from shardproof.table import grouped

_MARKS = ("circle", "square", "diamond")
_WIDTH = 330.0
_LEFT, _RIGHT, _TOP, _PLOT = 52.0, 14.0, 30.0, 190.0
_ROW = 15.0
#: Algorithms that have a look of their own.
LOOKS = 7


def panels(lines: Iterable[Timed]) -> list[tuple[str, Markup]]:
    """Headings and drawings."""
    groups = grouped(((line.operation, line.backend, line.world), line) for line in lines)
    return [
        (f"{operation} on {backend}, {world} ranks", _draw(members))
        for (operation, backend, world), members in groups.items()
    ]


def _draw(members: Sequence[Timed]) -> Markup:
    rates = {a.algorithm: {n: n * a.factor() / s for n, s in a.medians.items()} for a in members}
    sizes = sorted({size for points in rates.values() for size in points})
    values = [rate for points in rates.values() for rate in points.values()]
    low = 10.0 ** math.floor(math.log10(min(values)))
    high = 10.0 ** math.ceil(math.log10(max(values)))
    bottom = _TOP + _PLOT
    x = svg.PixelScale(sizes[0], max(sizes[-1], sizes[0] * 2), _LEFT, _WIDTH - _RIGHT, log=True)
    y = svg.PixelScale(low, high, bottom, _TOP, log=True)
    parts = []
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at, label = y(10.0**power), _rate(10.0**power)
        parts.append(svg.line(_LEFT, at, _WIDTH - _RIGHT, at, "grid"))
        parts.append(svg.text(_LEFT - 6, at + 4, label, "tick-label", "end"))
    for size in sizes[:: max(1, (len(sizes) - 1) // 3)]:
        parts.append(svg.line(x(size), bottom, x(size), bottom + 4, "axis"))
        anchor = "end" if size == sizes[-1] else "middle"
        parts.append(svg.text(x(size), bottom + 16, text(size), "tick-label", anchor))
    parts.append(svg.text(_LEFT - 44, 12, "bus bandwidth, B/s", "axis-label"))
    for number, (name, points) in enumerate(rates.items()):
        look, mark = number % LOOKS, _MARKS[number % len(_MARKS)]
        ordered = [(x(n), y(rate)) for n, rate in sorted(points.items())]
        parts.append(svg.path(ordered, f"w-{look}"))
        parts += [marker(mark, *point, f"v-{look}", 2.4) for point in ordered]
        row = bottom + 34 + _ROW * (number // 2)
        left = _LEFT - 44 + 165 * (number % 2)
        parts.append(svg.path([(left, row - 4), (left + 22, row - 4)], f"w-{look}"))
        parts.append(marker(mark, left + 11, row - 4, f"v-{look}", 2.8))
        parts.append(svg.text(left + 28, row, name))
    first = members[0]
    title = f"Bus bandwidth of {first.operation} on {first.backend}, {first.world} ranks"
    best = {name: _rate(max(points.values())) for name, points in rates.items()}
    says = " ".join(f"{name}: {rate}B/s at best." for name, rate in best.items())
    height = bottom + 34 + _ROW * ((len(rates) + 1) // 2)
    return svg.drawing(title, says, (_WIDTH, height), parts, "chart")


def _rate(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:g}"[:5] + unit
    return f"{value:g}"
