"""Tables that fit a terminal: one row for each family, where others have one for each case.

A family is a system; where a run has more of them than a terminal has lines, it is the origin of
systems (``reference/*``, ``pytorch/*``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from shardproof import verdicts
from shardproof.checks.results import CaseResult, Kill
from shardproof.report.tables import OF_FAMILIES, share_of, within_family
from shardproof.table import Mark, Table, grouped

T = TypeVar("T")

#: Rows of a table; with headings and closing lines 40 lines at most.
MOST = 34
#: Rows of other tables that a terminal shows in place of these.
FEW = 12
#: Verdicts that a narrow column says in fewer words.
_SHORT = {
    verdicts.WORKING_PRECISION_ONLY: "working precision",
    verdicts.REPLICAS_ONLY: "replicas only",
}


def families(items: Iterable[T], name: Callable[[T], str]) -> list[tuple[str, list[T]]]:
    """``items`` by the ``name`` of their system, or by its origin if there are too many systems."""
    systems = grouped((name(item), item) for item in items)
    if len(systems) <= MOST:
        return sorted(systems.items())
    origins: dict[str, list[T]] = defaultdict(list)
    for system, members in systems.items():
        origin, slash, _ = system.partition("/")
        origins[f"{origin}/*" if slash else system] += members
    return sorted(origins.items())


def counted(counts: Mapping[str, int], order: Sequence[str] = verdicts.VERDICTS) -> str:
    """``2 fail, 1 skip``: counts by verdict, in the ``order`` of verdicts."""
    return ", ".join(f"{counts[v]:,} {_SHORT.get(v, v)}" for v in order if counts.get(v)) or "-"


def of_cases(results: Sequence[CaseResult]) -> Table:
    """How many cases of each family passed, what became of the others, how much of its bound the
    worst error uses, and the seconds of all.
    """
    rows: list[tuple[str, ...]] = []
    marks: list[Mark] = []
    for name, members in families(results, lambda result: result.case.implementation):
        counts = verdicts.count(members)
        marks.append("bad" if any(counts[verdict] for verdict in verdicts.RED) else "")
        used = _used(max(map(share_of, members)))
        passed = f"{counts.pop('pass', 0):,}"
        rows.append((name, passed, counted(counts), used, _seconds(members)))
    headings = ("system", "pass", "other verdicts", "of bound", "time")
    notes = [OF_FAMILIES] if within_family(results) else []
    return Table("", headings, rows, marks, notes=notes, align="lrlrr")


def of_kills(kills: Iterable[Kill]) -> Table:
    """How many faults planted in each family were killed, how many of the kills name the fault, and
    the error of the weakest kill as a multiple of its bound.
    """
    rows: list[tuple[str, ...]] = []
    marks: list[Mark] = []
    for name, members in families(kills, lambda kill: kill.parent):
        killed = sum(kill.killed for kill in members)
        told = Counter(kill.told for kill in members if kill.told)
        # A check may also fail for what is no number, while its worst error is within its bound.
        margins = [kill.margin for kill in members if kill.margin and kill.margin > 1]
        weakest = f"{min(margins):.2g}x" if margins else "-"
        marks.append("" if killed == len(members) else "bad")
        named = f"{told['exact']} of {told.total()}" if told else "-"
        rows.append((name, f"{killed} of {len(members)}", named, weakest, _seconds(members)))
    headings = ("faults in", "killed", "cause named", "least margin", "time")
    return Table("", headings, rows, marks, align="lrrrr")


def _used(share: float) -> str:
    """How much of a bound an error uses, as a text; negative: nothing was compared."""
    if share <= 0:
        return "exact" if share == 0 else "-"
    return f"{share:.2g}x" if share > 1 else f"{100 * share:.2g} %"


def _seconds(members: Iterable[CaseResult | Kill]) -> str:
    return f"{sum(one.seconds for one in members):,.0f} s"
