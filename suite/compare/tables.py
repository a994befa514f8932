"""A comparison as tables; every form (text, Markdown, HTML) is made from the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from shardproof import verdicts
from shardproof.compare import exact_figures
from shardproof.compare.compare import FigureChange, Pairing, RunComparison, reasons
from shardproof.compare.snapshot import Entry, Snapshot
from shardproof.table import Mark, Table, grouped, some

#: Ids that are named for one reason.
EXAMPLES = 3
_MARKS: Mapping[exact_figures.Word, Mark] = {"worse": "bad", "better": "good", "changed": "changed"}
BY: dict[str, tuple[tuple[str, ...], Callable[[Entry], tuple[str, ...]]]] = {
    "": (("implementation", "backend"), lambda entry: (entry.implementation, entry.backend)),
    "strategy": (("strategy",), lambda entry: (entry.strategy,)),
    "backend": (("backend",), lambda entry: (entry.backend,)),
}


@dataclass
class ComparisonReport:
    heading: str
    summary: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def report(
    comparisons: Sequence[RunComparison], by: str = "", only_changed: bool = False
) -> ComparisonReport:
    reference = comparisons[0].before
    names = ", ".join(comparison.after.name for comparison in comparisons)
    made = ComparisonReport(f"{names} against {reference.name}")
    made.tables.append(runs([reference, *(c.after for c in comparisons)]))
    for comparison in comparisons:
        prefix = f"{comparison.after.name}: " if len(comparisons) > 1 else ""
        made.summary.append(prefix + sentence(comparison))
        made.summary += [prefix + note for note in comparison.notes]
        parts = (
            incomparable(comparison),
            presence(comparison),
            groups(comparison, by, only_changed),
            changes(comparison.changes),
            comparison.times.table(only_changed),
        )
        made.tables += [t.titled(prefix + t.title) for t in parts if t.rows]
    return made


def sentence(comparison: RunComparison) -> str:
    counts = Counter[str](change.word for change in comparison.changes)
    shown = {"worse": "worse", "better": "better", "changed": "changed otherwise"}
    clauses = [f"{counts[w]} exact figures {shown[w]}" for w in shown if counts.get(w)]
    moved = Counter(time.verdict for time in comparison.times)
    if comparison.times:
        clauses.append("ratios of times: " + ", ".join(f"{n} {word}" for word, n in moved.items()))
    clauses += [
        f"{len(ids)} {what}"
        for ids, what in (
            (comparison.apart, "not comparable"),
            (comparison.missing, "missing"),
            (comparison.left_out, "left out"),
            (comparison.new, "new"),
        )
        if ids
    ]
    total = sum(pair.figures for pair in comparison.pairs)
    head = f"{comparison.comparable:,} results compared, {total:,} exact figures"
    if comparison.obstacle:
        head = f"nothing is comparable: {comparison.obstacle}"
    if comparison.unchanged:
        return f"{head}: nothing changed" + (f"; {'; '.join(clauses)}" if clauses else "")
    return f"{head}{'; ' if comparison.obstacle else ': '}{'; '.join(clauses)}"


def runs(snapshots: Sequence[Snapshot], beside: Sequence[str] = ()) -> Table:
    """A row a run, with the comparison of each further run with the first."""
    roles = "reference", *(beside or ["compared"] * (len(snapshots) - 1))
    rows = [
        (
            *(snapshot.hardware, snapshot.name, snapshot.taken),
            ", ".join(dict.fromkeys(version.suite for version in snapshot.versions)),
            ", ".join(dict.fromkeys(version.torch for version in snapshot.versions)),
            *(snapshot.versions[-1].python, snapshot.versions[-1].commit or "-"),
            *(verdicts_of(snapshot.cases.values()) or "-", f"{len(snapshot.timed):,}"),
            f"{sum(kills.values())} of {len(kills)}" if (kills := snapshot.kills) else "-",
            role,
        )
        for snapshot, role in zip(snapshots, roles, strict=True)
    ]
    headings = (
        *("hardware", "run", "date", "suite", "torch", "Python", "commit", "verdicts", "timed"),
        *("faults killed", "exact figures" if beside else "role"),
    )
    return Table("Runs", headings, rows)


def incomparable(comparison: RunComparison) -> Table:
    rows = [(why, f"{len(ids):,}", some(ids, EXAMPLES)) for why, ids in reasons(comparison.apart)]
    return Table("Not comparable", ("why", "results", "which"), rows, align="lr")


def presence(comparison: RunComparison) -> Table:
    left_out = comparison.left_out
    parts = (
        ("missing", "in the reference only", comparison.missing),
        ("left out", "; ".join(dict.fromkeys(left_out.values())), list(left_out)),
        ("new", "not in the reference", comparison.new),
    )
    rows = [(what, why, f"{len(ids):,}", some(ids, EXAMPLES)) for what, why, ids in parts if ids]
    headings = ("what", "why", "results", "which")
    return Table("Only in one run", headings, rows, align="llr")


def groups(comparison: RunComparison, by: str, only_changed: bool) -> Table:
    names, key = BY[by]
    members = grouped((key(pair.after), pair) for pair in comparison.pairs)
    rows: list[tuple[str, ...]] = []
    marks: list[Mark] = []
    for group, pairs in sorted(members.items()):
        counts = Counter[str](change.word for pair in pairs for change in pair.changes)
        if only_changed and not counts:
            continue
        changed = sum(bool(pair.changes) for pair in pairs)
        was, now = verdicts_of(p.before for p in pairs), verdicts_of(p.after for p in pairs)
        marks.append("bad" if counts.get("worse") else "good" if counts.get("better") else "")
        rows.append(
            (
                *(*group, f"{len(pairs):,}", f"{len(pairs) - changed:,}"),
                *(f"{counts.get(word, 0):,}" for word in ("worse", "better", "changed")),
                was if was == now else f"{was} -> {now}",
                *(_moved(pairs, name) for name in ("traffic.bytes_sent", "memory.bytes_held")),
            )
        )
    headings = (
        *names, "compared", "equal", "worse", "better", "changed", "verdicts",
        "bytes sent a step", "bytes held",
    )  # fmt: skip
    align = "l" * len(names) + "rrrrrlrr"
    return Table("Exact figures, tolerance 0", headings, rows, marks, align=align)


def verdicts_of(entries: Iterable[Entry]) -> str:
    counts = Counter(entry.verdict for entry in entries)
    order = [word for word in verdicts.VERDICTS if word in counts]
    order += sorted(set(counts) - set(order))
    return ", ".join(f"{counts[word]} {word}" for word in order)


def _moved(pairs: Sequence[Pairing], name: str) -> str:
    """The sum of one figure over those that have it on both sides, then and now."""
    was, now, known = Fraction(0), Fraction(0), False
    for pair in pairs:
        both = [exact_figures.number(e.figures.get(name)) for e in (pair.before, pair.after)]
        if pair.decided and both[0] is not None and both[1] is not None:
            was, now, known = was + both[0], now + both[1], True
    if not known:
        return "-"
    if was == now:
        return exact_figures.show(str(now))
    share = f" ({float(now / was - 1):+.2%})" if was else ""
    return f"{exact_figures.show(str(was))} -> {exact_figures.show(str(now))}{share}"


def changes(differences: Sequence[FigureChange]) -> Table:
    rows = [
        (
            *(change.word, change.id, change.figure),
            *(exact_figures.show(change.before), exact_figures.show(change.after)),
            change.detail + (f" ({change.unlike})" if change.unlike else ""),
        )
        for change in differences
    ]
    headings = ("change", "result", "figure", "reference", "now", "where")
    marks = [_MARKS[change.word] for change in differences]
    return Table("Changes", headings, rows, marks, row_header=1)
