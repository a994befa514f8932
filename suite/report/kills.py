"""Rows of planted faults: which were killed, by what, and which checks see them as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardproof.report.tables import Result

#: What the marks of :func:`kill_matrix` mean.
MARKS = {
    "K": "killed by its named check",
    "x": "fails too",
    "!": "named but silent",
    "": "does not fail",
}


def kill_matrix(kills: Sequence[Result]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Fault x check, as one of :data:`MARKS`."""
    columns = sorted({check for k in kills for check in (*k["killed_by"], *k["failing"])})
    lines = []
    for kill in kills:
        marks = []
        for check in columns:
            named, fails = check in kill["killed_by"], check in kill["failing"]
            marks.append("K" if named and fails else "!" if named else "x" if fails else "")
        lines.append((str(kill["name"]), marks))
    return columns, lines


def kill_counts(kills: Sequence[Result]) -> str:
    """Kills by lane, and how many faults a single check sees: dropping it would lose them."""
    lanes = Counter(str(kill["lane"]) for kill in kills if kill["killed"])
    by_lane = ", ".join(f"{lane} {count}" for lane, count in sorted(lanes.items())) or "none"
    lone = Counter(str(kill["failing"][0]) for kill in kills if len(kill["failing"]) == 1)
    only = ", ".join(f"{check} {count}" for check, count in sorted(lone.items()))
    return f"kills by lane: {by_lane}; seen by one check only: {lone.total()} ({only or 'none'})"


def verdict_counts(kills: Sequence[Result]) -> str:
    """How many of the faults that ran were killed, and how many did not run, as a sentence."""
    told = judged(kills)
    killed = len(told) - len(survivors(kills))
    late = len(kills) - len(told)
    more = f"; {late} more were not run (no time in the budget)" if late else ""
    return f"Planted faults: {killed} of {len(told)} killed by their named check{more}."


def judged(kills: Sequence[Result]) -> list[Result]:
    """The faults that were run, survivors first."""
    there = [kill for kill in kills if kill["verdict"] != "left out"]
    return sorted(there, key=lambda kill: (bool(kill["killed"]), str(kill["name"])))


def survivors(kills: Sequence[Result]) -> list[Result]:
    """The faults that were run and not killed."""
    return [kill for kill in judged(kills) if not kill["killed"]]
