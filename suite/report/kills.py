"""Rows of planted faults: which were killed, by what, and which checks see them as well."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from shardproof.checks.results import Kill
from shardproof.report.looks import chip
from shardproof.runs import random_kills
from shardproof.runs.run_folder import Run
from shardproof.table import Mark, Row, Table, TableCell, some

#: Faults whose sentence is wrong that are named.
_NAMED = 5

#: What the marks of :func:`table` mean.
MARKS = {
    "K": "killed by its named check",
    "x": "fails too",
    "!": "named, but passes",
    "": "does not fail",
}
LEGEND = "; ".join(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark) + "."


def table(kills: Sequence[Kill]) -> Table:
    """Fault x check as one of :data:`MARKS`, with what became of each fault."""
    columns = sorted({check for k in kills for check in (*k.killed_by, *k.failing)})
    marks: list[Mark] = ["" if kill.killed else "bad" for kill in kills]
    survivors = any(not kill.killed for kill in kills)
    rows: list[Row] = []
    for kill in kills:
        found = (_mark(check in kill.killed_by, check in kill.failing) for check in columns)
        margin = "-" if kill.margin is None else f"{kill.margin:.1e}"
        name = kill.name, chip("killed" if kill.killed else "survives")
        why = [kill.why_not] if survivors else []
        rows.append((*name, *found, kill.parent, kill.lane, margin, *why))
    upright = [TableCell(c, html=f"<span>{escape(c)}</span>", style_class="cap") for c in columns]
    headings: Row = ("fault", "verdict", *upright, "parent", "lane", "error / bound")
    headings = (*headings, "why it survives") if survivors else headings
    notes = (LEGEND, f"{kill_counts(kills)}.")
    align = "ll" + "c" * len(columns) + "llrl"
    return Table("Planted faults", headings, rows, marks, notes, align)


def by_n(run: Run) -> Table:
    """How many faults N random clean cases kill; without rows where none was planted so."""
    if (found := random_kills.read(run.path)) is None:
        return Table("", (), ())
    return replace(found.table(), notes=(f"{found.sentence()}.",))


def _mark(named: bool, fails: bool) -> TableCell:
    mark = "K" if named and fails else "!" if named else "x" if fails else ""
    looks = {"K": ("mark mark-K", "0"), "!": ("mark mark-no", "1"), "x": ("mark mark-x", "2")}
    style, key = looks.get(mark, ("mark", "-"))
    html = f'<span title="{MARKS[mark]}">{mark}</span>' if mark else ""
    return TableCell(mark, html=html, sort_key=key, style_class=style)


def kill_counts(kills: Sequence[Kill]) -> str:
    """Kills by lane, and how many faults a single check sees: dropping it would lose them."""
    lanes = Counter(kill.lane for kill in kills if kill.killed)
    by_lane = ", ".join(f"{lane} {count}" for lane, count in sorted(lanes.items())) or "none"
    lone = Counter(kill.failing[0] for kill in kills if len(kill.failing) == 1)
    only = ", ".join(f"{check} {count}" for check, count in sorted(lone.items()))
    seen = f"seen by one check only: {lone.total()} ({only or 'none'})"
    return "; ".join(filter(None, (f"kills by lane: {by_lane}", seen, sentence_counts(kills))))


def sentence_counts(kills: Sequence[Kill]) -> str:
    """How many kills are exact, vague, or name another cause than the fault's."""
    counts = Counter(kill.told for kill in kills if kill.told)
    wrong = [kill.name for kill in kills if kill.told == "wrong"]
    if not counts:
        return ""
    told = ", ".join(f"{counts[word]} {word}" for word in ("exact", "vague", "wrong"))
    return f"sentences: {told}" + (f" ({some(wrong, _NAMED)})" if wrong else "")


def verdict_counts(kills: Sequence[Kill]) -> str:
    """How many of the faults that ran were killed, and how many did not run, as a sentence."""
    run, killed = judged(kills), sum(kill.killed for kill in judged(kills))
    late = len(kills) - len(run)
    more = f"; {late} more were not run (no time in the budget)" if late else ""
    return f"Planted faults: {killed} of {len(run)} killed by their named check{more}."


def judged(kills: Sequence[Kill]) -> list[Kill]:
    """The faults that were run, survivors first."""
    there = [kill for kill in kills if not kill.left_out]
    return sorted(there, key=lambda kill: (kill.killed, kill.name))


def rerun(kill: Kill) -> str:
    """The command that plants the fault again."""
    depth = f" --depth {kill.depth}" if kill.depth else ""
    return f"shardproof mutants --impl {shlex.quote(kill.name)}{depth}"


def survivors(kills: Sequence[Kill]) -> list[Kill]:
    return [kill for kill in judged(kills) if not kill.killed]
