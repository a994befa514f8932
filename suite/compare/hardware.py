"""Runs of several machines side by side: what is equal everywhere, and each machine's own ratios.

Exact figures must be the same on every machine.  Times stand as ratios that each machine measured
by itself; the reference's column is the first, and what cannot be compared with it says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardproof.compare.compare import RunComparison, Timing
from shardproof.compare.snapshot import Entry, Snapshot
from shardproof.compare.tables import ComparisonReport, interval, runs, verdict_of, verdicts_of
from shardproof.strategies import REPLICATION
from shardproof.table import Table

NOTE = (
    "Each ratio was measured side by side on its own machine, with its 95 % interval; seconds of "
    "two machines are never compared. Beside it stands how it differs from the first column "
    "(Welch, p by Holm), where versions, cell and data are the same."
)
SCALING = "Scaling"
TITLES = ("Time against DDP", "Time of A over B", SCALING)


def report(
    reference: Snapshot, others: Sequence[RunComparison], only_changed: bool = False
) -> ComparisonReport:
    snapshots = [reference, *(c.after for c in others)]
    made = ComparisonReport(f"{len(snapshots)} run{'s' * (len(snapshots) > 1)} by hardware")
    made.tables.append(runs(snapshots, [_equal(c) for c in others]).titled("Machines"))
    for comparison in others:
        made.summary += [f"{comparison.after.name}: {note}" for note in comparison.notes]
    if (exact := strategies(reference, others)).rows:
        made.tables.append(exact)
    made.tables += ratios(reference, others, only_changed)
    return made


def _equal(comparison: RunComparison) -> str:
    pairs = [pair for pair in comparison.pairs if pair.id in comparison.after.cases]
    apart = comparison.apart
    total = sum(pair.figures for pair in pairs)
    if not total:
        return f"not comparable: {apart[0].why}" if apart else "no case in common"
    differ = sum(len(pair.changes) for pair in pairs)
    more = f", {len(apart):,} results not comparable" if apart else ""
    return (f"all {total:,} equal" if not differ else f"{differ:,} of {total:,} differ") + more


def strategies(reference: Snapshot, others: Sequence[RunComparison]) -> Table:
    """A row a strategy and backend: verdicts on each machine, and whether figures are equal."""
    columns = [reference, *(c.after for c in others)]
    cells: dict[tuple[str, str], list[str]] = defaultdict(lambda: ["-"] * len(columns))
    for number, snapshot in enumerate(columns):
        members: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in snapshot.cases.values():
            members[entry.strategy, entry.backend].append(entry)
        for key, entries in members.items():
            cells[key][number] = verdicts_of(entries)
    for number, comparison in enumerate(others, 1):
        compared: dict[tuple[str, str], list[int]] = defaultdict(list)
        for pair in comparison.pairs:
            if pair.id in comparison.after.cases:
                compared[pair.after.strategy, pair.after.backend].append(len(pair.changes))
        for key, changed in compared.items():
            differ = sum(changed)
            equal = f"{differ} figures differ" if differ else "figures equal"
            cells[key][number] += f" ({len(changed)} compared, {equal})"
    rows = [(*key, *texts) for key, texts in sorted(cells.items())]
    return Table("Verdicts by strategy", ("strategy", "backend", *_names(columns)), rows)


def ratios(reference: Snapshot, others: Sequence[RunComparison], only_changed: bool) -> list[Table]:
    columns = [reference, *(c.after for c in others)]
    compared: list[Mapping[tuple[str, str], Timing]] = [
        {},
        *({(time.id, time.ratio): time for time in c.times} for c in others),
    ]
    apart = [{}, *({item.id: item.why for item in c.apart} for c in others)]
    keys: dict[tuple[str, str], Entry] = {}
    for snapshot in columns:
        for name, entry in _in_order(snapshot):
            for ratio in entry.samples:
                keys.setdefault((name, ratio), entry)
    rows: dict[str, list[tuple[str, ...]]] = {title: [] for title in TITLES}
    for (name, ratio), entry in keys.items():
        times = [timings.get((name, ratio)) for timings in compared]
        if only_changed and not any(time is not None and time.moved for time in times):
            continue
        texts = []
        for snapshot, time, others_apart in zip(columns, times, apart, strict=True):
            here = snapshot.timed.get(name)
            if here is None or ratio not in here.samples:
                texts.append(here.verdict if here is not None else "-")
                continue
            more = " (not comparable)" if name in others_apart else ""
            more = f" {verdict_of(time)}" if time is not None else more
            texts.append(interval(here.samples[ratio]) + more)
        title = _title(ratio, entry)
        kind = [ratio] if title == SCALING else []
        rows[title].append((_what(name, entry), entry.backend, str(entry.world), *kind, *texts))
    tables = []
    for title, of_title in rows.items():
        kind = ["ratio"] if title == SCALING else []
        headings = ("what", "backend", "world", *kind, *_names(columns))
        tables += [Table(title, headings, of_title, notes=[NOTE])] if of_title else []
    beside = _beside(columns)
    return tables + ([beside] if beside.rows else [])


def _beside(columns: Sequence[Snapshot]) -> Table:
    rows = []
    names = dict.fromkeys(
        (name, figure)
        for snapshot in columns
        for name, entry in _in_order(snapshot)
        for figure in entry.beside
        if not figure.startswith("resident_bytes")
    )
    for name, figure in names:
        entries = [snapshot.timed.get(name) for snapshot in columns]
        first = next(entry for entry in entries if entry is not None)
        texts = [
            f"{entry.beside[figure]:.3f}" if entry is not None and figure in entry.beside else "-"
            for entry in entries
        ]
        what = (_what(name, first), first.backend, str(first.world))
        rows.append((*what, figure.replace("_", " "), *texts))
    headings = ("what", "backend", "world", "figure", *_names(columns))
    return Table("Modelled, and the dimensionless scorecard", headings, rows)


def _in_order(snapshot: Snapshot) -> list[tuple[str, Entry]]:
    """Timed results by name, those that differ in nothing but ranks by their number."""
    return sorted(
        snapshot.timed.items(),
        key=lambda item: (item[1].implementation, item[1].backend, item[1].world, item[0]),
    )


def _title(ratio: str, entry: Entry) -> str:
    if ratio != "time":
        return SCALING
    against = entry.implementation.split(" v ")[-1]
    return TITLES[0] if against.endswith(f"/{REPLICATION}") else TITLES[1]


def _what(name: str, entry: Entry) -> str:
    parts = name.split("::")
    workload = f", {parts[-1]}" if len(parts) > 3 else ""
    return f"{entry.implementation} ({parts[1]}{workload})" if len(parts) > 1 else name


def _names(columns: Sequence[Snapshot]) -> list[str]:
    """Hardware, with the run's name where two runs share one."""
    labels = [snapshot.hardware for snapshot in columns]
    return [
        label if labels.count(label) == 1 else f"{label} ({snapshot.name})"
        for label, snapshot in zip(labels, columns, strict=True)
    ]
