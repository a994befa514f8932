"""A comparison as text, Markdown, JSON, or one HTML page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardproof.compare.compare import RunComparison
from shardproof.compare.exact_figures import JsonObject
from shardproof.compare.snapshot import Snapshot
from shardproof.compare.tables import ComparisonReport
from shardproof.errors import printable
from shardproof.report.section import TEMPLATES, rendered
from shardproof.table import markdown_text

if TYPE_CHECKING:
    from rich.console import Console

#: Where `--into` puts the Markdown.
BEGIN, END = "<!-- hardware:begin -->", "<!-- hardware:end -->"
#: Version of the JSON form.
FORMAT = 1
#: Rows of a table on the terminal; the other forms have all.
TERMINAL_ROWS = 40

#: What of a result stands in the JSON form beside its figures.
_RESULT = ("id", "implementation", "strategy", "backend", "world", "verdict")


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


def json_document(
    reference: Snapshot, comparisons: Sequence[RunComparison], only_changed: bool
) -> str:
    made = [_comparison(item, only_changed) for item in comparisons]
    whole = {"format": FORMAT, "reference": _run(reference), "comparisons": made}
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
                **{key: getattr(pair.after, key) for key in _RESULT},
                "figures": pair.figures,
                "changes": [asdict(change) for change in pair.changes],
            }
            for pair in pairs
        ],
        "times": [time.to_dict() for time in times],
        "faults": [asdict(change) for change in comparison.kills],
        "not_comparable": [{"id": name, "why": why} for name, why in comparison.apart.items()],
        "missing": comparison.missing,
        "left_out": comparison.left_out,
        "new": comparison.new,
    }
