"""Scaling cells in tables and words: pure functions of lines of ``cases.jsonl``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardproof.bench import stats
from shardproof.bench.scaling.judge import Line
from shardproof.bench.scaling.matrix import BASES
from shardproof.table import Mark, Table

HEADINGS = (
    *("scaling", "system", "backend", "ranks", "verdict"),
    *("E, plain T1 [95 %]", "E, wrapped T1 [95 %]", "modelled E"),
    *("T1 plain ms", "T1 wrapped ms", "T_N ms", "tokens/s 1", "tokens/s N"),
    *("achieved / predicted", "exposed", "memory / formula"),
)
#: Those that a terminal has room for; the others are in Markdown and in the report.
NARROW = (*HEADINGS[:9], HEADINGS[10], HEADINGS[13])


MODELLED_TITLE = (
    "Modelled efficiency by ranks: measured compute of one rank + alpha-beta communication, alpha "
    "and beta probed in the same run; not measured"
)


def table(lines: Sequence[Line], headings: Sequence[str] = HEADINGS) -> Table:
    """A row for each measured cell, and one for all oversubscribed worlds of a system; with the
    columns ``headings``.  The modelled figures of every world: :func:`modelled_table`.
    """
    rows: list[tuple[str, ...]] = []
    for members in _groups(lines):
        refused = [line for line in members if line["verdict"] == "oversubscribed"]
        rows += [_row(line) for line in members if line not in refused]
        if refused:
            rows.append(_refused_row(refused))
    places = [HEADINGS.index(heading) for heading in headings]
    marks: list[Mark] = ["bad" if {"below", *stats.BROKEN} & set(row) else "" for row in rows]
    return Table("", headings, [[row[place] for place in places] for row in rows], marks=marks)


def modelled_table(lines: Sequence[Line]) -> Table:
    """Modelled efficiencies: a row a system and backend, a column a world."""
    worlds = sorted({line["world"] for line in lines if _modelled(line) is not None})
    rows = []
    for members in _groups(lines):
        by_world = {line["world"]: _modelled(line) for line in members}
        if any(value is not None for value in by_world.values()):
            first = members[0]
            shares = (_share(by_world.get(world)) for world in worlds)
            rows.append((first["mode"], _name(first), first["backend"], *shares))
    headings = ("scaling", "system", "backend", *(f"{world:,}" for world in worlds))
    return Table(MODELLED_TITLE, headings, rows)


def markdown(lines: Sequence[Line]) -> str:
    """Both tables as Markdown."""
    modelled = modelled_table(lines)
    below = f"\n{MODELLED_TITLE}:\n\n{modelled.markdown()}" if modelled.rows else ""
    return table(lines).markdown() + below


def _groups(lines: Sequence[Line]) -> list[list[Line]]:
    groups: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line["cell"]["name"], _name(line), line["backend"]].append(line)
    return [sorted(members, key=lambda line: int(line["world"])) for members in groups.values()]


def _name(line: Line) -> str:
    label = line["cell"]["label"]
    return str(line["implementation"]) + (f"+{label}" if label else "")


def _row(line: Line) -> tuple[str, ...]:
    found, card = line["efficiency"] or {}, line.get("scorecard") or {}
    return (
        *(line["mode"], _name(line), line["backend"], str(line["world"]), line["verdict"]),
        *(_efficiency(found.get(base)) for base in BASES),
        _share(_modelled(line)),
        *_seconds(line, *BASES, "ranks"),
        *_rates(line, "plain", "ranks"),
        *(_number(card.get("achieved_over_predicted")), _share(card.get("exposed_share"))),
        _number(card.get("memory_over_formula")),
    )


def _refused_row(lines: Sequence[Line]) -> tuple[str, ...]:
    first, last = lines[0], lines[-1]
    worlds = str(first["world"]) if first is last else f"{first['world']} to {last['world']:,}"
    known = [(line["world"], _modelled(line)) for line in lines if _modelled(line) is not None]
    ends = dict([known[0], known[-1]]) if known else {}
    figures = ", ".join(f"{_share(value)} at {world:,}" for world, value in ends.items()) or "-"
    return (
        *(first["mode"], _name(first), first["backend"], worlds, "oversubscribed", "-", "-"),
        *(figures, *_seconds(first, *BASES), "-", *_rates(first, "plain"), "-", "-", "-", "-"),
    )


def _modelled(line: Line) -> float | None:
    modelled = line.get("modelled")
    return None if modelled is None else modelled.get("efficiency")


def _interval(found: Line) -> str:
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _efficiency(found: Line | None) -> str:
    if found is None:
        return "-"
    return f"{found['ratio']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(line: Line, *sides: str) -> list[str]:
    seconds = line["median_seconds"]
    return [f"{1e3 * seconds[side]:.1f}" if side in seconds else "-" for side in sides]


def _rates(line: Line, *sides: str) -> list[str]:
    rates = line["tokens_per_second"]
    return [f"{rates[side]:,.0f}" if side in rates else "-" for side in sides]


def remarks(lines: Sequence[Line]) -> list[str]:
    """Below the tables on a terminal: :func:`remarks_by_system`, indented."""
    texts = []
    for heading, items in remarks_by_system(lines):
        texts += [heading, *(f"    {item}" for item in items)]
    return texts


def remarks_by_system(lines: Sequence[Line]) -> list[tuple[str, list[str]]]:
    """How each system was measured, and what to make of single rows."""
    texts = []
    for members in _groups(lines):
        first = members[0]
        cell = first["cell"]
        base, size = cell["base"], f" {cell['size']}" if cell["size"] else ""
        batch = "in a step" if first["mode"] == "strong" else "a rank"
        target = f"target {first['target']:.0%}"
        heading = (
            f"{cell['name']}::{_name(first)}::{first['backend']}: {base['name']}{size}, "
            f"{base['global_batch']} samples {batch}, {base['micro_batches']} micro-batch(es), "
            f"{cell['optimizer']['name']} foreach=False, {cell['dtype']}; {target}"
        )
        items = [f"{line['world']} ranks: {text}" for line in members for text in _remarks(line)]
        missing = [line for line in members if (line["modelled"] or {}).get("problem")]
        if missing:
            why = missing[0]["modelled"]["problem"]
            items.append(f"not modelled from {missing[0]['world']:,} ranks on: {why}")
        texts.append((heading, items))
    return texts


def _remarks(line: Line) -> list[str]:
    texts = []
    if line["reason"] and line["verdict"] != "oversubscribed":
        texts.append(f"{line['verdict']}: {line['reason']}")
    if line["efficiency"] is not None:
        alone = line["wrapping"]
        texts.append(
            f"{line['blocks']} blocks over {line['launches']} launches in {line['seconds']:.0f} s; "
            f"the wrapped system alone takes {_interval(alone)} of the plain program's time"
        )
    differ = line["launches_differ_p"]
    if differ is not None and differ < 0.01:
        texts.append(f"caution: launches differ (p {differ:.1g}), the interval is too narrow")
    return texts
