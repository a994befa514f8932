"""Scaling curves: efficiency over ranks, measured with intervals and modelled, with the target.

One panel for each mode, system and backend.  A filled mark is measured (with its 95 % interval)
against the plain program or against the wrapped one at one rank; a hollow one was measured with
fewer cores than ranks and decides nothing; a dashed line is modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from markupsafe import Markup

from shardproof.bench.drawings import by_bandwidth
from shardproof.bench.drawings.by_bandwidth import LEFT, RIGHT, WIDTH
from shardproof.bench.drawings.markers import marker
from shardproof.bench.lines import CellLine
from shardproof.bench.scaling import tables
from shardproof.report.drawings import svg
from shardproof.report.looks import chip
from shardproof.table import Table, grouped

#: What a curve is against, its mark and its name.
BASES = (("plain", "circle"), ("wrapped", "square"))
_HEIGHT, _BOTTOM = 240.0, 38.0


def table(lines: Sequence[CellLine]) -> Table:
    """The table of scaling with marks for verdicts, ordered by system and ranks."""
    ordered = sorted(
        lines, key=lambda line: (line.cell.name, line.title, line.cell.network, line.world)
    )
    made = tables.table(ordered, fold=False)
    rows = [[*row[:4], chip(str(row[4])), *row[5:]] for row in made.rows]
    return replace(made, rows=rows, align="lllrl" + "r" * 13, row_header=1)


def panels(lines: Iterable[CellLine]) -> list[tuple[str, Markup]]:
    """Headings and drawings."""
    groups = grouped(((one.cell.name, one.title, one.cell.network), one) for one in lines)
    return [
        (f"{name} on {backend}, {scenario} scaling", _draw(scenario, name, backend, members))
        for (scenario, name, backend), members in sorted(groups.items())
    ]


def _draw(scenario: str, name: str, backend: str, members: Sequence[CellLine]) -> Markup:
    ordered = sorted(members, key=lambda line: line.world)
    worlds = [line.world for line in ordered]
    highs = [found.high for line in ordered for found in (line.efficiency or {}).values()]
    models = [(line.world, line.modelled_efficiency) for line in ordered]
    modelled = [(world, model) for world, model in models if model is not None]
    x = svg.PixelScale(min(worlds), max(*worlds, 2), LEFT + 14, WIDTH - RIGHT - 14, log=True)
    y = by_bandwidth.scale([*highs, *(m for _, m in modelled)], _HEIGHT - _BOTTOM)
    target, label = y(ordered[0].target), f"target {ordered[0].target:.0%}"
    parts = [*by_bandwidth.across(y, ordered[0].target), *_worlds(x, worlds)]
    parts.append(svg.text(WIDTH - RIGHT, target - 4, label, "target-label", "end"))
    if modelled:
        parts.append(svg.path([(x(w), y(m)) for w, m in modelled], "s-modelled"))
        parts += [marker("diamond", x(w), y(m), "m-modelled", 2.6) for w, m in modelled]
    for shift, (base, mark) in zip((-4.0, 4.0), BASES, strict=True):
        for line in ordered:
            found = (line.efficiency or {}).get(base)
            if found is None:
                continue
            low, high = found.low, found.high
            at = x(line.world) + shift
            hollow = " hollow" if line.verdict == "oversubscribed" else ""
            parts.append(svg.line(at, y(low), at, y(high), f"s-{base}"))
            parts += [svg.line(at - 3, y(end), at + 3, y(end), f"s-{base}") for end in (low, high)]
            parts.append(marker(mark, at, y(found.ratio), f"m-{base}{hollow}", 2.8))
    title = f"{scenario.capitalize()} scaling of {name} on {backend}"
    text = " ".join(_sentence(line) for line in ordered)
    return svg.drawing(title, text, (WIDTH, _HEIGHT), parts, "chart")


def _sentence(line: CellLine) -> str:
    known = line.efficiency or {}
    parts = [
        f"{base} {known[base].ratio:.1%} ({known[base].low:.1%} to {known[base].high:.1%})"
        for base, _ in BASES
        if base in known
    ]
    model = line.modelled_efficiency
    parts += [] if model is None else [f"modelled {model:.1%}"]
    return f"{line.world} ranks: {', '.join(parts) or 'no figure'} ({line.verdict})."


def _worlds(x: svg.PixelScale, worlds: Sequence[int]) -> list[Markup]:
    parts, room = [], WIDTH
    for world in sorted(set(worlds), reverse=True):  # the largest world has its label
        at = x(world)
        parts.append(svg.line(at, _HEIGHT - _BOTTOM, at, _HEIGHT - _BOTTOM + 4, "axis"))
        label = f"{world:,}"
        half = 3.4 * len(label)
        if at + half <= room:
            parts.append(svg.text(at, _HEIGHT - _BOTTOM + 16, label, "tick-label", "middle"))
            room = at - half - 6
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(svg.text(middle, _HEIGHT - 6, "ranks", "axis-label", "middle"))
    return parts
