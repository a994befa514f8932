"""The scenarios of a run: what each is for, what became of its cases, and how to run it again."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from html import escape

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.errors import InputError
from shardproof.report.brief import counted
from shardproof.scenarios.load import default_folder, files_below, load
from shardproof.table import Table, TableCell, grouped


def table(results: Sequence[CaseResult]) -> Table:
    """A row for each scenario, which cases lead to."""
    members = grouped((result.case.scenario, result) for result in results)
    rows, at, about = [], anchors(results), abouts(members)
    for name, cases in sorted(members.items()):
        anchor = TableCell(name, html=f'<span id="{at[name]}">{escape(name)}</span>')
        again = TableCell(f"shardproof run {shlex.quote(name)} --tier full", style_class="code")
        rows.append((anchor, about.get(name, ""), counted(verdicts.count(cases)), again))
    return Table("Scenarios", ("scenario", "what it is for", "verdicts", "run it again"), rows)


def anchors(results: Sequence[CaseResult]) -> dict[str, str]:
    """Scenario -> the part of the page's address that leads to it."""
    names = sorted({result.case.scenario for result in results})
    return {name: f"s-{number}" for number, name in enumerate(names, 1)}


def abouts(names: Collection[str]) -> dict[str, str]:
    """A mapping from ``names`` of scenarios to their descriptions; unknown scenarios have none."""
    # Each search reads the beginnings of all files, so there is one for all names.  A file may have
    # another name than its scenario: such files come last.
    paths = sorted(files_below(default_folder()), key=lambda path: path.stem not in names)
    found: dict[str, str] = {}
    while paths and not found.keys() >= {*names}:
        with suppress(InputError):
            file = load(paths.pop(0))
            found[file.name] = " ".join(file.scenario.about.split())
    return found
