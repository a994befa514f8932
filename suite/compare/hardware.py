"""Runs of several machines side by side: what is equal everywhere, and each machine's own ratios.

Exact figures must be the same on every machine.  Times stand as ratios that each machine measured
by itself (:meth:`shardproof.wings.Wing.by_hardware`); the reference's column is the first.  A run
without a case of it, as that of a GPU beside a CPU's, is compared with the first that has some;
what cannot be compared at all says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shardproof.compare.compare import RunComparison, compare
from shardproof.compare.snapshot import Snapshot
from shardproof.compare.tables import ComparisonReport, runs, verdicts_of
from shardproof.table import Table, grouped
from shardproof.wings import wings


def report(
    reference: Snapshot, others: Sequence[RunComparison], only_changed: bool = False
) -> ComparisonReport:
    snapshots = [reference, *(c.after for c in others)]
    nearest = [_nearest(one, snapshots[1:number]) for number, one in enumerate(others, 1)]
    made = ComparisonReport(f"{len(snapshots)} run{'s' * (len(snapshots) > 1)} by hardware")
    made.tables.append(runs(snapshots, [_equal(c, reference) for c in nearest]).titled("Machines"))
    for comparison in others:
        made.summary += [f"{comparison.after.name}: {note}" for note in comparison.notes]
    if (exact := strategies(reference, nearest)).rows:
        made.tables.append(exact)
    for wing in wings():
        made.tables += wing.by_hardware(_names(snapshots), reference, others, only_changed)
    return made


def _nearest(comparison: RunComparison, earlier: Sequence[Snapshot]) -> RunComparison:
    """It; or, if it compares nothing, that with the first of ``earlier`` which does."""
    others = (compare(one, comparison.after) for one in earlier if not comparison.pairs)
    return next((other for other in others if other.pairs), comparison)


def _equal(comparison: RunComparison, reference: Snapshot) -> str:
    pairs = [pair for pair in comparison.pairs if pair.id in comparison.after.cases]
    apart = comparison.apart
    total = sum(pair.figures for pair in pairs)
    if not total:
        if apart:
            return f"not comparable: {next(iter(apart.values()))}"
        both = comparison.after, reference
        on = [", ".join(sorted({e.backend for e in one.cases.values()})) for one in both]
        return "no case in common: {} here, {} there".format(*on)
    differ = sum(len(pair.changes) for pair in pairs)
    more = f", {len(apart):,} results not comparable" if apart else ""
    told = f"all {total:,} equal" if not differ else f"{differ:,} of {total:,} differ"
    return told + ("" if comparison.before is reference else f" ({comparison.before.name})") + more


def strategies(reference: Snapshot, others: Sequence[RunComparison]) -> Table:
    """A row a strategy and backend: verdicts on each machine, and whether figures are equal."""
    columns = [reference, *(c.after for c in others)]
    cells: dict[tuple[str, str], list[str]] = defaultdict(lambda: ["-"] * len(columns))
    for number, snapshot in enumerate(columns):
        pairs = {pair.id: pair for pair in others[number - 1].pairs} if number else {}
        members = grouped(((e.strategy, e.backend), e) for e in snapshot.cases.values())
        for key, entries in members.items():
            cells[key][number] = verdicts_of(entries)
            changed = [len(pairs[entry.id].changes) for entry in entries if entry.id in pairs]
            equal = f"{sum(changed)} figures differ" if any(changed) else "figures equal"
            cells[key][number] += f" ({len(changed)} compared, {equal})" if changed else ""
    rows = [(*key, *texts) for key, texts in sorted(cells.items())]
    return Table("Verdicts by strategy", ("strategy", "backend", *_names(columns)), rows)


def _names(columns: Sequence[Snapshot]) -> list[str]:
    """Hardware, with the run's name where two runs share one."""
    labels = [snapshot.hardware for snapshot in columns]
    return [
        label if labels.count(label) == 1 else f"{label} ({snapshot.name})"
        for label, snapshot in zip(labels, columns, strict=True)
    ]
