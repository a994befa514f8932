"""What was *not* checked: left out, skipped, without power, not judged, never asked.

A table of green verdicts says nothing about what no case looked at, so each reason why something
was not looked at stands here with how often it occurred.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardproof import verdicts
from shardproof.bench import lines
from shardproof.report import capability_matrix, looks, matrix, summary
from shardproof.report.tables import Result
from shardproof.runs.run_folder import Run
from shardproof.table import Table

#: Rows of one table that are shown; the rest is counted.
MOST = 200


@dataclass(frozen=True)
class Limit:
    """A table of what was not checked; ``items`` of each row are listed on demand.

    ``rest`` counts rows beyond the table's.
    """

    title: str
    why: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    items: tuple[tuple[str, ...], ...] = ()
    rest: int = 0

    @property
    def table(self) -> Table:
        """The rows, with how many more there are."""
        more = f"And {self.rest} more rows: the lines of cases.jsonl hold them."
        return Table(self.title, self.headings, self.rows, notes=(more,) if self.rest else ())

    @property
    def count(self) -> int:
        """Rows that there are."""
        return len(self.rows) + self.rest


def limits(run: Run) -> list[Limit]:
    """Every table that has rows."""
    return [
        found
        for found in (
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
        if found.rows
    ]


def _unfinished(run: Run) -> Limit:
    names = summary.unfinished(run)
    rows = [(f"{len(names)}", "planned, and no result: the run was ended before")] if names else []
    why = "Planned by an invocation that was stopped."
    items = (tuple(names),) if names else ()
    return Limit("Planned and missing", why, ("cases", "reason"), tuple(rows), items)


def _left_out(run: Run) -> Limit:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for line in run.left_out:
        by_reason[str(line["reason"])].append(str(line["id"]))
    for kill in run.kills:
        if kill["verdict"] == "left out":
            by_reason[f"fault: {kill['why_not']}"].append(str(kill["name"]))
    ordered = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    return Limit(
        "Left out",
        "Selected and not run.",
        ("cases", "reason"),
        tuple((str(len(ids)), reason) for reason, ids in ordered),
        tuple(tuple(ids) for _, ids in ordered),
    )


def _skipped(results: Iterable[Result]) -> Limit:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        if verdicts.kind(result["verdict"]) == "skip":
            groups[result["case"]["implementation"], result["reason"]].append(result["id"])
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    shown, rest = ordered[:MOST], len(ordered[MOST:])
    return Limit(
        "Skipped cases",
        "Outside what the implementation claims, or something is missing on this machine.",
        ("cases", "implementation", "reason"),
        tuple((str(len(ids)), *key) for key, ids in shown),
        tuple(tuple(ids) for _, ids in shown),
        rest,
    )


def _open(results: Iterable[Result]) -> Limit:
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for result in results:
        if verdicts.kind(result["verdict"]) in verdicts.OPEN:
            key = result["verdict"], result["case"]["implementation"], result["reason"]
            groups[key].append(result["id"])
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    shown, rest = ordered[:MOST], len(ordered[MOST:])
    return Limit(
        "Not decided",
        "These ran, and their records do not suffice for a verdict.",
        ("cases", "verdict", "implementation", "reason"),
        tuple((str(len(ids)), *key) for key, ids in shown),
        tuple(tuple(ids) for _, ids in shown),
        rest,
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


def _judged(results: Iterable[Result]) -> Iterator[Result]:
    return (r for r in results if r["checks"] and verdicts.kind(r["verdict"]) != "skip")


def _skipped_checks(results: Iterable[Result]) -> Limit:
    counts: Counter[tuple[str, str]] = Counter()
    who: dict[tuple[str, str], set[str]] = defaultdict(set)
    for result in _judged(results):
        for check in result["checks"]:
            if check["status"] in ("skip", "undecidable", "precondition"):
                key = check["check"], check["message"]
                counts[key] += 1
                who[key].add(result["case"]["implementation"])
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return Limit(
        "Checks that did not judge in cases that ran",
        "The case has a verdict from its other checks.",
        ("cases", "check", "reason", "implementations"),
        tuple((str(n), *key, _some(sorted(who[key]))) for key, n in ordered[:MOST]),
        rest=len(ordered[MOST:]),
    )


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _never_asked(run: Run) -> Limit:
    """Capabilities that some implementation was asked about, and this one on no backend."""
    cells = matrix.cells(run)
    names = sorted({cell.implementation for cell in cells})
    asked = {(cell.implementation, cell.capability) for cell in cells if cell.judged}
    rows = []
    for capability in capability_matrix.columns(cells):
        there = [name for name in names if (name, capability) in asked]
        absent = [name for name in names if (name, capability) not in asked]
        if there and absent:
            rows.append((capability, str(len(absent)), ", ".join(absent)))
    return Limit(
        "Capabilities that no judged case asked about",
        "An empty place in the matrix, on every backend.",
        ("capability", "implementations", "which"),
        tuple(rows),
    )


def _not_tested(results: Iterable[Result]) -> Limit:
    counts: Counter[tuple[str, str]] = Counter()
    who: dict[tuple[str, str], set[str]] = defaultdict(set)
    for result in _judged(results):
        for check in result["checks"]:
            for item in check["figures"].get("not_tested", ()):
                phase, _, tensor = str(item).partition(": ")
                counts[phase, tensor] += 1
                who[phase, tensor].add(check["check"])
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return Limit(
        "Tensors without power",
        "A rolled, halved or rescaled copy of these would have passed, so that they passed says "
        "little (a step counter, a tensor of zeros or of one element).",
        ("cases", "when", "tensor", "check"),
        tuple((str(n), *key, ", ".join(sorted(who[key]))) for key, n in ordered[:MOST]),
        rest=len(ordered[MOST:]),
    )


def _not_judged(results: Iterable[Result]) -> Limit:
    counts: Counter[tuple[str, str, str]] = Counter()
    for result in _judged(results):
        name = result["case"]["implementation"]
        for check in result["checks"]:
            figures = check["figures"]
            for kind, why in (figures.get("not_judged") or {}).items():
                counts[f"{check['check']}: {kind.replace('_', ' ')}", name, str(why)] += 1
            note = figures.get("activations")
            if isinstance(note, str):
                why = note.removeprefix("not judged: ")
                counts[f"{check['check']}: activations", name, why] += 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return Limit(
        "Figures that are check and not judged",
        "Their check passed without them.",
        ("cases", "what", "implementation", "reason"),
        tuple((str(n), *key) for key, n in ordered[:MOST]),
        rest=len(ordered[MOST:]),
    )


def _working_precision_only(results: Iterable[Result]) -> Limit:
    found: Counter[tuple[str, str]] = Counter()
    for result in results:
        if verdicts.kind(result["verdict"]) == verdicts.WORKING_PRECISION_ONLY:
            case = result["case"]
            precision = ", ".join(sorted({case["dtype"], *(case.get("precision") or {}).values()}))
            found[case["implementation"], precision] += 1
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return Limit(
        "Judged in working precision only",
        "Held to a multiple of one device's own error: small faults hide in it.",
        ("cases", "implementation", "precision"),
        tuple((str(n), *key) for key, n in ordered[:MOST]),
        rest=len(ordered[MOST:]),
    )
