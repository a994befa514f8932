"""A comparison as text, Markdown, CSV, JSON, or one HTML page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardproof.compare import exact_figures
from shardproof.compare.compare import FigureChange, RunComparison
from shardproof.compare.exact_figures import JsonObject
from shardproof.compare.snapshot import Entry, Snapshot
from shardproof.compare.tables import ComparisonReport
from shardproof.errors import printable
from shardproof.report.section import TEMPLATES, rendered
from shardproof.table import Table, markdown_text

if TYPE_CHECKING:
    from rich.console import Console

#: Where `--into` puts the Markdown.
BEGIN, END = "<!-- hardware:begin -->", "<!-- hardware:end -->"
#: Version of the JSON form.
FORMAT = 1
#: Rows of a table on the terminal; the other forms have all.
TERMINAL_ROWS = 40

#: What a result is of, as its :class:`Entry` tells.
_PLACE = ("implementation", "strategy", "backend", "world")
CSV_HEADINGS = (
    *("run", "kind", "id", *_PLACE, "figure", "reference", "now"),
    *("low", "high", "verdict", "where"),
)


def terminal(report: ComparisonReport, console: Console) -> None:
    from rich.text import Text

    console.print(Text(printable(report.heading), style="bold"), soft_wrap=True)
    for table in report.tables:
        console.print()
        console.print(table.first(TERMINAL_ROWS, "--format markdown has all"))
    console.print()
    for line in report.summary:
        console.print(Text(printable(line)), soft_wrap=True)


def markdown(report: ComparisonReport) -> str:
    parts = [f"{markdown_text(line)}\n" for line in report.summary]
    return "\n".join([*parts, *(table.section(2) for table in report.tables)])


def html(report: ComparisonReport) -> str:
    return rendered(TEMPLATES / "compare.html", report=report, script_digest="")


def csv(comparisons: Sequence[RunComparison], only_changed: bool) -> str:
    rows = [row for item in comparisons for row in _csv_rows(item, only_changed)]
    return Table("", CSV_HEADINGS, rows).csv()


def _csv_rows(comparison: RunComparison, only_changed: bool) -> Iterator[list[str]]:
    name = comparison.after.name
    for pair in comparison.pairs:
        entry = pair.after
        changed = {change.figure: change for change in pair.changes}
        figures = {exact_figures.VERDICT: entry.verdict, **(entry.figures if pair.decided else {})}
        for figure in changed if only_changed else {**figures, **changed}:
            same = FigureChange(entry.id, figure, figures.get(figure), figures.get(figure), "equal")
            change = _change(changed.get(figure, same))
            yield _csv_row(name, "exact", entry.id, change, entry)
    for change in comparison.kills:
        yield _csv_row(name, "fault", change.id, _change(change))
    for time in comparison.times:
        if only_changed and not time.moved:
            continue
        yield _csv_row(name, "ratio", time.id, time.cells(), comparison.after.timed[time.id])
    for item in comparison.apart:
        yield _csv_row(name, "not comparable", item.id, {"where": item.why})
    for what in ("missing", "left out", "new"):
        for one in getattr(comparison, what.replace(" ", "_")):
            yield _csv_row(name, what, one, {})


def _change(change: FigureChange) -> dict[str, object]:
    cells = {"figure": change.figure, "reference": change.before, "now": change.after}
    return {**cells, "verdict": change.word, "where": change.detail}


def _csv_row(
    run: str, kind: str, name: str, cells: Mapping[str, object], entry: Entry | None = None
) -> list[str]:
    """One line below :data:`CSV_HEADINGS`; ``cells`` by heading."""
    cells = {**cells, "run": run, "kind": kind, "id": name}
    if entry is not None:
        cells |= {key: getattr(entry, key) for key in _PLACE}
    values = (cells.get(heading) for heading in CSV_HEADINGS)
    return ["" if value is None else str(value) for value in values]


def json_document(
    reference: Snapshot, comparisons: Sequence[RunComparison], only_changed: bool
) -> str:
    whole = {
        "format": FORMAT,
        "reference": _run(reference),
        "comparisons": [_comparison(item, only_changed) for item in comparisons],
    }
    return json.dumps(whole, indent=1) + "\n"


def _run(snapshot: Snapshot) -> JsonObject:
    return {
        **{key: getattr(snapshot, key) for key in ("name", "hardware", "machine", "taken")},
        "versions": [asdict(version) for version in snapshot.versions],
        "cases": len(snapshot.cases),
        "timed": len(snapshot.timed),
    }


def _comparison(comparison: RunComparison, only_changed: bool) -> JsonObject:
    pairs = [pair for pair in comparison.pairs if pair.changes or not only_changed]
    times = [time for time in comparison.times if time.moved or not only_changed]
    return {
        "run": _run(comparison.after),
        "unchanged": comparison.unchanged,
        "notes": comparison.notes,
        "compared": [
            {
                **{key: getattr(pair.after, key) for key in ("id", *_PLACE, "verdict")},
                "figures": pair.figures,
                "changes": [asdict(change) for change in pair.changes],
            }
            for pair in pairs
        ],
        "times": [time.to_dict() for time in times],
        "faults": [asdict(change) for change in comparison.kills],
        "not_comparable": [asdict(item) for item in comparison.apart],
        "missing": comparison.missing,
        "left_out": comparison.left_out,
        "new": comparison.new,
    }
