"""Which pairs of a trigger and a feature the cases of a run met, and which events occurred."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.coverage import pairs, triggers
from shardproof.evidence.seen import EVENTS
from shardproof.table import Table, number

#: Numbers of cases from which a darker shade begins.
_SHADES = (2, 4, 10, 32)


@dataclass(frozen=True)
class PairPlace:
    """A pair: how many cases met it, and its shade, 0 to 4."""

    cases: int
    shade: int
    sentence: str


@dataclass(frozen=True)
class CoverageMap:
    """A row for each feature that a judged case has, a column for each trigger and what it is."""

    triggers: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[PairPlace | None, ...]], ...]
    sentence: str


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
    return Table("What the checks had before them", heads, shown, align="lr")


def coverage_map(results: Iterable[CaseResult]) -> CoverageMap:
    """The map of what was judged."""
    found = pairs.table(judged(results))
    met = sorted({trigger for trigger, _ in found.met})
    rows = tuple((f, tuple(_place(found, (t, f)) for t in met)) for f in found.features)
    sentence = f"{len(found.met):,} pairs of {len(met)} triggers and {len(rows)} features were met."
    columns = tuple((name, triggers.about(name)) for name in met)
    return CoverageMap(columns, rows, sentence)


def _place(found: pairs.Coverage, pair: pairs.Pair) -> PairPlace | None:
    count = found.cases(pair)
    if not count:
        return None
    told = f"{pair[0]} with {pair[1]}: {number(count, 'case')}"
    return PairPlace(count, bisect_right(_SHADES, count), told)
