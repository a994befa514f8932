"""Which pairs of a trigger and a feature the cases of a run met, and which events occurred."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from html import escape

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.coverage import pairs, triggers
from shardproof.evidence.seen import EVENTS
from shardproof.table import Row, Table, TableCell, number

#: Numbers of cases from which a darker shade begins.
_SHADES = (2, 4, 10, 32)


def judged(results: Iterable[CaseResult]) -> list[Case]:
    """The cases that met what they have: those that ran."""
    return [result.case for result in results if verdicts.kind(result.verdict) != "skip"]


def seen(results: Iterable[CaseResult]) -> dict[str, int]:
    """Event -> how many cases saw it; empty where no result tells."""
    told = [result.seen for result in results if result.seen is not None]
    found = Counter(name for names in told for name in names)
    return {name: found[name] for name in EVENTS} if told else {}


def seen_table(results: Iterable[CaseResult]) -> Table:
    """The events, those that the fewest cases saw first."""
    rows = sorted(seen(results).items(), key=lambda row: row[1])
    heads, shown = ("event", "cases"), [(name, f"{count:,}") for name, count in rows]
    return Table("Conditions that the checks met", heads, shown, align="lr")


def coverage_map(results: Iterable[CaseResult]) -> Table:
    """A row for each feature that a judged case has, a column for each trigger."""
    found = pairs.table(judged(results))
    met = sorted({trigger for trigger, _ in found.met})
    rows: list[Row] = []
    rows += [(name, *(_place(found, (one, name)) for one in met)) for name in found.features]
    note = f"{len(found.met):,} pairs of {len(met)} triggers and {len(rows)} features were met."
    heads = [
        TableCell(one, html=_hinted(one, triggers.about(one)), style_class="cap") for one in met
    ]
    return Table("Cases by feature and trigger", ("feature", *heads), rows, notes=(note,))


def _place(found: pairs.Coverage, pair: pairs.Pair) -> TableCell:
    """How many cases met a pair, in one of five shades."""
    if not (count := found.cases(pair)):
        return TableCell("")
    hint = f"{pair[0]} with {pair[1]}: {number(count, 'case')}"
    shade = f"n{bisect_right(_SHADES, count)}"
    return TableCell(str(count), html=_hinted(str(count), hint), style_class=shade)


def _hinted(text: str, hint: str) -> str:
    return f'<span title="{escape(hint)}">{escape(text)}</span>'
