"""The scenarios of a run: what each is for, what became of its cases, and how to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.errors import InputError
from shardproof.report.brief import counted
from shardproof.scenarios.load import find
from shardproof.table import Table, TableCell, grouped


def table(results: Sequence[CaseResult]) -> Table:
    """A row for each scenario, which cases lead to."""
    members = grouped((result.case.scenario, result) for result in results)
    rows, at = [], anchors(results)
    for name, cases in sorted(members.items()):
        anchor = TableCell(name, html=f'<span id="{at[name]}">{escape(name)}</span>')
        again = TableCell(f"shardproof run {shlex.quote(name)} --tier full", style_class="code")
        rows.append((anchor, about(name), counted(verdicts.count(cases)), again))
    return Table("Scenarios", ("scenario", "what it is for", "verdicts", "run it again"), rows)


def anchors(results: Sequence[CaseResult]) -> dict[str, str]:
    """Scenario -> the part of the page's address that leads to it."""
    names = sorted({result.case.scenario for result in results})
    return {name: f"s-{number}" for number, name in enumerate(names, 1)}


def about(name: str) -> str:
    """The scenario's description of itself; empty: this machine does not have it."""
    try:
        return " ".join(find([name])[0].scenario.about.split())
    except InputError:
        return ""
