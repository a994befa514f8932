"""The vertical axis of efficiencies: a line for every fifth, and one for the target."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

from shardproof.report.drawings import svg

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
