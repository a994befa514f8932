"""Scaling cells in tables and words: pure functions of lines of ``cases.jsonl``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from shardproof.bench.lines import CellLine, Efficiency
from shardproof.bench.subjects import BASES
from shardproof.bench.tables import interval
from shardproof.report import brief
from shardproof.table import Mark, Table, grouped

HEADINGS = (
    *("scaling", "system", "backend", "ranks", "verdict"),
    *("E, plain T1 [95 %]", "E, wrapped T1 [95 %]", "modelled E", "target"),
    *("T1 plain ms", "T1 wrapped ms", "T_N ms", "tokens/s 1", "tokens/s N"),
    *("achieved / predicted", "achieved / probed", "exposed", "memory / formula"),
)
#: Those that a terminal has room for; the others are in Markdown and in the report.
NARROW = (*HEADINGS[:8], HEADINGS[9], HEADINGS[11], HEADINGS[14])


MODELLED_TITLE = (
    "Modelled efficiency by ranks: measured compute of one rank + alpha-beta communication, alpha "
    "and beta probed in the same run; not measured"
)


def table(
    lines: Sequence[CellLine], headings: Sequence[str] = HEADINGS, fold: bool = True
) -> Table:
    """A row for each measured cell, and (``fold``) one for all oversubscribed worlds of a system;
    with the columns ``headings``.  The modelled figures of every world: :func:`modelled_table`.
    """
    from shardproof.bench import stats  # scipy is slow to import

    rows: list[list[str]] = []
    for members in _groups(lines):
        refused = [line for line in members if fold and line.verdict == "oversubscribed"]
        rows += [_row([line]) for line in members if line not in refused]
        rows += [_row(refused)] if refused else []
    places = [HEADINGS.index(heading) for heading in headings]
    marks: list[Mark] = ["bad" if {"below", *stats.BROKEN} & set(row) else "" for row in rows]
    return Table("Scaling", headings, [[row[place] for place in places] for row in rows], marks)


def by_family(lines: Sequence[CellLine]) -> Table:
    """A row for each system: how its cells ended, its lowest efficiency against the plain program,
    and the modelled one of the most ranks.
    """
    from shardproof.bench import stats

    rows: list[tuple[str, ...]] = []
    marks: list[Mark] = []
    for system, members in brief.families(lines, lambda line: line.implementation):
        counts = Counter(line.verdict for line in members)
        known = [one for line in members if (one := (line.efficiency or {}).get(BASES[0]))]
        lowest = min(known, key=lambda one: one.ratio, default=None)
        last = max(members, key=lambda line: (line.modelled_efficiency is not None, line.world))
        modelled = f"{_share(last.modelled_efficiency)} at {last.world:,}"
        seconds = f"{sum(line.seconds for line in members):,.0f}"
        marks.append("bad" if counts.keys() & {"below", *stats.BROKEN} else "")
        verdicts = brief.counted(counts, sorted(counts))
        rows.append((system, verdicts, _efficiency(lowest), modelled, seconds))
    headings = ("system", "verdicts", "lowest E, plain T1 [95 %]", "modelled E", "seconds")
    return Table("Scaling", headings, rows, marks, align="llllr")


def modelled_table(lines: Sequence[CellLine]) -> Table:
    """Modelled efficiencies: a row a system and backend, a column a world."""
    worlds = sorted({line.world for line in lines if line.modelled_efficiency is not None})
    rows = []
    for members in _groups(lines):
        by_world = {line.world: line.modelled_efficiency for line in members}
        if any(value is not None for value in by_world.values()):
            first = members[0]
            shares = (_share(by_world.get(world)) for world in worlds)
            rows.append((first.mode, first.title, first.cell.network, *shares))
    headings = ("scaling", "system", "backend", *(f"{world:,}" for world in worlds))
    return Table(MODELLED_TITLE, headings, rows)


def markdown(lines: Sequence[CellLine]) -> str:
    """The table of scaling and, below it, that of modelled figures."""
    modelled = modelled_table(lines)
    below = f"\n{MODELLED_TITLE}:\n\n{modelled.markdown()}" if modelled.rows else ""
    return table(lines).markdown() + below


def _groups(lines: Sequence[CellLine]) -> list[list[CellLine]]:
    groups = grouped((line.cell.group, line) for line in lines)
    return [sorted(members, key=lambda line: line.world) for members in groups.values()]


def _row(lines: Sequence[CellLine]) -> list[str]:
    line, last = lines[0], lines[-1]
    worlds, modelled = str(line.world), _share(line.modelled_efficiency)
    if line is not last:
        worlds += f" to {last.world:,}"
        known = [one for one in lines if one.modelled_efficiency is not None]
        ends = known[:: max(1, len(known) - 1)]
        shown = (f"{_share(one.modelled_efficiency)} at {one.world:,}" for one in ends)
        modelled = ", ".join(shown) or "-"
    efficiency, seconds, rates = line.efficiency or {}, line.median_seconds, line.tokens_per_second
    card = {} if line.scorecard is None else asdict(line.scorecard)
    return [
        *(line.mode, line.title, line.cell.network, worlds, line.verdict),
        *(_efficiency(efficiency.get(base)) for base in BASES),
        *(modelled, f"{line.target:.0%}"),
        *(f"{1e3 * seconds[s]:.1f}" if s in seconds else "-" for s in (*BASES, "ranks")),
        *(f"{rates[side]:,.0f}" if side in rates else "-" for side in ("plain", "ranks")),
        _number(card.get("achieved_over_predicted")),
        _number(card.get("achieved_over_probed")),
        _share(card.get("exposed_share")),
        _number(card.get("memory_over_formula")),
    ]


def _efficiency(value: Efficiency | None) -> str:
    return "-" if value is None else f"{value.ratio:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def remarks(lines: Sequence[CellLine]) -> list[str]:
    """Below the tables on a terminal: :func:`remarks_by_system`, indented."""
    texts = []
    for heading, items in remarks_by_system(lines):
        texts += [heading, *(f"    {item}" for item in items)]
    return texts


def remarks_by_system(lines: Sequence[CellLine]) -> list[tuple[str, list[str]]]:
    """How each system was measured, and what to make of single rows."""
    texts = []
    for members in _groups(lines):
        cell = members[0].cell
        base, size = cell.base, f" {cell.size}" if cell.size else ""
        batch = "in a step" if cell.mode == "strong" else "a rank"
        heading = (
            f"{cell.name}::{cell.title}::{cell.network}: {base.name}{size}, "
            f"{base.global_batch} samples {batch}, {base.micro_batches} micro-batch(es), "
            f"{cell.optimizer.name} foreach=False, {cell.dtype}; target {cell.target:.0%}"
        )
        items = [f"{line.world} ranks: {text}" for line in members for text in _remarks(line)]
        whys = [(a.world, a.modelled.problem) for a in members if a.modelled and a.modelled.problem]
        items += [f"not modelled from {world:,} ranks on: {why}" for world, why in whys[:1]]
        texts.append((heading, items))
    return texts


def _crowded(line: CellLine) -> str:
    """A step of ranks that share cores, next to the model's; it gives no efficiency."""
    took, made = 1e3 * line.median_seconds["ranks"], line.modelled
    text = f"oversubscribed: {line.reason}; a step of ranks that share cores took {took:.1f} ms"
    if made is None or made.efficiency is None:
        return text
    names = ("step_seconds", "compute_seconds", "communication_seconds")
    whole, compute, sent = (1e3 * made.to_dict()[name] for name in names)
    told = f"{whole:.1f} ms (compute {compute:.1f}, calls {sent:.1f})"
    return f"{text}, by the model one with a core each takes {told}"


def _remarks(line: CellLine) -> list[str]:
    texts = []
    if line.reason and line.verdict != "oversubscribed":
        texts.append(f"{line.verdict}: {line.reason}")
    if line.efficiency is not None and line.wrapping is not None:
        took = f"{line.blocks} blocks over {line.launches} launches in {line.seconds:.0f} s"
        alone = f"the wrapped system alone takes {interval(line.wrapping)}"
        texts.append(f"{took}; {alone} of the plain program's time")
    if line.verdict == "oversubscribed" and line.crowded and "ranks" in line.median_seconds:
        texts.append(_crowded(line))
    differ = line.launches_differ_p
    if differ is not None and differ < 0.01:
        texts.append(f"caution: launches differ (p {differ:.1g}), the interval is too narrow")
    return texts
