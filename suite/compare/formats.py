"""A comparison as text, Markdown, CSV, JSON, or one HTML page that opens offline."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardproof.compare import exact_figures
from shardproof.compare.compare import Comparison, Timing
from shardproof.compare.snapshot import Sample, Snapshot
from shardproof.compare.tables import Report, Table

#: Version of the JSON form.
FORMAT = 1
#: Rows of a table on the terminal; the other forms have all.
TERMINAL_ROWS = 40

CSV_HEADINGS = (
    *("run", "kind", "id", "implementation", "strategy", "backend", "world", "figure"),
    *("reference", "now", "low", "high", "verdict", "where"),
)


def text(report: Report, write: Callable[..., None]) -> None:
    """The tables on a terminal; ``write`` is rich's ``Console.print``."""
    from rich.table import Table as Grid
    from rich.text import Text

    styles = {"worse": "red", "better": "green", "changed": "yellow"}
    write(Text(report.heading, style="bold"), soft_wrap=True)
    for table in report.tables:
        write()
        grid = Grid(box=None, pad_edge=False, header_style="bold", title_justify="left")
        for number, heading in enumerate(table.headings):
            right = number >= table.numeric_from
            grid.add_column(heading, justify="right" if right else "left", overflow="fold")
        for number, row in enumerate(table.rows[:TERMINAL_ROWS]):
            mark = table.marks[number] if table.marks else ""
            grid.add_row(*(Text(cell, style=styles.get(mark, "")) for cell in row))
        write(Text(table.title, style="bold"))
        write(grid)
        hidden = len(table.rows) - TERMINAL_ROWS
        if hidden > 0:
            write(Text(f"and {hidden:,} more rows: --format markdown has all", style="dim"))
        for note in table.notes:
            write(Text(note, style="dim"), soft_wrap=True)
    write()
    for line in report.summary:
        write(Text(line), soft_wrap=True)


def markdown(report: Report, level: int = 2) -> str:
    """The same as Markdown, without the heading of the whole."""
    parts = [f"{plain(line)}\n" for line in report.summary]
    for table in report.tables:
        parts.append(f"{'#' * level} {plain(table.title)}\n")
        parts.append(rows_markdown(table) + "\n")
        parts += [f"{note}\n" for note in table.notes]
    return "\n".join(parts)


def rows_markdown(table: Table) -> str:
    """One table as Markdown."""
    lines = [table.headings, ["---"] * len(table.headings), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def plain(told: str) -> str:
    """One line that no reader of Markdown takes for HTML, a link, an image or emphasis."""
    for character in ("\\", "|", "<", "*", "_", "`"):
        told = told.replace(character, "\\" + character)
    return " ".join(told.replace("](", "]\\(").split())


def _cell(told: str) -> str:
    return plain(told) or " "


def html(report: Report) -> str:
    """The same as one self-contained page."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("suite", "templates")
    template = Environment(loader=loader, autoescape=True).get_template("compare.html")
    return template.render(report=report)


# ------------------------------------------------------------------------------------ machines


def table(found: Sequence[Comparison], only_changed: bool) -> str:
    """One line a compared figure, as CSV; ratios carry the interval of their change."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_HEADINGS)
    for comparison in found:
        writer.writerows(_csv_rows(comparison, only_changed))
    return stream.getvalue()


def _csv_rows(found: Comparison, only_changed: bool) -> Iterator[list[Any]]:
    name = found.after.name
    for pair in found.pairs:
        entry = pair.after
        place = [entry.implementation, entry.strategy, entry.backend, entry.world]
        changed = {change.figure: change for change in pair.changes}
        values = {
            exact_figures.VERDICT: entry.verdict,
            **(entry.figures if pair.told else {}),
            **changed,
        }
        for figure in values:
            change = changed.get(figure)
            if change is None:
                if not only_changed:
                    value = values[figure]
                    row = [figure, value, value, "", "", "equal", ""]
                    yield [name, "exact", entry.id, *place, *row]
                continue
            told = [figure, change.before, change.after, "", "", change.word, change.detail]
            yield [name, "exact", entry.id, *place, *told]
    for change in found.kills:
        told = [change.figure, change.before, change.after, "", "", change.word, ""]
        yield [name, "fault", change.id, "", "", "", "", *told]
    entries = found.after.timed
    for time in found.times:
        if only_changed and time.verdict in ("same", "inconclusive"):
            continue
        entry = entries[time.id]
        place = [entry.implementation, entry.strategy, entry.backend, entry.world]
        ends = [math.exp(time.found.low), math.exp(time.found.high)]
        told = [time.ratio, time.before.ratio, time.after.ratio, *ends, time.verdict, ""]
        yield [name, "ratio", time.id, *place, *told]
    for item in found.apart:
        yield [name, "not comparable", item.id, "", "", "", "", "", "", "", "", "", "", item.why]
    for what, ids in (("missing", found.missing), ("left out", found.left_out), ("new", found.new)):
        for told_id in ids:
            yield [name, what, told_id, *[""] * (len(CSV_HEADINGS) - 3)]


def document(reference: Snapshot, found: Sequence[Comparison], only_changed: bool) -> str:
    """Everything as JSON."""
    told = {
        "format": FORMAT,
        "reference": _run(reference),
        "comparisons": [_comparison(comparison, only_changed) for comparison in found],
    }
    return json.dumps(told, indent=1) + "\n"


def _run(snapshot: Snapshot) -> Mapping[str, Any]:
    return {
        "name": snapshot.name,
        "hardware": snapshot.hardware,
        "machine": snapshot.machine,
        "taken": snapshot.taken,
        "versions": [asdict(version) for version in snapshot.versions],
        "cases": len(snapshot.cases),
        "timed": len(snapshot.timed),
    }


def _comparison(found: Comparison, only_changed: bool) -> Mapping[str, Any]:
    pairs = [pair for pair in found.pairs if pair.changes or not only_changed]
    times = [
        time
        for time in found.times
        if not only_changed or time.verdict not in ("same", "inconclusive")
    ]
    return {
        "run": _run(found.after),
        "unchanged": found.unchanged,
        "notes": found.notes,
        "compared": [
            {
                "id": pair.id,
                "implementation": pair.after.implementation,
                "strategy": pair.after.strategy,
                "backend": pair.after.backend,
                "world": pair.after.world,
                "verdict": pair.after.verdict,
                "figures": pair.figures,
                "changes": [asdict(change) for change in pair.changes],
            }
            for pair in pairs
        ],
        "times": [_time(time) for time in times],
        "faults": [asdict(change) for change in found.kills],
        "not_comparable": [asdict(item) for item in found.apart],
        "missing": found.missing,
        "left_out": found.left_out,
        "new": found.new,
    }


def _time(time: Timing) -> Mapping[str, Any]:
    found = time.found
    return {
        "id": time.id,
        "ratio": time.ratio,
        "reference": _sample(time.before),
        "now": _sample(time.after),
        "change": {
            "ratio": math.exp(found.mean),
            "low": math.exp(found.low),
            "high": math.exp(found.high),
            "freedom": found.freedom,
            "p": found.p,
            "p_holm": found.p_holm,
        },
        "margin": math.expm1(time.margin),
        "smallest_effect": time.smallest,
        "verdict": time.verdict,
    }


def _sample(sample: Sample) -> Mapping[str, Any]:
    from shardproof.compare import welch

    low, high = welch.interval(sample)
    return {"ratio": sample.ratio, "low": low, "high": high, "blocks": sample.blocks}
