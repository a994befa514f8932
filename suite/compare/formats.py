"""A comparison as text, Markdown, CSV, JSON, or one HTML page that opens offline."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.compare import exact_figures
from shardproof.compare.compare import RunComparison, Timing
from shardproof.compare.exact_figures import JsonObject
from shardproof.compare.snapshot import Entry, Sample, Snapshot
from shardproof.compare.tables import ComparisonReport
from shardproof.table import Table, markdown_text

if TYPE_CHECKING:
    from rich.console import Console

TEMPLATES = Path(__file__).parents[1] / "report" / "templates"
#: Where `--into` puts the Markdown.
BEGIN, END = "<!-- hardware:begin -->", "<!-- hardware:end -->"
#: Version of the JSON form.
FORMAT = 1
#: Rows of a table on the terminal; the other forms have all.
TERMINAL_ROWS = 40

CSV_HEADINGS = (
    *("run", "kind", "id", "implementation", "strategy", "backend", "world", "figure"),
    *("reference", "now", "low", "high", "verdict", "where"),
)


def terminal(report: ComparisonReport, console: Console) -> None:
    """The tables on a terminal, then the summary."""
    from rich.text import Text

    console.print(Text(report.heading, style="bold"), soft_wrap=True)
    for table in report.tables:
        console.print()
        console.print(table.first(TERMINAL_ROWS, "--format markdown has all"))
    console.print()
    for line in report.summary:
        console.print(Text(line), soft_wrap=True)


def markdown(report: ComparisonReport) -> str:
    """Summary and tables as Markdown, without the heading of the whole."""
    parts = [f"{markdown_text(line)}\n" for line in report.summary]
    return "\n".join([*parts, *(section(table, 2) for table in report.tables)])


def section(table: Table, level: int) -> str:
    """A table as a section of a Markdown page, its notes below it."""
    notes = "".join(f"\n{note}\n" for note in table.notes)
    return f"{'#' * level} {markdown_text(table.title)}\n\n{table.markdown()}{notes}"


def html(report: ComparisonReport) -> str:
    """The same as one self-contained page."""
    from jinja2 import Environment, FileSystemLoader

    jinja = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    return jinja.get_template("compare.html").render(report=report)


# ------------------------------------------------------------------------------------ machines


def csv(comparisons: Sequence[RunComparison], only_changed: bool) -> str:
    """One line a compared figure, as CSV; ratios carry the interval of their change."""
    rows = [row for item in comparisons for row in _csv_rows(item, only_changed)]
    return Table("", CSV_HEADINGS, rows).csv()


def _csv_rows(comparison: RunComparison, only_changed: bool) -> Iterator[list[str]]:
    name = comparison.after.name
    for pair in comparison.pairs:
        entry = pair.after
        changed = {change.figure: change for change in pair.changes}
        values = {
            exact_figures.VERDICT: entry.verdict,
            **(entry.figures if pair.decided else {}),
            **changed,
        }
        for figure, value in values.items():
            change = changed.get(figure)
            if change is not None:
                old, new, word, where = change.before, change.after, change.word, change.detail
                yield _csv_row(name, "exact", entry.id, entry, figure, old, new, word, where)
            elif not only_changed:
                yield _csv_row(name, "exact", entry.id, entry, figure, value, value, "equal")
    for change in comparison.kills:
        old, new, word = change.before, change.after, change.word
        yield _csv_row(name, "fault", change.id, None, change.figure, old, new, word)
    for time in comparison.times:
        if only_changed and time.verdict in ("same", "inconclusive"):
            continue
        ends = math.exp(time.difference.low), math.exp(time.difference.high)
        old, new = time.before.ratio, time.after.ratio
        entry = comparison.after.timed[time.id]
        yield _csv_row(
            name, "ratio", time.id, entry, time.ratio, old, new, time.verdict, interval=ends
        )
    for item in comparison.apart:
        yield _csv_row(name, "not comparable", item.id, where=item.why)
    for what, ids in (
        ("missing", comparison.missing),
        ("left out", comparison.left_out),
        ("new", comparison.new),
    ):
        for one in ids:
            yield _csv_row(name, what, one)


def _csv_row(
    run: str,
    kind: str,
    name: str,
    entry: Entry | None = None,
    figure: str = "",
    reference: object = "",
    now: object = "",
    verdict: str = "",
    where: str = "",
    interval: tuple[object, object] = ("", ""),
) -> list[str]:
    """One line below :data:`CSV_HEADINGS`."""
    place: list[object] = ["", "", "", ""]
    if entry is not None:
        place = [entry.implementation, entry.strategy, entry.backend, entry.world]
    cells = [run, kind, name, *place, figure, reference, now, *interval, verdict, where]
    return ["" if cell is None else str(cell) for cell in cells]


def json_document(
    reference: Snapshot, comparisons: Sequence[RunComparison], only_changed: bool
) -> str:
    """Everything as JSON."""
    whole = {
        "format": FORMAT,
        "reference": _run(reference),
        "comparisons": [_comparison(item, only_changed) for item in comparisons],
    }
    return json.dumps(whole, indent=1) + "\n"


def _run(snapshot: Snapshot) -> JsonObject:
    return {
        "name": snapshot.name,
        "hardware": snapshot.hardware,
        "machine": snapshot.machine,
        "taken": snapshot.taken,
        "versions": [asdict(version) for version in snapshot.versions],
        "cases": len(snapshot.cases),
        "timed": len(snapshot.timed),
    }


def _comparison(comparison: RunComparison, only_changed: bool) -> JsonObject:
    pairs = [pair for pair in comparison.pairs if pair.changes or not only_changed]
    times = [
        time
        for time in comparison.times
        if not only_changed or time.verdict not in ("same", "inconclusive")
    ]
    return {
        "run": _run(comparison.after),
        "unchanged": comparison.unchanged,
        "notes": comparison.notes,
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
        "faults": [asdict(change) for change in comparison.kills],
        "not_comparable": [asdict(item) for item in comparison.apart],
        "missing": comparison.missing,
        "left_out": comparison.left_out,
        "new": comparison.new,
    }


def _time(time: Timing) -> JsonObject:
    change = time.difference
    return {
        "id": time.id,
        "ratio": time.ratio,
        "reference": _sample(time.before),
        "now": _sample(time.after),
        "change": {
            "ratio": math.exp(change.mean),
            "low": math.exp(change.low),
            "high": math.exp(change.high),
            "freedom": change.freedom,
            "p": change.p,
            "p_holm": change.p_holm,
        },
        "margin": math.expm1(time.margin),
        "smallest_effect": time.smallest,
        "verdict": time.verdict,
    }


def _sample(sample: Sample) -> JsonObject:
    from shardproof.compare import welch

    low, high = welch.interval(sample)
    return {"ratio": sample.ratio, "low": low, "high": high, "blocks": sample.blocks}
