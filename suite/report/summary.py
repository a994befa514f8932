"""Did it hold?  One line, the figures behind it, and what broke with the command that reruns it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.report import kills, looks
from shardproof.runs.run_folder import Run
from shardproof.table import Table

State = Literal["held", "broke", "open"]
#: Verdicts of timed comparisons and of scaling that say that something broke, or is open.
BROKEN = ("crash", "hang", "fail")
OPEN = ("inconclusive", "precondition", "undecidable", "over budget")


@dataclass(frozen=True)
class Headline:
    """``sentence`` answers whether it held; ``details`` are shorter sentences behind it."""

    state: State
    sentence: str
    details: tuple[str, ...]


@dataclass(frozen=True)
class Break:
    """Something that broke: ``kind`` is case, fault, comparison or scaling."""

    kind: str
    name: str
    verdict: str
    reason: str
    rerun: str
    result: CaseResult | None = None

    @property
    def implementation(self) -> str:
        return "" if self.result is None else self.result.case.implementation

    @property
    def cause(self) -> str:
        """The check that failed first, or else the verdict."""
        outcomes = self.result.checks if self.result is not None else ()
        failing = (outcome.check for outcome in outcomes if outcome.status == "fail")
        return next(failing, verdicts.kind(self.verdict))


def breaks(run: Run) -> list[Break]:
    """Everything that broke: cases by gravity, then survivors, comparisons and scaling."""
    broken = [
        Break("case", r.id, r.verdict, r.reason, r.rerun, r)
        for r in cases_by_gravity(run.cases)
        if verdicts.kind(r.verdict) in verdicts.RED
    ]
    for kill in kills.survivors(run.kills):
        rerun = f"shardproof mutants --impl {shlex.quote(kill.name)}"
        broken.append(Break("fault", kill.name, "survives", kill.why_not, rerun))
    for kind, lines in (("comparison", run.benches), ("scaling", run.scalings)):
        for line in lines:
            if looks.head(line["verdict"]) in BROKEN:
                reason = str(line.get("reason") or "")
                broken.append(Break(kind, line["id"], line["verdict"], reason, _again(run)))
    return broken


def _again(run: Run) -> str:
    commands = [one.command for one in run.header.invocations if "bench" in one.command]
    return shlex.join(commands[-1]) if commands else ""


def headline(run: Run) -> Headline:
    """The one line at the top, from the worst of all that was judged."""
    counts = verdicts.count(run.cases)
    judged = sum(n for verdict, n in counts.items() if verdict != "skip")
    planted, timed = kills.judged(run.kills), run.timed
    heads = Counter(looks.head(line["verdict"]) for line in timed)
    broke = _told(
        (sum(counts[verdict] for verdict in verdicts.RED), f"of {judged} judged cases broke"),
        (len(kills.survivors(run.kills)), f"of {len(planted)} planted faults survive"),
        (sum(heads[word] for word in BROKEN), f"of {len(timed)} timings broke"),
    )
    opened = _told(
        (sum(counts[verdict] for verdict in verdicts.OPEN), f"of {judged} cases are not decided"),
        (sum(heads[word] for word in OPEN), f"of {len(timed)} timings are not decided"),
        (len(unfinished(run)), "planned ones have no result"),
    )
    details = tuple(_details(run, counts))
    if broke:
        return Headline("broke", f"It did not hold: {', '.join([*broke, *opened])}.", details)
    if opened:
        return Headline("open", f"Not decided: {', '.join(opened)}.", details)
    if not (judged or planted or timed):
        return Headline("open", "Nothing was judged.", details)
    nouns = ((judged, "judged case"), (len(planted), "planted fault"), (len(timed), "timing"))
    held = _told(*((count, f"{noun}{'s' * (count != 1)}") for count, noun in nouns))
    return Headline("held", f"It held: {', '.join(held)}, nothing broke.", details)


def _told(*counts: tuple[int, str]) -> list[str]:
    return [f"{count} {what}" for count, what in counts if count]


def _details(run: Run, counts: Counter[str]) -> Iterator[str]:
    if run.cases or run.left_out:
        yield verdicts.summary(counts, len(run.left_out)) + "."
    if run.kills:
        yield kills.verdict_counts(run.kills)
    for what, lines in (("Comparisons of times", run.benches), ("Scaling", run.scalings)):
        if lines:
            heads = Counter(looks.head(line["verdict"]) for line in lines)
            yield f"{what}: {', '.join(f'{n} {word}' for word, n in sorted(heads.items()))}."


def unfinished(run: Run) -> list[str]:
    """Planned cases, faults and comparisons without a line: a kill came before them."""
    there, faults = run.ids, {kill.name for kill in run.kills}
    absent: list[str] = []
    for invocation in run.header.invocations:
        # Cases of faults that a budget kept from running are told by the fault.
        late = invocation.kills and invocation.exit_code is not None
        planned = invocation.benches if late else [*invocation.planned, *invocation.benches]
        absent += [name for name in planned if name not in there]
        absent += [name for name in invocation.kills if name not in faults]
    return list(dict.fromkeys(absent))


def by_cause(broken: list[Break]) -> Table:
    counts = Counter((item.implementation, item.cause) for item in broken if item.kind == "case")
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows = [(implementation, cause, f"{n:,}") for (implementation, cause), n in ordered]
    headings = ("implementation", "failed first", "cases")
    return Table("Failures by implementation", headings, rows, align="llr")


def cases_by_gravity(results: Iterable[CaseResult]) -> list[CaseResult]:
    order = {verdict: index for index, verdict in enumerate(verdicts.VERDICTS)}
    return sorted(results, key=lambda r: (order[verdicts.kind(r.verdict)], r.id))
