"""A comparison as tables; every form (text, Markdown, HTML) is made from the same ones."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from shardproof import verdicts
from shardproof.compare import exact_figures
from shardproof.compare.compare import Change, Comparison, Pairing, Timing, reasons, words
from shardproof.compare.snapshot import Entry, Sample, Snapshot

#: Ids that are told of a reason.
EXAMPLES = 3
BY: dict[str, tuple[tuple[str, ...], Callable[[Entry], tuple[str, ...]]]] = {
    "": (("implementation", "backend"), lambda entry: (entry.implementation, entry.backend)),
    "strategy": (("strategy",), lambda entry: (entry.strategy,)),
    "backend": (("backend",), lambda entry: (entry.backend,)),
}
TIME_NOTE = (
    "Ratios are those that each run measured by itself, side by side; seconds of two runs are "
    "never compared. Change: the ratio of the two ratios, its 95 % interval (Welch), p by Holm "
    "over this table. Margin: 5 %, or what the A/A pairs of both runs leave open."
)


@dataclass(frozen=True)
class Table:
    """``marks`` are words by row (``worse``, ``better`` or ``""``), for those who see colour."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: Sequence[str] = ()
    notes: Sequence[str] = ()
    #: From this column on figures stand to the right.
    numeric_from: int = 99


@dataclass
class Report:
    """Everything that a comparison says, in order."""

    heading: str
    summary: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def report(found: Sequence[Comparison], by: str = "", only_changed: bool = False) -> Report:
    """The report of comparisons that share their reference."""
    reference = found[0].before
    told = Report(f"{', '.join(c.after.name for c in found)} against {reference.name}")
    told.tables.append(runs([reference, *(c.after for c in found)]))
    for comparison in found:
        prefix = f"{comparison.after.name}: " if len(found) > 1 else ""
        told.summary.append(prefix + sentence(comparison))
        told.summary += [prefix + note for note in comparison.notes]
        parts = (
            incomparable(comparison),
            presence(comparison),
            groups(comparison, by, only_changed),
            changes(comparison.changes),
            times(comparison.times, only_changed),
        )
        told.tables += [_titled(prefix, table) for table in parts if table is not None]
    return told


def _titled(prefix: str, table: Table) -> Table:
    return Table(
        prefix + table.title, table.headings, table.rows, table.marks, table.notes,
        table.numeric_from,
    )  # fmt: skip


def sentence(found: Comparison) -> str:
    """The comparison in one sentence."""
    counts = words(found.changes)
    told = [
        f"{counts[word]} exact figures {shown}"
        for word, shown in (
            ("worse", "worse"),
            ("better", "better"),
            ("changed", "changed otherwise"),
        )
        if counts.get(word)
    ]
    moved = Counter(time.verdict for time in found.times)
    if found.times:
        told.append("ratios of times: " + ", ".join(f"{n} {word}" for word, n in moved.items()))
    told += [
        f"{len(ids)} {what}"
        for ids, what in (
            (found.apart, "not comparable"),
            (found.missing, "missing"),
            (found.left_out, "left out"),
            (found.new, "new"),
        )
        if ids
    ]
    total = sum(pair.figures for pair in found.pairs)
    head = f"{found.comparable:,} results compared, {total:,} exact figures"
    if found.obstacle:
        head = f"nothing is comparable: {found.obstacle}"
    if found.unchanged:
        return f"{head}: nothing changed" + (f"; {'; '.join(told)}" if told else "")
    return f"{head}{'; ' if found.obstacle else ': '}{'; '.join(told)}"


def runs(snapshots: Sequence[Snapshot]) -> Table:
    """Which runs, of what, where."""
    rows = []
    for number, snapshot in enumerate(snapshots):
        last = snapshot.versions[-1]
        rows.append(
            (
                snapshot.name,
                "reference" if not number else "compared",
                snapshot.hardware,
                ", ".join(dict.fromkeys(v.suite for v in snapshot.versions)),
                ", ".join(dict.fromkeys(v.torch for v in snapshot.versions)),
                last.python,
                last.commit or "-",
                snapshot.taken,
                f"{len(snapshot.cases):,}",
                f"{len(snapshot.timed):,}",
            )
        )
    headings = (
        *("run", "role", "hardware", "suite", "torch", "Python", "commit", "date", "cases"),
        "timed",
    )
    return Table("Runs", headings, rows)


def incomparable(found: Comparison) -> Table | None:
    """What cannot be compared, by reason."""
    if not found.apart:
        return None
    rows = [(why, f"{len(ids):,}", examples(ids)) for why, ids in reasons(found.apart)]
    return Table("Not comparable", ("why", "results", "which"), rows)


def presence(found: Comparison) -> Table | None:
    """What only one run has."""
    parts = (
        ("missing", "in the reference only", found.missing),
        ("left out", "; ".join(dict.fromkeys(found.left_out.values())), list(found.left_out)),
        ("new", "not in the reference", found.new),
    )
    rows = [(what, why, f"{len(ids):,}", examples(ids)) for what, why, ids in parts if ids]
    if not rows:
        return None
    return Table("Only in one run", ("what", "why", "results", "which"), rows)


def examples(ids: Sequence[str]) -> str:
    """The first ids, and how many more."""
    more = f" and {len(ids) - EXAMPLES:,} more" if len(ids) > EXAMPLES else ""
    return ", ".join(ids[:EXAMPLES]) + more


def groups(found: Comparison, by: str, only_changed: bool) -> Table | None:
    """Exact figures by implementation and backend, by strategy or by backend."""
    names, key = BY[by]
    members: dict[tuple[str, ...], list[Pairing]] = defaultdict(list)
    for pair in found.pairs:
        members[key(pair.after)].append(pair)
    rows, marks = [], []
    for group, pairs in sorted(members.items()):
        counts = words(change for pair in pairs for change in pair.changes)
        if only_changed and not counts:
            continue
        changed = sum(bool(pair.changes) for pair in pairs)
        marks.append("worse" if counts.get("worse") else "better" if counts.get("better") else "")
        rows.append(
            (
                *group,
                f"{len(pairs):,}",
                f"{len(pairs) - changed:,}",
                *(f"{counts.get(word, 0):,}" for word in ("worse", "better", "changed")),
                _verdicts(pairs),
                *(_moved(pairs, name) for name in ("traffic.bytes_sent", "memory.bytes_held")),
            )
        )
    if not rows:
        return None
    headings = (
        *names, "compared", "equal", "worse", "better", "changed", "verdicts",
        "bytes sent a step", "bytes held",
    )  # fmt: skip
    title = "Exact figures, tolerance 0"
    return Table(title, headings, rows, marks, numeric_from=len(names))


def _verdicts(pairs: Sequence[Pairing]) -> str:
    was, now = (
        verdicts_of(entry for pair in pairs for entry in [getattr(pair, side)])
        for side in ("before", "after")
    )
    return now if was == now else f"{was} -> {now}"


def verdicts_of(entries: Iterable[Entry]) -> str:
    """Counts of verdicts in order of gravity."""
    counts = Counter(entry.verdict for entry in entries)
    order = [word for word in verdicts.VERDICTS if word in counts]
    order += sorted(set(counts) - set(order))
    return ", ".join(f"{counts[word]} {word}" for word in order)


def _moved(pairs: Sequence[Pairing], name: str) -> str:
    """The sum of one figure over those that have it on both sides, then and now."""
    both = [
        (old, new)
        for pair in pairs
        if pair.told
        and (old := exact_figures.number(pair.before.figures.get(name))) is not None
        and (new := exact_figures.number(pair.after.figures.get(name))) is not None
    ]
    if not both:
        return "-"
    was, now = (sum(values, Fraction(0)) for values in zip(*both, strict=True))
    if was == now:
        return exact_figures.show(str(now))
    share = f" ({float(now / was - 1):+.2%})" if was else ""
    return f"{exact_figures.show(str(was))} -> {exact_figures.show(str(now))}{share}"


def changes(found: Sequence[Change]) -> Table | None:
    """Every exact figure that differs, worse ones first."""
    if not found:
        return None
    rows = [
        (
            change.word,
            change.id,
            change.figure,
            exact_figures.show(change.before),
            exact_figures.show(change.after),
            change.detail + ("" if change.exact else " (another build of torch)"),
        )
        for change in found
    ]
    headings = ("change", "result", "figure", "reference", "now", "where")
    return Table("Changes", headings, rows, [change.word for change in found])


def times(found: Sequence[Timing], only_changed: bool) -> Table | None:
    """Ratios of both runs and the interval of their difference."""
    rows, marks = [], []
    for time in found:
        if only_changed and time.verdict in ("same", "inconclusive"):
            continue
        marks.append({"slower": "worse", "faster": "better"}.get(time.verdict, ""))
        change = time.found
        low, middle, high = (math.exp(value) for value in (change.low, change.mean, change.high))
        rows.append(
            (
                time.id,
                time.ratio,
                interval(time.before),
                interval(time.after),
                f"{middle:.3f} [{low:.3f}, {high:.3f}]",
                f"{change.p_holm:.2g}",
                f"{math.expm1(time.margin):.1%}",
                verdict_of(time),
            )
        )
    if not rows:
        return None
    headings = (
        *("pair", "ratio", "reference [95 %]", "now [95 %]", "change [95 %]", "p", "margin"),
        "verdict",
    )
    return Table("Times, as ratios of each run", headings, rows, marks, [TIME_NOTE])


def verdict_of(time: Timing) -> str:
    """The verdict, in words that fit the ratio."""
    if time.verdict == "inconclusive":
        return f"inconclusive (could see {time.smallest:.0%})"
    if time.larger_is_better:
        return {"slower": "less efficient", "faster": "more efficient"}.get(
            time.verdict, time.verdict
        )
    return time.verdict


def interval(sample: Sample) -> str:
    """A ratio with its interval."""
    from shardproof.compare import welch

    if sample.blocks < 2:
        return f"{sample.ratio:.3f}"
    low, high = welch.interval(sample)
    return f"{sample.ratio:.3f} [{low:.3f}, {high:.3f}]"
