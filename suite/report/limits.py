"""What was *not* checked: left out, skipped, without power, not judged, never asked.

A table of green verdicts says nothing about what no case looked at, so each reason why something
was not looked at stands here with how often it occurred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardproof import verdicts
from shardproof.bench import lines
from shardproof.checks import CHECKS, Outcome
from shardproof.checks.results import CaseResult
from shardproof.report import capability_matrix, looks, summary
from shardproof.runs.run_folder import Run
from shardproof.table import Table, some

#: Rows of one table that are shown; the rest is counted.
MOST = 200


@dataclass(frozen=True)
class Limit:
    """What was not checked; ``items`` of rows are listed on demand, ``rest`` counts rows beyond."""

    title: str
    why: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    items: tuple[tuple[str, ...], ...] = ()
    rest: int = 0

    @property
    def table(self) -> Table:
        more = f"And {self.rest} more rows: the lines of cases.jsonl hold them."
        return Table(self.title, self.headings, self.rows, notes=(more,) if self.rest else ())

    @property
    def count(self) -> int:
        return len(self.rows) + self.rest


def limits(run: Run) -> list[Limit]:
    return [
        limit
        for limit in (
            _unfinished(run),
            _left_out(run),
            _skipped(run.cases),
            _open(run.cases),
            _open_times(run),
            _skipped_checks(run.cases),
            _never_asked(run),
            _not_tested(run.cases),
            _not_judged(run.cases),
            _working_precision_only(run.cases),
        )
        if limit.rows
    ]


def _limit(
    title: str,
    why: str,
    headings: Sequence[str],
    groups: Mapping[tuple[str, ...], Sequence[str]],
    listed: bool = False,
) -> Limit:
    """A row for each group, the largest first: how many it has, and what they share.

    ``groups`` has what is counted; ``listed``: it is also listed on demand.
    """
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    shown, rest = ordered[:MOST], len(ordered[MOST:])
    rows = tuple((str(len(members)), *key) for key, members in shown)
    items = tuple(tuple(members) for _, members in shown) if listed else ()
    return Limit(title, why, ("cases", *headings), rows, items, rest)


def _grouped(pairs: Iterable[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], list[str]]:
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key, member in pairs:
        groups[key].append(member)
    return groups


def _unfinished(run: Run) -> Limit:
    key = ("planned, without a result: the run ended before",)
    groups = _grouped((key, name) for name in summary.unfinished(run))
    why = "Planned by an invocation that was stopped."
    return _limit("Planned and missing", why, ("reason",), groups, listed=True)


def _left_out(run: Run) -> Limit:
    lines = [((line.reason,), line.id) for line in run.left_out]
    lines += [((f"fault: {kill.why_not}",), kill.name) for kill in run.kills if kill.left_out]
    return _limit("Left out", "Selected and not run.", ("reason",), _grouped(lines), listed=True)


def _of_kinds(
    results: Iterable[CaseResult],
    kinds: Collection[str],
    key: Callable[[CaseResult], tuple[str, ...]],
) -> dict[tuple[str, ...], list[str]]:
    return _grouped((key(r), r.id) for r in results if verdicts.kind(r.verdict) in kinds)


def _skipped(results: Iterable[CaseResult]) -> Limit:
    return _limit(
        "Skipped cases",
        "The implementation does not claim to do this, or this machine lacks something.",
        ("implementation", "reason"),
        _of_kinds(results, ("skip",), lambda r: (r.case.implementation, r.reason)),
        listed=True,
    )


def _open(results: Iterable[CaseResult]) -> Limit:
    return _limit(
        "Not decided",
        "These ran, but their records do not suffice for a verdict.",
        ("verdict", "implementation", "reason"),
        _of_kinds(results, verdicts.OPEN, lambda r: (r.verdict, r.case.implementation, r.reason)),
        listed=True,
    )


_OPEN_TIMES = (
    "Times that decide nothing",
    "Comparisons and efficiencies that were not measured, or whose interval leaves it open.",
    ("timing", "verdict", "reason"),
)


def _open_times(run: Run) -> Limit:
    """Comparisons and cells of scaling that were not measured, or do not suffice for a verdict.

    A comparison that others beside it make undecided (Holm) is open as well.
    """
    if not run.benches and not run.scalings:
        return Limit(*_OPEN_TIMES, ())
    from shardproof.bench import stats  # scipy is slow to import, and the gate does not need it

    pairs, cells = lines.pairs(run), lines.cells(run)
    family = stats.family(pairs)
    rows = []
    timed: list[lines.PairLine | lines.CellLine] = [*pairs, *cells]
    for line in timed:
        word, why = line.verdict, line.reason
        beside = family[line.id].verdict if line.id in family else word
        if looks.head(beside) in summary.OPEN and beside != word:
            word, why = beside, f"{word} alone, not beside {len(family)} comparisons (Holm)"
        if looks.head(word) in (*summary.OPEN, "oversubscribed"):
            rows.append((line.id, word, why))
    return Limit(*_OPEN_TIMES, tuple(rows[:MOST]), rest=len(rows[MOST:]))


def _judged(results: Iterable[CaseResult]) -> Iterator[tuple[str, Outcome]]:
    for result in results:
        if verdicts.kind(result.verdict) != "skip":
            yield from ((result.case.implementation, outcome) for outcome in result.checks)


def _with_members(
    groups: Mapping[tuple[str, ...], list[str]], most: int
) -> dict[tuple[str, ...], list[str]]:
    return {(*key, some(sorted(set(members)), most)): members for key, members in groups.items()}


def _skipped_checks(results: Iterable[CaseResult]) -> Limit:
    groups = _grouped(
        ((outcome.check, outcome.message), name)
        for name, outcome in _judged(results)
        if outcome.status not in ("pass", "fail")
    )
    return _limit(
        "Checks that did not judge in cases that ran",
        "The case has a verdict from its other checks.",
        ("check", "reason", "implementations"),
        _with_members(groups, 4),
    )


def _never_asked(run: Run) -> Limit:
    """Capabilities that some implementation was asked about, and this one on no backend."""
    cells = capability_matrix.cells(run.cases, run.left_out)
    names = sorted({cell.implementation for cell in cells})
    asked = {(cell.implementation, cell.capability) for cell in cells if cell.judged}
    rows = []
    for capability in capability_matrix.columns(cells):
        absent = [name for name in names if (name, capability) not in asked]
        if 0 < len(absent) < len(names):
            rows.append((capability, str(len(absent)), ", ".join(absent)))
    return Limit(
        "Capabilities that no judged case asked about",
        "An empty place in the matrix, on every backend.",
        ("capability", "implementations", "which"),
        tuple(rows),
    )


def _not_tested(results: Iterable[CaseResult]) -> Limit:
    def pairs() -> Iterator[tuple[tuple[str, ...], str]]:
        for _, outcome in _judged(results):
            for item in outcome.figures.get("not_tested", ()):
                phase, _, tensor = str(item).partition(": ")
                yield (phase, tensor), outcome.check

    return _limit(
        "Tensors without power",
        "A rolled, halved or rescaled copy of these would also have passed, so their pass says "
        "little (a step counter, a tensor of zeros or of one element).",
        ("when", "tensor", "check"),
        _with_members(_grouped(pairs()), most=len(CHECKS)),
    )


def _not_judged(results: Iterable[CaseResult]) -> Limit:
    def pairs() -> Iterator[tuple[tuple[str, ...], str]]:
        for name, outcome in _judged(results):
            for kind, why in (outcome.figures.get("not_judged") or {}).items():
                yield (f"{outcome.check}: {kind.replace('_', ' ')}", name, str(why)), name
            note = outcome.figures.get("activations")
            if isinstance(note, str):
                why = note.removeprefix("not judged: ")
                yield (f"{outcome.check}: activations", name, why), name

    return _limit(
        "Figures that were measured and not judged",
        "Their check passed without them.",
        ("what", "implementation", "reason"),
        _grouped(pairs()),
    )


def _working_precision_only(results: Iterable[CaseResult]) -> Limit:
    def precision(result: CaseResult) -> tuple[str, str]:
        case = result.case
        return case.implementation, ", ".join(sorted({case.dtype, *case.precision.values()}))

    return _limit(
        "Judged in working precision only",
        "Their bound is a multiple of one device's own error, so small faults go unseen.",
        ("implementation", "precision"),
        _of_kinds(results, (verdicts.WORKING_PRECISION_ONLY,), precision),
    )
