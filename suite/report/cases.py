"""Sections of cases one by one: what broke, a block for each cause, and every case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.report import capability_matrix, summary
from shardproof.report.drawings import heat
from shardproof.runs.blocks import Failure, cause
from shardproof.runs.run_folder import Run
from shardproof.table import Table, fenced, grouped, markdown_text

#: Causes that the page shows at once; the others stand below, folded by implementation.
SHOWN = 12
#: Causes that ``report.md`` shows in full; the others stand in a table.
IN_FULL = 50
#: With at most so many cases every group of them is open.
FEW = 40


@dataclass(frozen=True)
class BrokenItem:
    anchor: str
    item: Failure
    #: Ids of the other cases of its cause.
    others: tuple[str, ...]
    map: heat.Map | None


def broken_lines(run: Run) -> Iterator[str]:
    """The same in Markdown, without drawings."""
    blocks = summary.broken_blocks(run)
    if blocks:
        yield "## What broke\n"
    if len(blocks) > IN_FULL:
        yield causes(run).markdown()
        yield f"The first {IN_FULL} of {len(blocks)} causes:\n"
    for block in blocks[:IN_FULL]:
        item = block.first
        name = item.id.replace("`", "'")
        yield f"- **{markdown_text(item.verdict)}** `{name}`"
        last = [
            line for text in (item.names, item.rerun, block.more()) if text for line in ("", text)
        ]
        shown = fenced([*item.reason.splitlines(), *last])
        yield from ("", *(f"  {line}".rstrip() for line in shown), "")


def causes(run: Run) -> Table:
    """How many cases of each implementation broke, by what failed first."""
    broken = (one for block in summary.broken_blocks(run) for one in block.failures)
    cases = (one for one in broken if one.kind == "case")
    counts = Counter((one.implementation, cause(one.verdict, one.reason)[0]) for one in cases)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows = [(*names, f"{n:,}") for names, n in ordered]
    headings = ("implementation", "failed first", "cases")
    return Table("Failures by implementation", headings, rows, align="llr")


def broken(run: Run) -> list[BrokenItem]:
    """All that broke: each cause with the case to run again, the first with a map of errors."""
    broken, drawn, anchors = [], 0, broken_anchors(run)
    for block in summary.broken_blocks(run):
        item, picture = block.first, None
        if item.result is not None and drawn < heat.MOST:
            picture = heat.heat_map(run.path, item.result)
            drawn += picture is not None
        others = tuple(failure.id for failure in block.failures[1:])
        broken.append(BrokenItem(anchors[item.id], item, others, picture))
    return broken


def maps_missing(broken: Sequence[BrokenItem]) -> int:
    """Causes without a map because there are too many of them."""
    if sum(item.map is not None for item in broken) < heat.MOST:
        return 0
    last = max(number for number, item in enumerate(broken) if item.map is not None)
    return sum(item.item.kind == "case" for item in broken[last + 1 :])


def by_implementation(broken: Sequence[BrokenItem]) -> list[tuple[str, list[BrokenItem]]]:
    """``broken`` by the implementation, or by what it is."""
    groups = grouped((one.item.implementation or one.item.kind, one) for one in broken)
    return sorted(groups.items())


@dataclass(frozen=True)
class CaseGroup:
    anchor: str
    implementation: str
    backend: str
    counts: Counter[str]
    red: bool
    rows: list[CaseResult]
    #: Whether they only ask what a system refuses, so that nothing is trained.
    refusals: bool = False


def about(run: Run) -> Callable[[Case], str]:
    """The attribute with the numbers of a case's columns, by which the page's script filters."""
    names = [name for name, _ in capability_matrix.matrix(run).columns]

    def of(case: Case) -> str:
        asked = capability_matrix.capabilities(case)
        return " ".join(str(names.index(name)) for name in asked if name in names)

    return of


def broken_anchors(run: Run) -> dict[str, str]:
    """The part of the page's address that leads to what broke, by its id."""
    blocks = enumerate(summary.broken_blocks(run), 1)
    return {one.id: f"b-{number}" for number, block in blocks for one in block.failures}


def groups(run: Run) -> list[CaseGroup]:
    """The cases of each implementation on each backend, the gravest first; those that expect a
    refusal apart.
    """
    members = grouped(
        ((r.case.implementation, r.case.backend, "refuses" in r.case.expect), r) for r in run.cases
    )
    found = []
    for number, ((name, backend, refuses), cases) in enumerate(sorted(members.items()), 1):
        cases.sort(key=lambda r: (verdicts.VERDICTS.index(verdicts.kind(r.verdict)), r.id))
        counts = verdicts.count(cases)
        red = any(counts[verdict] for verdict in verdicts.RED)
        found.append(CaseGroup(f"g-{number}", name, backend, counts, red, cases, refuses))
    return found


def anchors(run: Run) -> dict[tuple[str, str], str]:
    """Implementation and backend -> the part of the page's address that leads to their cases."""
    ordered = sorted(groups(run), key=lambda group: not group.refusals)  # trainings replace them
    return {(group.implementation, group.backend): group.anchor for group in ordered}


def refusal_anchors(run: Run) -> dict[tuple[str, str], str]:
    """The same of cases that expect a refusal."""
    return {(g.implementation, g.backend): g.anchor for g in groups(run) if g.refusals}
