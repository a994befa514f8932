"""Drawing of losses over steps: the median over seeds, with the band from lowest to highest.

One panel for each method, with the dense system's band behind it.  A run that has reached the
target stays at its last loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from shardproof.report.drawings import svg

#: By seed, the loss after every few steps.
Curves = Sequence[Sequence[float]]
_WIDTH, _HEIGHT, _GAP, _COLUMNS = 250.0, 170.0, 12.0, 4
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 8.0, 22.0, 26.0
#: For a file that stands alone: no page gives it colours.
_STYLE = """
text { font: 10px system-ui, sans-serif; fill: #444; }
.name { font-size: 11px; font-weight: 600; }
.axis { stroke: #888; } .target { stroke: #888; stroke-dasharray: 3 3; }
.dense { fill: #8886; } .dense-median { fill: none; stroke: #777; stroke-width: 1.5; }
.method { fill: #1a73e84d; } .method-median { fill: none; stroke: #1a73e8; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) { text { fill: #ccc; } .method-median { stroke: #8ab4f8; } }
"""


def bands(curves: Curves, every: int, steps: int) -> list[tuple[int, float, float, float]]:
    """(step, lowest, median, highest) at every evaluation up to ``steps``."""
    rows = []
    for index in range(steps // every):
        at = [curve[min(index, len(curve) - 1)] for curve in curves if curve]
        finite = sorted(loss if math.isfinite(loss) else math.inf for loss in at)
        rows.append(((index + 1) * every, finite[0], statistics.median(finite), finite[-1]))
    return rows


def drawing(
    title: str, dense: Curves, methods: Mapping[str, Curves], every: int, target: float
) -> str:
    """The whole SVG file."""
    longest = [max(map(len, curves)) for curves in (dense, *methods.values())]
    # Who needs far longer than the dense system is cut off: the beginning is what differs.
    steps = every * min(max(longest), 3 * longest[0])
    starts = [curve[0] for curve in dense if curve and math.isfinite(curve[0])]
    scales = (target * 0.7, max(starts) * 1.5)
    rows = -(-len(methods) // _COLUMNS)
    size = _COLUMNS * (_WIDTH + _GAP), rows * (_HEIGHT + _GAP)
    parts: list[Markup] = [svg.element("style", Markup(_STYLE))]
    for number, (name, curves) in enumerate(methods.items()):
        down, across = divmod(number, _COLUMNS)
        panel = _panel(name, dense, curves, every, steps, target, scales)
        at = f"translate({across * (_WIDTH + _GAP):g} {down * (_HEIGHT + _GAP):g})"
        parts.append(svg.element("g", *panel, transform=at))
    names = ", ".join(methods)
    text = f"Loss over steps of {names}, each with dense training; bands over seeds."
    drawn = svg.drawing(title, text, size, parts, "bands")
    return str(drawn).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + "\n"


def _panel(
    name: str,
    dense: Curves,
    curves: Curves,
    every: int,
    steps: int,
    target: float,
    scales: tuple[float, float],
) -> list[Markup]:
    x = svg.PixelScale(0, steps, _LEFT, _WIDTH - _RIGHT)
    y = svg.PixelScale(*scales, _HEIGHT - _BOTTOM, _TOP, log=True)
    parts = [svg.text(_LEFT, 12, name, "name")]
    for own, kind in ((dense, "dense"), (curves, "method")):
        band = bands(own, every, steps)
        lower = [(x(step), y(low)) for step, low, _, _ in band]
        upper = [(x(step), y(high)) for step, _, _, high in band]
        parts.append(svg.path([*lower, *reversed(upper)], kind))
        parts.append(
            svg.path([(x(step), y(middle)) for step, _, middle, _ in band], f"{kind}-median")
        )
    parts.append(svg.line(_LEFT, y(target), _WIDTH - _RIGHT, y(target), "target"))
    parts.append(svg.line(_LEFT, _HEIGHT - _BOTTOM, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, "axis"))
    parts.append(svg.line(_LEFT, _TOP, _LEFT, _HEIGHT - _BOTTOM, "axis"))
    for loss in (target, scales[1]):
        parts.append(svg.text(_LEFT - 4, y(loss) + 3, f"{loss:.2g}", "", "end"))
    for step in (0, steps):
        anchor = "start" if not step else "end"
        parts.append(svg.text(x(step), _HEIGHT - _BOTTOM + 13, f"{step}", "", anchor))
    parts.append(svg.text(x(steps / 2), _HEIGHT - _BOTTOM + 13, "steps", "", "middle"))
    return parts
