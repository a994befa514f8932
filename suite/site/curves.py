"""Curves over a series of runs or over ranks: points with intervals, drawn as inline SVG.

Each line has a colour and a dash pattern of its own, a mark at each point and a name in the legend,
so that nothing depends on colours.  The description of a drawing has all of its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from shardproof.compare.exact_figures import number
from shardproof.compare.snapshot import Entry, Sample, Snapshot
from shardproof.report.drawings import svg
from shardproof.site.series import Move
from shardproof.table import grouped

_WIDTH, _PLOT, _LEFT, _RIGHT, _TOP = 330.0, 150.0, 58.0, 12.0, 12.0
_LEGEND_ROW = 15.0
#: Lines of one drawing, and drawings of one page; more are in the tables.
MOST_LINES, MOST = 7, 48
#: Intervals are those that 95 % of measurements like these contain (normal approximation: what a
#: verdict depends on is computed by the wing that measured it).
_NORMAL = 1.96


@dataclass(frozen=True)
class Point:
    """A value at a place on the horizontal axis, with the ends of its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    """A named line; ``is_modelled``: its values were not measured."""

    name: str
    points: Sequence[Point]
    is_modelled: bool = False


@dataclass(frozen=True)
class Panel:
    """A drawing and its heading."""

    heading: str
    image: Markup


def chart(
    heading: str, ticks: Mapping[float, str], axis: str, curves: Sequence[Curve], log: bool = False
) -> Panel:
    """``curves`` over ``axis``, which has labels at ``ticks``; ``log``: by equal ratios."""
    shown = [curve for curve in curves if curve.points][:MOST_LINES]
    ys = [end for c in shown for p in c.points for end in (p.y, p.low, p.high) if end is not None]
    y = _scale(min(ys, default=0.0), max(ys, default=1.0))
    ends = min(ticks), max(ticks)
    x = svg.PixelScale(*ends, _LEFT + 10, _WIDTH - _RIGHT - 10, log=log and ends[0] > 0)
    parts = [*_grid(y), *_ticks(x, ticks, axis)]
    for at, curve in enumerate(shown):
        parts += _line(x, y, curve, at)
    height = _TOP + _PLOT + 44 + _LEGEND_ROW * len(shown)
    for at, curve in enumerate(shown):
        parts += _legend(curve, at)
    told = (f"{c.name}: {', '.join(_told(p, ticks) for p in c.points)}." for c in shown)
    more = len(curves) - len(shown)
    text = " ".join([*told, *([f"{more} more are in the table."] if more > 0 else [])])
    return Panel(heading, svg.drawing(heading, text, (_WIDTH, height), parts, "chart"))


def _scale(low: float, high: float) -> svg.PixelScale:
    """From the top of the plot to its bottom, by round numbers around ``low`` and ``high``."""
    low = 0.0 if 0 <= low <= high / 2 else low
    step = _step((high - low) or abs(high) or 1.0)
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    return svg.PixelScale(bottom, top if top > bottom else bottom + step, _TOP + _PLOT, _TOP)


def _step(span: float) -> float:
    """A round number of which 3 to 6 cover ``span``."""
    power = 10.0 ** math.floor(math.log10(span))
    return next(part * power for part in (0.2, 0.5, 1.0, 2.0) if span / (part * power) <= 6)


def _grid(y: svg.PixelScale) -> Iterator[Markup]:
    step = _step(y.high - y.low)
    for part in range(round((y.high - y.low) / step) + 1):
        value = y.low + step * part
        yield svg.line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), "grid")
        yield svg.text(_LEFT - 6, y(value) + 4, _number(value), "tick-label", "end")


def _ticks(x: svg.PixelScale, ticks: Mapping[float, str], axis: str) -> Iterator[Markup]:
    room = -math.inf
    for value, label in sorted(ticks.items()):
        half = 3.4 * len(label)
        yield svg.line(x(value), _TOP + _PLOT, x(value), _TOP + _PLOT + 4, "axis")
        if x(value) - half > room:  # labels that would lie over each other are left out
            yield svg.text(x(value), _TOP + _PLOT + 16, label, "tick-label", "middle")
            room = x(value) + half + 6
    yield svg.text((_LEFT + _WIDTH - _RIGHT) / 2, _TOP + _PLOT + 31, axis, "axis-label", "middle")


def _line(x: svg.PixelScale, y: svg.PixelScale, curve: Curve, at: int) -> Iterator[Markup]:
    spots = [(x(point.x), y(point.y)) for point in curve.points]
    stroke, fill = _style(curve, at)
    if len(spots) > 1:
        yield svg.path(spots, stroke)
    for point, (across, down) in zip(curve.points, spots, strict=True):
        if point.low is not None and point.high is not None:
            yield svg.line(across, y(point.low), across, y(point.high), stroke)
        yield _mark(across, down, at, fill)


def _legend(curve: Curve, at: int) -> Iterator[Markup]:
    row = _TOP + _PLOT + 44 + _LEGEND_ROW * at
    stroke, fill = _style(curve, at)
    yield svg.line(8, row, 26, row, stroke)
    yield _mark(17, row, at, fill)
    name = curve.name
    yield svg.text(32, row + 4, name if len(name) <= 46 else f"{name[:43]}...")


def _style(curve: Curve, at: int) -> tuple[str, str]:
    """The classes of a line and of its marks."""
    return ("s-modelled", "m-modelled") if curve.is_modelled else (f"w-{at}", f"v-{at}")


def _mark(x: float, y: float, at: int, class_: str) -> Markup:
    """A circle, or a polygon with as many corners as no other line has."""
    if not at:
        return svg.element("circle", cx=x, cy=y, r=2.8, class_=class_)
    corners, turns = at + 2, range(at + 3)
    angles = [2 * math.pi * turn / corners - math.pi / 2 for turn in turns]
    return svg.path([(x + 3.6 * math.cos(a), y + 3.6 * math.sin(a)) for a in angles], class_)


def _told(point: Point, ticks: Mapping[float, str]) -> str:
    interval = ""
    if point.low is not None and point.high is not None:
        interval = f" ({_number(point.low)} to {_number(point.high)})"
    return f"{ticks.get(point.x, point.x)} {_number(point.y)}{interval}"


def _number(value: float) -> str:
    if abs(value) >= 1000:
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def sample_point(x: float, sample: Sample) -> Point:
    """The ratio of a timed result with its 95 % interval; one block has no interval."""
    if sample.blocks < 2:
        return Point(x, sample.ratio)
    half = _NORMAL * sample.error
    return Point(
        x, sample.ratio, math.exp(sample.mean - half), math.exp(min(sample.mean + half, 50.0))
    )


# ------------------------------------------------------------------------------------ over ranks


def over_ranks(runs: Sequence[Snapshot]) -> list[Panel]:
    """A drawing for each timed system of each run: its ratios by the number of ranks."""
    panels = []
    for run in runs:
        members = grouped((_without_world(entry), entry) for entry in run.timed.values())
        for name, entries in sorted(members.items()):
            ordered = sorted(entries, key=lambda entry: entry.world)
            if len({entry.world for entry in ordered}) > 1 and (curves := _of_ranks(ordered)):
                ticks = {float(e.world): f"{e.world:,}" for e in ordered}
                heading = f"{name} on {run.hardware}"
                panels.append(chart(heading, ticks, "ranks", curves, log=True))
    return panels


def _without_world(entry: Entry) -> str:
    """The id of a timed result without its number of ranks."""
    parts = entry.id.split("::")
    kept = [part for part in parts if part != str(entry.world)]
    return " ".join(kept[1:] if len(kept) > 1 else kept)


def _of_ranks(entries: Sequence[Entry]) -> list[Curve]:
    names = dict.fromkeys(name for entry in entries for name in entry.samples)
    curves = [
        Curve(
            name,
            [sample_point(e.world, e.samples[name]) for e in entries if name in e.samples],
        )
        for name in names
    ]
    # Figures of the same kind that were computed, such as `modelled efficiency`.
    kinds = tuple({name.split(" (")[0] for name in names})
    models = dict.fromkeys(n for e in entries for n in e.beside if kinds and n.endswith(kinds))
    for name in models:
        points = [Point(e.world, e.beside[name]) for e in entries if name in e.beside]
        curves.append(Curve(name, points, is_modelled=True))
    return curves


# ------------------------------------------------------------------------------------- over runs


def over_runs(runs: Sequence[Snapshot], moves: Sequence[Move]) -> list[Panel]:
    """Drawings of each machine that has several runs: verdicts, figures that changed, ratios."""
    panels: list[Panel] = []
    for hardware, members in grouped((run.hardware, run) for run in runs).items():
        if len(members) > 1:
            ticks = {float(at): _tick(run) for at, run in enumerate(members)}
            for heading, curves in _of_machine(members, moves):
                panels.append(chart(f"{heading}, {hardware}", ticks, "runs, oldest first", curves))
    return panels


def _tick(run: Snapshot) -> str:
    return run.versions[-1].commit[:7] or run.taken[5:]


def _of_machine(
    runs: Sequence[Snapshot], moves: Sequence[Move]
) -> Iterator[tuple[str, list[Curve]]]:
    words = sorted({entry.verdict for run in runs for entry in run.cases.values()})
    counts = [
        (word, [sum(e.verdict == word for e in run.cases.values()) for run in runs])
        for word in words
    ]
    if counts:
        curves = [
            Curve(word, [Point(at, n) for at, n in enumerate(found)]) for word, found in counts
        ]
        yield "Cases by verdict", curves
    if any(run.kills for run in runs):
        killed = [(at, run.kills) for at, run in enumerate(runs) if run.kills]
        points = [Point(at, sum(kills.values())) for at, kills in killed]
        planted = [Point(at, len(kills)) for at, kills in killed]
        yield "Planted faults", [Curve("killed", points), Curve("planted", planted)]
    for name, figure in dict.fromkeys((move.id, move.figure) for move in moves):
        points = [
            Point(at, float(value))
            for at, run in enumerate(runs)
            if name in run.results
            and (value := number(run.results[name].figures.get(figure))) is not None
        ]
        if len(points) > 1 and len({point.y for point in points}) > 1:
            yield f"{figure} of {name}", [Curve(figure, points)]
    yield from _ratios(runs)


def _ratios(runs: Sequence[Snapshot]) -> Iterator[tuple[str, list[Curve]]]:
    found = grouped(
        (name, (ratio, sample_point(at, sample)))
        for at, run in enumerate(runs)
        for name, entry in run.timed.items()
        for ratio, sample in entry.samples.items()
    )
    for name, points in sorted(found.items()):
        curves = [Curve(ratio, of_ratio) for ratio, of_ratio in grouped(points).items()]
        if any(len(curve.points) > 1 for curve in curves):
            yield f"Ratios of {name}", curves


def limited(panels: Iterable[Panel]) -> tuple[list[Panel], int]:
    """The first :data:`MOST` drawings, and how many more there are."""
    every = list(panels)
    return every[:MOST], len(every[MOST:])
