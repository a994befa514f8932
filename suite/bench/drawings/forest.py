"""Comparisons of times, drawn: A over B with its interval, next to A over its own twin.

One axis for all rows, in equal ratios.  The band is the margin within which a difference does not
matter; the square is A over B with its 95 % interval, the grey line below it A beside its twin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from shardproof.bench import tables as times
from shardproof.bench.drawings.markers import marker
from shardproof.bench.lines import PairFigures, PairLine
from shardproof.report.drawings import svg
from shardproof.report.looks import chip
from shardproof.table import Row, Table, TableCell

#: Beyond these ratios an arrow stands.
_LEAST, _MOST = 0.125, 8.0
_WIDTH, _HEIGHT, _EDGE = 300.0, 34.0, 14.0
_TICKS = (0.125, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)


def table(lines: Sequence[PairLine]) -> Table:
    """Every comparison in the order in which they were timed, with its drawing."""
    scale = _scale(lines)
    both = "faster / slower"
    drawn = TableCell(both, html=f"{both}{axis(lines) or ''}", style_class="unsorted")
    body: list[Row] = []
    for line, (name, verdict, *others) in zip(lines, times.rows(lines), strict=True):
        image = "-" if line.figures is None else str(_draw(line, line.figures, scale))
        body.append((name, chip(verdict), TableCell("", html=image, style_class="image"), *others))
    return Table("Comparisons of times", (*times.HEADINGS[:2], drawn, *times.HEADINGS[2:]), body)


def axis(lines: Sequence[PairLine]) -> Markup | None:
    """The axis that all drawings share (``None``: there is none)."""
    if all(line.figures is None for line in lines):
        return None
    scale = _scale(lines)
    parts, last = [], -100.0
    for value in _TICKS:
        at = scale(value)
        beside_one = value != 1 and abs(at - scale(1.0)) < 26
        clear = value == 1 or at - last > 30
        if scale.low <= value <= scale.high and clear and not beside_one:
            parts.append(svg.line(at, 16, at, 22, "axis"))
            parts.append(svg.text(at, 12, f"{value:g}", "tick-label", "middle"))
            last = at
    title = "Axis of the ratios A over B: left of 1 A is faster, right of 1 slower"
    text = f"From {scale.low:.2f} to {scale.high:.2f}."
    return svg.drawing(title, text, (_WIDTH, 22), parts, "ruler")


def _scale(lines: Iterable[PairLine]) -> svg.PixelScale:
    """Symmetric around 1, as far as the intervals reach."""
    figures = [line.figures for line in lines if line.figures is not None]
    intervals = [*figures, *(each.aa for each in figures if each.aa is not None)]
    ends = [end for one in intervals for end in (one.low, one.high, one.ratio)]
    reach = max([0.12, *(abs(math.log(end)) for end in ends if end > 0)])
    reach = min(reach * 1.08, math.log(_MOST))
    return svg.PixelScale(math.exp(-reach), math.exp(reach), _EDGE, _WIDTH - _EDGE, log=True)


def _draw(line: PairLine, figures: PairFigures, scale: svg.PixelScale) -> Markup:
    ratio, low, high, margin = figures.ratio, figures.low, figures.high, figures.margin
    band = scale(1 / (1 + margin)), scale(1 + margin)
    parts = [
        svg.rect(band[0], 0, band[1] - band[0], _HEIGHT, "band"),
        svg.line(scale(1.0), 0, scale(1.0), _HEIGHT, "one"),
    ]
    same, twins = figures.aa, ""
    if same is not None:
        parts.append(svg.line(scale(same.low), 27, scale(same.high), 27, "twin"))
        twins = f" A over its own twin {same.ratio:.3f} ({same.low:.3f} to {same.high:.3f})."
    look = {"faster": "i-good", "slower": "i-bad"}.get(line.verdict, "i-plain")
    parts.append(svg.line(scale(low), 14, scale(high), 14, look))
    parts += [svg.line(scale(end), 9, scale(end), 19, look) for end in (low, high)]
    parts.append(marker("square", scale(ratio), 14, look, 5.0))
    title = f"{line.pair.a.implementation} over {line.pair.b.implementation}: {line.verdict}"
    interval = f"95 % interval {low:.3f} to {high:.3f}"
    text = f"Ratio of times {ratio:.3f}, {interval}; margin {margin:.1%}.{twins}"
    return svg.drawing(title, text, (_WIDTH, _HEIGHT), parts, "forest")
