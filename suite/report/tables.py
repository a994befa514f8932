"""The table of results: implementation x backend x world, with errors, bytes and seconds.

All forms of a report are made from the same rows: counts of verdicts, the worst error against its
bound, bytes sent against the formula (and how many times the textbook's they are, for upstream
systems), and the median seconds of a case.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.runs.run_folder import Run
from shardproof.table import Mark, Table, grouped, number, some

#: Figures of one check, by name: their shapes are the check's own.
Figures = Mapping[str, Any]


HEADINGS = (
    *("implementation", "backend", "world", "verdicts"),
    *("worst error / bound", "bytes sent / formula", "median s"),
)


#: Bytes of a system that is held to its family, and what a table with such a row says of it.
WITHIN = "within family bounds"
OF_FAMILIES = (
    f"{WITHIN}: the bounds of its strategy's family, the default of a class of your own; for exact "
    "bytes declare depth = 'layout' or a cost model (docs/own-class.md)"
)


def terms(result: CaseResult) -> str:
    """The mark after a system that was not held to a layout of the suite's, or whose adapter
    multiplies losses.
    """
    told = {"family": ["depth family"], "own": ["own cost model"]}.get(result.depth or "", [])
    if result.loss_factor not in (None, "1"):
        told.append(f"loss_factor {result.loss_factor}")
    return f" ({', '.join(told)})" if told else ""


def table(results: Iterable[CaseResult], detailed: bool = True) -> Table:
    """A row for each implementation with options, backend and world, or (not ``detailed``)
    implementation and backend; rows of what broke are marked.
    """
    groups: dict[tuple[str, str, int], list[CaseResult]] = defaultdict(list)
    for result in results:
        case = result.case
        name, world = (case.system, case.world) if detailed else (case.implementation, 0)
        name += terms(result)
        groups[name, case.backend, world].append(result)
    rows: list[tuple[str, ...]] = []
    marks: list[Mark] = []
    for (name, backend, _), members in sorted(groups.items()):
        counts = verdicts.count(members)
        marks.append("bad" if any(counts[verdict] for verdict in verdicts.RED) else "")
        counted = [r for r in members if r.bytes_sent and r.bytes_expected]
        sent, expected = bytes_of(counted) if counted else (None, None)
        times, book = textbook(counted)
        worlds = _span(sorted({result.case.world for result in members}))
        told = ", ".join(f"{counts[v]} {v}" for v in verdicts.VERDICTS if counts[v])
        of_bytes = bytes_text(sent, expected) + (f" ({times:.3g} x {book})" if book else "")
        of_bytes = WITHIN if not counted and within_family(members) else of_bytes
        error = error_of(max(members, key=share_of))
        seconds = f"{statistics.median(result.seconds for result in members):.2f}"
        rows.append((name, backend, worlds, told, error, of_bytes, seconds))
    notes = [OF_FAMILIES] if any(WITHIN in row for row in rows) else []
    return Table("Results", HEADINGS, rows, marks, notes=notes, align="llrlllr")


def within_family(results: Sequence[CaseResult]) -> bool:
    """Whether the bytes of ``results`` were compared with the bounds of a family, and all held."""
    checks = [check for result in results if result.depth == "family" for check in result.checks]
    held = {check.status for check in checks if check.check == "traffic"}
    return "pass" in held and "fail" not in held


def bytes_of(results: Sequence[CaseResult]) -> tuple[Fraction, Fraction]:
    """Bytes sent and bytes expected of all ``results``."""
    sent = sum((Fraction(result.bytes_sent or 0) for result in results), Fraction())
    return sent, sum((Fraction(result.bytes_expected or 0) for result in results), Fraction())


def share_of(result: CaseResult) -> float:
    """How much of its bound the worst error of a case uses; -1 where nothing was compared."""
    error, bound = result.worst_error, result.bound
    return -1.0 if error is None or bound is None else share(error, bound)


def share(error: float, bound: float) -> float:
    """How much of its bound an error uses; a bitwise bound is 0, any error beyond it infinite."""
    if math.isnan(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


def _span(worlds: Sequence[int]) -> str:
    if len(worlds) > 2 and worlds[-1] - worlds[0] == len(worlds) - 1:
        return f"{worlds[0]}-{worlds[-1]}"
    return ", ".join(map(str, worlds))


def error_is_ratio(result: CaseResult) -> bool:
    """Whether the error of a result is a multiple of what one device alone errs by."""
    lane: str = result.figures("equivalence").get("judged_in", result.case.lane)
    return lane == "working_precision"


def error_of(result: CaseResult) -> str:
    """The worst error of a case and its bound; a bound of 0 asks for equal bits.

    A ratio (``x1.3 of 4``) is a multiple of one device's own error, all others are relative errors.
    """
    error, bound = result.worst_error, result.bound
    if error is None or bound is None:
        refused = "refuses" in result.case.expect and result.verdict == "pass"
        return "refused, as expected" if refused else "-"
    if error_is_ratio(result):
        return f"x{error:.2g} of {bound:g}"
    if bound == 0:
        differ = f"{error:,.0f} elements" if math.isfinite(error) else str(error)
        return "equal bits" if error == 0 else f"{differ} / equal bits"
    return f"{error:.2g} / {bound:.0e}"


def bytes_text(sent: Fraction | None, expected: Fraction | None) -> str:
    if sent is None or expected is None:
        return "-"
    if sent == expected:
        return f"{whole(sent)} = formula"
    factor = f" (x{float(sent / expected):.3g})" if expected else ""
    return f"{whole(sent)} / {whole(expected)}{factor}"


def textbook(members: Iterable[CaseResult]) -> tuple[float, str]:
    """How many times the textbook's bytes the ``members`` send that have one, and its name
    (``""``: none does).
    """
    told = [(r, r.figures("traffic")) for r in members if "textbook" in r.figures("traffic")]
    wanted = sum(Fraction(figures["textbook_bytes"]) for _, figures in told)
    sent, _ = bytes_of([result for result, _ in told])
    return (float(sent / wanted), told[-1][1]["textbook"]) if wanted else (0.0, "")


def whole(value: Fraction) -> str:
    """A number of bytes, with decimals only where it is a fraction."""
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"


#: Reasons of skipped cases that have a line each, and cases that a line on what was left out names.
_SKIPS, _NAMED = 12, 3


def skips(results: Iterable[CaseResult], every: bool = True) -> list[str]:
    """Why cases were skipped: a line for each implementation and reason, most frequent first.

    Unless ``every``: one line, for the first of them and how many other cases there are.
    """
    skipped = (result for result in results if verdicts.kind(result.verdict) == "skip")
    counts = Counter(f"{result.case.implementation}: {result.reason}" for result in skipped)
    lines = [f"skipped ({times}): {reason}" for reason, times in counts.most_common(_SKIPS)]
    if len(lines) > 1 and not every:
        others = number(counts.total() - max(counts.values()), "more case")
        return [f"{lines[0]}; {others} for other reasons (-v lists them)"]
    rest = len(counts) - len(lines)
    return [*lines, *([f"skipped for {rest} more reasons: see report.html"] if rest else [])]


def left_out(reasons: Mapping[str, str], every: bool = True) -> list[str]:
    """The cases that were not run, ``reasons`` by id: a line for each reason, with some ids
    (``every``).
    """
    names = grouped((reason, name) for name, reason in reasons.items())
    lines = {f"left out ({len(ids)}): {why}": some(ids, _NAMED) for why, ids in names.items()}
    return [f"{line}: {ids}" if every else line for line, ids in lines.items()]


def closing(run: Run) -> str:
    """The counts of verdicts of ``run``, with cases that have no result."""
    told = verdicts.summary(verdicts.count(run.cases), len(run.left_out))
    absent = len(run.unfinished)
    return f"{told}, {absent} planned without a result" if absent else told
