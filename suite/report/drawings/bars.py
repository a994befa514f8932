"""Bars of memory and traffic: what was held and sent, class by class, above what the formula says.

A memory bar's full length is whole copies of the model state (data parallelism with the same
options); a traffic bar's tick is the formula.  The upper half of a bar is measured, the lower half
the formula: where all holds they are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from markupsafe import Markup

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.report import memory
from shardproof.report.drawings import svg
from shardproof.report.tables import Figures, bytes_of, bytes_text, textbook, whole
from shardproof.table import Mark, Row, Table, TableCell, grouped

#: Classes of state, in the order in which they are stacked.
CLASSES = ("parameters", "masters", "gradients", "optimizer_state")
#: Operations, in the order in which they are stacked; others come last, alike.
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "send", "broadcast", "reduce")
_WIDTH, _HEIGHT = 300.0, 26.0


@dataclass(frozen=True)
class BarRow:
    """A row: its texts, and the drawing between the first and the others."""

    name: str
    cells: tuple[str, ...]
    image: Markup
    red: bool


def memory_table(results: Iterable[CaseResult]) -> Table:
    headings = ("optimizer", "precision", "ranks", "held", "formula", "whole copies", "less")
    return _table("Memory against formula", "held", headings, memory_bars(results))


def traffic_table(results: Iterable[CaseResult]) -> Table:
    headings = ("backend", "ranks", "sent", "formula", "times the textbook's")
    return _table("Traffic against formula", "sent", headings, traffic_bars(results))


def _table(title: str, verb: str, headings: Sequence[str], bars: Sequence[BarRow]) -> Table:
    rows: list[Row] = [
        (bar.name, TableCell("", html=str(bar.image), style_class="image"), *bar.cells)
        for bar in bars
    ]
    marks: list[Mark] = ["bad" if bar.red else "" for bar in bars]
    heading = TableCell(f"{verb} above, formula below", style_class="unsorted")
    return Table(title, ("implementation", heading, *headings), rows, marks)


def memory_bars(results: Iterable[CaseResult]) -> list[BarRow]:
    bars = []
    for cells, figures in memory.with_figures(results):
        full, limit = figures["bytes_whole"], figures["bytes_promised"]
        if not full:
            continue
        held, promised = _on_fullest_rank(figures)
        name, optimizer, precision, world = cells[:4]
        cost_model = "not promised" if limit is None else f"{limit:,}"
        by_class = ", ".join(f"{_plain(kind)} {size:,}" for kind, size in held.items())
        measured = cells[memory.MEASURED]
        title = f"Memory of {name}, {optimizer}, {precision}, {world} ranks"
        text = (
            f"Held {figures['bytes_held']:,} bytes ({by_class or 'nothing'}); "
            f"formula {cost_model}; whole copies {full:,}."
        )
        parts = _pair(held, promised or ({} if limit is None else {"total": limit}), full, "k")
        image = svg.drawing(title, text, (_WIDTH, _HEIGHT), parts, "bar", stretch=True)
        texts = (f"{figures['bytes_held']:,}", cost_model, f"{full:,}", measured)
        red = memory.FAILS in measured
        bars.append(BarRow(name, (optimizer, precision, world, *texts), image, red))
    return bars


def _on_fullest_rank(figures: Figures) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by class on the device of the rank that holds most: held, and promised."""

    def judged(tiers: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        device = tiers.get("device", {})
        return {kind: device[kind] for kind in CLASSES if device.get(kind)}

    ranks = {rank: judged(tiers) for rank, tiers in figures["resident"].items()}
    fullest = max(ranks, key=lambda rank: sum(ranks[rank].values()), default=None)
    if fullest is None:
        return {}, {}
    return ranks[fullest], judged(figures.get("promised", {}).get(fullest, {}))


def _pair(
    measured: Mapping[str, float], formula: Mapping[str, float], full: float, prefix: str
) -> list[Markup]:
    """Two stacks on one scale, and a tick at the end of the formula's."""
    most = max(full, sum(measured.values()), sum(formula.values()), 1e-9)
    scale = svg.PixelScale(0.0, most, 0.0, _WIDTH)
    parts = [svg.rect(0, 2, scale(full), 14, "bar-full")]
    for stack, top, height, look in ((measured, 2.0, 14.0, ""), (formula, 18.0, 6.0, " formula")):
        at = 0.0
        for kind, size in stack.items():
            start, stop = scale(at), scale(at + size)
            width = max(stop - start - 0.8, min(0.8, stop - start))
            parts.append(svg.rect(start, top, width, height, f"{prefix}-{kind}{look}"))
            at += size
    end = scale(sum(formula.values()))
    if formula:
        parts.append(svg.line(end, 0, end, _HEIGHT, "tick"))
    return parts


def traffic_bars(results: Iterable[CaseResult]) -> list[BarRow]:
    """One bar for each implementation with options, backend and world that was counted."""
    counted = (one for one in results if one.bytes_sent and one.bytes_expected)
    groups = grouped(((r.case.system, r.case.backend, r.case.world), r) for r in counted)
    bars = [_traffic_bar(*key, groups[key]) for key in sorted(groups) if any(bytes_of(groups[key]))]
    return sorted(bars, key=lambda bar: not bar.red)


def _traffic_bar(name: str, backend: str, world: int, members: Sequence[CaseResult]) -> BarRow:
    sent, expected = bytes_of(members)
    measured: dict[str, float] = defaultdict(float)
    formula: dict[str, float] = defaultdict(float)
    times, book = textbook(members)
    for result in members:
        figures = result.figures("traffic")
        for total, rows in ((measured, figures.get("sent")), (formula, figures.get("flows"))):
            for row in rows or ():
                kind = row["operation"]
                total[kind if kind in OPERATIONS else "other"] += float(Fraction(row["bytes"]))
    most = float(max(sent, expected))
    parts = _pair(_scaled(measured, sent), _scaled(formula, expected), most, "o")
    shares = {kind: size / sum(formula.values()) for kind, size in _ordered(formula).items()}
    mix = ", ".join(f"{_plain(kind)} {share:.0%}" for kind, share in shares.items())
    title = f"Traffic of {name} on {backend}, {world} ranks"
    text = f"Bytes sent {bytes_text(sent, expected)}{mix and f'; by the formula: {mix}'}."
    image = svg.drawing(title, text, (_WIDTH, _HEIGHT), parts, "bar", stretch=True)
    broken = [r for r in members if verdicts.kind(r.verdict) in verdicts.RED]
    red = any((check := r.check("traffic")) and check.status == "fail" for r in broken)
    same = "= formula" if sent == expected else whole(expected)
    of_book = f"{times:.3g} x {book}" if book else "-"
    return BarRow(name, (backend, str(world), whole(sent), same, of_book), image, red)


def _scaled(parts: Mapping[str, float], total: Fraction) -> dict[str, float]:
    """``parts`` in the order of their colours; one part without a colour if they are not known.

    What a failing case left out of its parts is put beside them.
    """
    stack = _ordered(parts)
    rest = float(total) - sum(stack.values())
    if rest > 1e-9 * max(float(total), 1.0):
        stack["other"] = stack.get("other", 0.0) + rest
    return stack


def _ordered(parts: Mapping[str, float]) -> dict[str, float]:
    return {kind: parts[kind] for kind in (*OPERATIONS, "other") if parts.get(kind)}


def _plain(word: str) -> str:
    return word.replace("_", " ")
