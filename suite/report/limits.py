"""The cases and figures *not* checked: left out, skipped, without power, not judged.

A table of green verdicts says nothing about what no case looked at, so each reason why something
was not looked at stands here with how often it occurred.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardproof import verdicts
from shardproof.checks import CHECKS, Outcome
from shardproof.report import capability_matrix
from shardproof.report.coverage import seen
from shardproof.runs.run_folder import Run
from shardproof.table import Table, fenced, grouped, some
from shardproof.wings import wings_of

#: Rows of one table that are shown; the rest is counted.
MOST = 200
#: Ids of cases that were not run, for each reason, in Markdown; the page has all.
NAMED = 20
#: With fewer cases than this it says little that none saw an event.
MANY = 100
#: Titles of what was to run and did not.
_MISSING, _LEFT_OUT = NOT_RUN = ("Planned and missing", "Left out")


#: What a row is about, and one member of it.
Pairs = Iterable[tuple[tuple[str, ...], str]]


@dataclass(frozen=True)
class Limit:
    """The unchecked part; ``items`` of rows are listed on demand, ``rest`` counts rows beyond."""

    title: str
    why: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    items: tuple[tuple[str, ...], ...] = ()
    rest: int = 0

    @property
    def table(self) -> Table:
        more = f"And {self.rest} more rows: see cases.jsonl."
        return Table(self.title, self.headings, self.rows, notes=(more,) if self.rest else ())

    @property
    def count(self) -> int:
        return len(self.rows) + self.rest


def limits(run: Run) -> list[Limit]:
    of_wings = (limit for wing in wings_of(run) for limit in wing.limits(run))
    every = *_of_cases(run), *of_wings, *_of_checks(run), _never_asked(run)
    return [limit for limit in every if limit.rows]


def lines(run: Run) -> Iterator[str]:
    """The section of ``report.md``."""
    yield "## Not checked\n"
    unchecked = limits(run)
    if not unchecked:
        yield "Nothing was left out, skipped or left open.\n"
    for limit in unchecked:
        yield f"### {limit.title}\n\n{limit.why}\n\n{limit.table.markdown()}"
        yield from limit.table.notes
        for names in limit.items if limit.title in NOT_RUN else ():
            rest = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
            yield "\n".join(["", *fenced([*names[:NAMED], *rest]), ""])


def _limit(
    title: str,
    why: str,
    headings: Sequence[str],
    pairs: Pairs,
    listed: bool = False,
    named: int = 0,
) -> Limit:
    """A row for each key of ``pairs``, the largest first: how many members it has, and the key.

    ``listed``: the members are also listed on demand; so many ``named`` ones stand in the row.
    """
    groups = grouped(pairs)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    shown, rest = ordered[:MOST], len(ordered[MOST:])
    rows = [(str(len(members)), *key) for key, members in shown]
    if named:
        rows = [(*row, some(sorted({*groups[row[1:]]}), named)) for row in rows]
    items = tuple(tuple(members) for _, members in shown) if listed else ()
    return Limit(title, why, ("cases", *headings), tuple(rows), items, rest)


def _of_cases(run: Run) -> Iterator[Limit]:
    """Cases without a verdict, or with one that says less than it seems to."""
    missing = "planned, without a result: the run ended before"
    why = "Planned by an invocation that was stopped."
    pairs: Pairs = [((missing,), name) for name in run.unfinished]
    yield _limit(_MISSING, why, ("reason",), pairs, listed=True)
    late = [((line.reason,), line.id) for line in run.left_out]
    late += [((f"fault: {kill.why_not}",), kill.name) for kill in run.kills if kill.left_out]
    yield _limit(_LEFT_OUT, "Selected and not run.", ("reason",), late, listed=True)
    kinds = [(verdicts.kind(r.verdict), r, r.case.implementation) for r in run.cases]
    why = "The implementation does not declare this, or this machine cannot run it."
    pairs = [((name, r.reason), r.id) for kind, r, name in kinds if kind == "skip"]
    yield _limit("Skipped cases", why, ("implementation", "reason"), pairs, listed=True)
    why = "These ran, but their records do not suffice for a verdict."
    heads: tuple[str, ...] = ("verdict", "implementation", "reason")
    opened = (((r.verdict, name, r.reason), r.id) for k, r, name in kinds if k in verdicts.OPEN)
    yield _limit("Not decided", why, heads, opened, listed=True)
    why = "No such event occurred in any case, so no check could judge it."
    events = seen(run.cases) if len(run.cases) >= MANY else {}
    unseen = tuple((name,) for name, count in events.items() if not count)
    yield Limit("Never seen", why, ("event",), unseen)
    why = "Their bound is a multiple of one device's rounding error: smaller faults go unseen."
    loose = ((r, name) for kind, r, name in kinds if kind == verdicts.WORKING_PRECISION_ONLY)
    used = ((r, name, sorted({r.case.dtype, *r.case.precision.values()})) for r, name in loose)
    pairs = [((name, ", ".join(dtypes)), r.id) for r, name, dtypes in used]
    heads = ("implementation", "precision")
    yield _limit("Judged in working precision only", why, heads, pairs)


def _of_checks(run: Run) -> Iterator[Limit]:
    """The figures that checks of cases did not judge."""
    ran = (result for result in run.cases if verdicts.kind(result.verdict) != "skip")
    judged = [(result.case.implementation, check) for result in ran for check in result.checks]
    title = "Checks that did not judge in cases that ran"
    why = "The case has a verdict from its other checks."
    heads: tuple[str, ...] = ("check", "reason", "implementations")
    silent = (((o.check, o.message), n) for n, o in judged if o.status not in ("pass", "fail"))
    yield _limit(title, why, heads, silent, named=4)
    why = (
        "A rolled, halved or rescaled copy of these would also have passed, so their pass says "
        "little (a step counter, a tensor of zeros or of one element)."
    )
    untested = [(str(item), o) for _, o in judged for item in o.figures.get("not_tested", ())]
    pairs = [(text.partition(": ")[::2], o.check) for text, o in untested]
    heads = ("when", "tensor", "check")
    yield _limit("Tensors without power", why, heads, pairs, named=len(CHECKS))
    why = (
        "The loss of one micro-batch's contribution to these would err no more than rounding may. "
        "Judge them in lane fp64 or dyadic as well, or with fewer micro-batches or another seed."
    )
    figures_of = ((name, o.figures.get("undecidable", ())) for name, o in judged)
    hidden = [(str(item).partition(": ")[::2], name) for name, own in figures_of for item in own]
    heads = ("when", "tensor", "implementations")
    yield _limit("Gradients undecidable in working precision", why, heads, hidden, named=4)
    figures = (
        ((f"{o.check}: {kind.replace('_', ' ')}", name, reason), name)
        for name, o in judged
        for kind, reason in _not_judged(o).items()
    )
    title, why = "Figures that were measured and not judged", "Their check passed without them."
    yield _limit(title, why, ("what", "implementation", "reason"), figures)


def _not_judged(outcome: Outcome) -> dict[str, str]:
    told = {kind: str(why) for kind, why in (outcome.figures.get("not_judged") or {}).items()}
    note = outcome.figures.get("activations")
    told |= {"activations": note.removeprefix("not judged: ")} if isinstance(note, str) else {}
    return told


def _never_asked(run: Run) -> Limit:
    """Capabilities that some implementation was asked about, and this one on no backend."""
    cells = capability_matrix.cells(run.cases, run.left_out)
    asked = {(cell.capability, cell.implementation) for cell in cells if cell.judged}
    names = {cell.implementation for cell in cells}
    absent = {
        capability: sorted(name for name in names if (capability, name) not in asked)
        for capability in capability_matrix.CAPABILITIES
    }
    rows = (
        (capability, str(len(lacking)), ", ".join(lacking))
        for capability, lacking in absent.items()
        if len(lacking) < len(names)
    )
    heads = ("capability", "implementations", "which")
    title, why = "Capabilities that no judged case asked about", "Empty in the matrix, everywhere."
    return Limit(title, why, heads, tuple(row for row in rows if row[2]))
