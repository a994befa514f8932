"""Whether a run may pass its baseline: comparison and policy -> findings. Pure functions.

A finding *breaks*, is *reported*, or is *excused* (an expected failure whose day has not come).
What is better than the baseline is a finding as well: fewer bytes may be progress, or work that was
not done.  Verdicts are judged also where nothing can be compared, for a failure needs no baseline.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from shardproof import verdicts
from shardproof.compare import exact_figures
from shardproof.compare.compare import UNDECIDED, FigureChange, RunComparison
from shardproof.compare.policy import Allowed, ExpectedFailure, Level, PolicyFile
from shardproof.compare.snapshot import FAULTS, Entry
from shardproof.wings import line_kinds

State = Literal["breaks", "reported", "excused"]
Rule = Literal[
    "verdict",
    "expired",
    "figure",
    "time",
    "missing",
    "left out",
    "new",
    "not comparable",
    "fault",
    "too good",
    "not needed",
    "too wide",
    "evidence",
]


#: Verdicts that an expected failure is there for, and those that it does not expect.
_FAILING = verdicts.RED - {"xpass"} | verdicts.OPEN | {"xfail"}
_PASSING = verdicts.GREEN - {"xfail"} | {"xpass"}
#: A result that is none of these was decided: one that is flaky was, twice.
_LEFT_OPEN = verdicts.OPEN - {verdicts.FLAKY} | {"skip"}
_DECIDED = frozenset(verdicts.VERDICTS) - _LEFT_OPEN
#: Verdicts of timed results that say by themselves why there is no ratio.
_NO_RATIO = verdicts.RED | {"precondition"}


@dataclass(frozen=True)
class GateFinding:
    """One thing to know.  ``file`` and ``line`` are of the scenario or policy, where known."""

    state: State
    rule: Rule
    id: str
    message: str
    file: str = ""
    line: int | None = None

    @property
    def headline(self) -> str:
        return next(iter(self.message.splitlines()), "")

    @property
    def place(self) -> str:
        return self.file + (f":{self.line}" if self.line is not None else "")


@dataclass
class Gate:
    """The result of :func:`judge`.

    ``compared`` counts results, ``decided`` those not left open, ``failed`` those of them that are
    red or slower, ``xfailed`` those that are ``xfail``; ``skipped`` those that the run did not try.
    Of what the reference decided, the run decides ``again``, leaves ``open``, or has ``lost``: it
    does not have it, or has it otherwise.  ``coverage``: the least share that must be decided.
    """

    comparison: RunComparison
    findings: list[GateFinding] = field(default_factory=list)
    compared: int = 0
    decided: int = 0
    again: int = 0
    failed: int = 0
    xfailed: int = 0
    skipped: int = 0
    missing: int = 0
    open: int = 0
    lost: int = 0
    coverage: float = 0.0

    @property
    def due(self) -> int:
        """The results that the reference decided and a run must decide again."""
        return self.again + self.open + self.lost

    @property
    def share(self) -> float:
        """The part of :attr:`due` that was decided again; of nothing, whether anything was."""
        return self.again / self.due if self.due else float(self.decided > 0)

    def of(self, state: State) -> list[GateFinding]:
        return [finding for finding in self.findings if finding.state == state]

    @property
    def exit_code(self) -> int:
        """0 held, 1 broken, 3 too little was decided: the rest was left out, skipped or open."""
        if self.of("breaks"):
            return verdicts.BROKEN
        enough = self.decided and self.share >= self.coverage
        return verdicts.HELD if enough else verdicts.NOT_DECIDED

    def sentence(self) -> str:
        counted = Counter(finding.state for finding in self.findings)
        head = "held" if self.exit_code == verdicts.HELD else "broken"
        if self.exit_code == verdicts.NOT_DECIDED:
            head = "nothing was decided" if self.compared else "nothing could be compared"
            if self.decided:
                head = f"too little was decided (cases.coverage: {self.coverage:.0%})"
        comparison = self.comparison
        if not self.compared:
            head += f" ({comparison.obstacle})"
        counts = {
            "passed": self.decided - self.failed - self.xfailed,
            "xfailed": self.xfailed,
            "failed": self.failed,
            "undecided": self.compared - self.decided - self.skipped,
            "skipped": self.skipped,
            "left out": len(comparison.left_out),
            "missing": self.missing,
            "not comparable": len(comparison.apart),
        }
        told = ", ".join(f"{n} {what}" for what, n in counts.items() if n or what == "passed")
        share = (
            f"{self.share:.0%} of the results with a verdict in the baseline also have one in "
            "this run"
        )
        if self.decided and not self.due:
            share = "none of them has a verdict in the baseline"
        return (
            f"{head}: {counted['breaks']} break, {counted['reported']} reported, "
            f"{counted['excused']} excused; "
            f"{self.compared} results compared with baseline {comparison.before.name!r}: "
            f"{told}; {share}"
        )


def judge(
    comparison: RunComparison,
    policy: PolicyFile,
    today: datetime.date,
    doubts: Iterable[tuple[str, str]] = (),
) -> Gate:
    """Every finding about ``comparison``; ``today`` decides what has expired.

    ``doubts``: runs, each with what of its evidence is missing, changed, or gives another verdict.
    """
    judge = _Judge(comparison, policy, today)
    decided, pairs = judge.decided(), comparison.pairs
    red = {pair.id for pair in pairs if pair.after.verdict in verdicts.RED}
    failed = red | {time.id for time in judge.times if time.verdict == "slower"}
    findings = [GateFinding("breaks", "evidence", name, problem) for name, problem in doubts]
    return Gate(
        comparison,
        [*findings, *judge.findings()],
        compared=comparison.comparable,
        decided=len(decided),
        again=sum(p.id in decided and p.before.verdict not in _LEFT_OPEN for p in pairs),
        failed=len(decided & failed),
        xfailed=sum(p.id in decided and p.after.verdict == "xfail" for p in pairs),
        skipped=len({p.id for p in pairs if p.after.verdict == "skip"} - decided),
        missing=len(judge.missing),
        lost=judge.lost(),
        open=sum(p.before.verdict in _DECIDED and p.id not in decided for p in pairs),
        coverage=policy.policy.cases.coverage,
    )


class _Judge:
    """A comparison under a policy; ``missing``: results of used commands that the run does not
    have.
    """

    def __init__(self, comparison: RunComparison, file: PolicyFile, today: datetime.date) -> None:
        self.comparison, self.file, self.policy, self.today = comparison, file, file.policy, today
        self.before, self.after = comparison.before, comparison.after
        self.times = comparison.times.allowed(self.policy.times, today)
        self.kinds = {kind(name) for name in self.after.ids}
        self.missing = [
            name for name in comparison.missing if kind(name) in self.kinds and self._in_scope(name)
        ]
        #: Expired entries at which a result broke already: :meth:`_expected` tells the others.
        self.broken: set[int] = set()

    def decided(self) -> set[str]:
        """Ids of results that were compared and say something; an open ratio says nothing."""
        decided = {time.id for time in self.times if time.verdict != "inconclusive"}
        for pair in self.comparison.pairs:
            words = verdicts.RED if pair.id in self.after.timed else _DECIDED
            decided |= {pair.id} if pair.after.verdict in words else set()
        return decided

    def lost(self) -> int:
        """How many results that the reference decided the run left out, lacks, or has otherwise.

        But for planted faults; what the reference left open is nothing that a budget left out.
        """
        of = self.comparison
        names = {*of.left_out, *self.missing, *of.apart}
        return sum(
            self.before.results[name].verdict not in _LEFT_OPEN
            for name in names
            if not name.startswith(FAULTS) and self._in_scope(name)
        )

    def findings(self) -> Iterator[GateFinding]:
        """Everything that there is to know."""
        for entry in self.after.cases.values():
            yield from self._verdict(entry, self.before.cases.get(entry.id))
        for entry in self.after.timed.values():
            old = self.before.timed.get(entry.id)
            if entry.verdict in _NO_RATIO:
                yield from self._verdict(entry, old)
            elif old is not None and old.verdict == "holds" and entry.verdict != "holds":
                # Whether a target is met hangs on the machine; `_ratios` judges the efficiency.
                message = f"now {entry.verdict}, was holds in the baseline"
                yield from _finding("report", "verdict", entry, message)
        yield from self._figures()
        yield from self._ratios()
        yield from self._lost_ratios()
        for change in self.comparison.kills:
            if change.word == "worse":
                message = "the planted fault survives; it was killed in the baseline"
                yield from _finding(self.policy.cases.faults, "fault", change.id, message)
        yield from self._presence()
        yield from self._expected()

    def _verdict(self, entry: Entry, old: Entry | None) -> Iterator[GateFinding]:
        level, grade, message = self.policy.level(entry.verdict), "", entry.verdict
        if old is not None and old.verdict != entry.verdict:
            grade = exact_figures.word(exact_figures.VERDICT, old.verdict, entry.verdict)
            message = f"now {entry.verdict}, was {old.verdict} in the baseline"
        message += f": {entry.reason}" if entry.reason else ""
        breaks = level == "break" or (level == "new" and grade == "worse")
        # Of several entries that expect it to break the one that lasts longest.
        matching = [e for e in self.policy.xfails if fnmatchcase(entry.id, e.cases)]
        expected = max(matching, key=lambda e: e.until, default=None)
        excusable = (breaks or entry.verdict == "xfail") and entry.verdict != "xpass"
        if expected is not None and excusable:
            message += f" (expected until {expected.until}: {expected.reason})"
            if expected.until >= self.today:
                yield from _finding("excused", "verdict", entry, message)
            else:
                index = self.policy.xfails.index(expected)
                self.broken.add(index)
                place = self.file.file, self.file.line(["xfails", index])
                yield GateFinding("breaks", "expired", entry.id, message, *place)
        elif breaks:
            yield from _finding("break", "verdict", entry, message)
        elif entry.verdict == "xpass" and level != "ignore":
            yield from _finding("report", "too good", entry, message)
        elif grade == "better":
            yield from _finding(self.policy.figures.better, "too good", entry, message)
        elif level == "report":
            yield from _finding("report", "verdict", entry, message)

    def _figures(self) -> Iterator[GateFinding]:
        for pair in self.comparison.pairs:
            if pair.before.verdict != pair.after.verdict or pair.after.verdict in UNDECIDED:
                continue  # the verdict says it all: what broke was not run to its end
            for change in pair.changes:
                level: Level | Literal["excused"] = getattr(self.policy.figures, change.word)
                rule: Rule = "too good" if change.word == "better" else "figure"
                message = change.sentence()
                if level == "break" and not change.exact:
                    level = "report"
                if level == "break" and (allowed := self._allowed(change)) is not None:
                    until = f" until {allowed.until}" if allowed.until is not None else ""
                    message += f" (allowed{until}: {allowed.reason})"
                    if allowed.until is not None and allowed.until < self.today:
                        rule = "expired"
                    else:
                        level = "excused"
                yield from _finding(level, rule, pair.after, message)

    def _allowed(self, change: FigureChange) -> Allowed | None:
        matching = [
            entry
            for entry in self.policy.figures.allow
            if fnmatchcase(change.id, entry.cases)
            and any(fnmatchcase(change.figure, pattern) for pattern in entry.figures)
        ]
        return max(matching, key=lambda e: e.until or datetime.date.max, default=None)

    def _ratios(self) -> Iterator[GateFinding]:
        """Ratios that are certainly worse by more than is allowed, or certainly better."""
        for time in self.times:
            rules = {"slower": time.rule, "faster": "too good", "inconclusive": "time"}
            if rule := rules.get(time.verdict):
                level = getattr(self.policy.times, time.verdict)
                yield from _finding(level, rule, self.after.timed[time.id], time.message)

    def _lost_ratios(self) -> Iterator[GateFinding]:
        """Ratios of the baseline that the run did not measure (again), though it has the result."""
        rules = self.policy.cases
        there = {(time.id, time.ratio) for time in self.times}
        for pair in self.comparison.pairs:
            if pair.after.verdict in _NO_RATIO or not self._in_scope(pair.id):
                continue
            level = rules.missing
            rule: Rule = "missing"
            if pair.after.verdict == "oversubscribed":
                # Fewer cores than in the baseline are no fault of the run.
                level, rule = rules.incomparable, "not comparable"
            for ratio, sample in pair.before.samples.items():
                if sample.blocks > 1 and (pair.id, ratio) not in there:
                    why = f": {pair.after.reason}" if pair.after.reason else ""
                    message = f"{ratio} was measured in the baseline; {pair.after.verdict}{why}"
                    yield from _finding(level, rule, pair.after, message)

    def _presence(self) -> Iterator[GateFinding]:
        """Results of one run only, and those that cannot be compared."""
        rules, olds, news = self.policy.cases, self.before.results, self.after.results
        for name in self.missing:
            message = "in the baseline, not in the run"
            yield from _finding(rules.missing, "missing", olds.get(name, name), message)
        groups = Counter(kind(name) for name in self.comparison.missing)
        for group, count in groups.items():
            if group not in self.kinds and rules.missing != "ignore":
                message = f"the run has none of the {count} results of the baseline"
                yield GateFinding("reported", "missing", group, message)
        for name, why in self.comparison.left_out.items():
            if self._in_scope(name):
                message = f"was left out by the run: {why}"
                yield from _finding(rules.left_out, "left out", olds.get(name, name), message)
        for name in self.comparison.new:
            message = f"{news[name].verdict}; not in the baseline"
            yield from _finding(rules.new, "new", news[name], message)
        for name, why in self.comparison.apart.items():
            yield from _finding(rules.incomparable, "not comparable", news[name], why)

    def _expected(self) -> Iterator[GateFinding]:
        """Entries of expected failures that have expired, or that nothing needs any more."""
        for index, entry in enumerate(self.policy.xfails):
            matched = [
                r for name, r in self.after.results.items() if fnmatchcase(name, entry.cases)
            ]
            failing = sum(result.verdict in _FAILING for result in matched)
            passing = sum(result.verdict in _PASSING for result in matched)
            state: State = "reported"
            rule: Rule = "not needed"
            message = ""
            place = self.file.file, self.file.line(["xfails", index])
            if passing:
                state = "breaks" if entry.strict else "reported"
                message = f"all {passing} cases pass: remove the expected failure"
                if failing:
                    message = f"{passing} of {len(matched)} cases pass: narrow the pattern"
            elif failing and entry.until < self.today and index not in self.broken:
                rule = "expired"
                message = f"expired on {entry.until}, and no result needs this entry: remove it"
            elif len(matched) == len(self.after.results) > 1:
                rule = "too wide"
                message = f"matches all {len(matched)} results, excuses {failing}: narrow it"
            elif not matched:
                message = self._excuses_nothing(entry)
            if message:
                yield GateFinding(state, rule, entry.cases, message, *place)

    def _excuses_nothing(self, entry: ExpectedFailure) -> str:
        """Why an entry that matches no result of the run does nothing; ``""``: none is awaited."""
        when = f"expired on {entry.until}; " if entry.until < self.today else ""
        missing = [n for n in self.comparison.missing if fnmatchcase(n, entry.cases)]
        if count := sum(map(self._in_scope, missing)):
            what = f"matches only missing results ({count}), which it does not excuse"
            return f"{when}{what}: state in cases.scope what a run must contain"
        if any(fnmatchcase(FAULTS + name, entry.cases) for name in self.after.kills):
            return f"{when}matches only planted faults, which it does not excuse: use cases.faults"
        return ""

    def _in_scope(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.policy.cases.scope)


def _finding(
    level: Level | Literal["excused"], rule: Rule, about: Entry | str, message: str
) -> Iterator[GateFinding]:
    """About a result, or about what has an id only (a planted fault)."""
    states: dict[str, State] = {"break": "breaks", "report": "reported", "excused": "excused"}
    if level == "ignore":
        return
    file, line = "", ""
    if isinstance(about, Entry):
        file, _, line = about.source.rpartition(":")
    name = about if isinstance(about, str) else about.id
    place = (file, int(line)) if file and line.isdigit() else ()
    yield GateFinding(states[level], rule, name, message, *place)


def kind(name: str) -> str:
    """The part of a run that one command makes: planted faults, the results of a wing, or cases."""
    if name.startswith(FAULTS):
        return f"{FAULTS}*"
    head = name.split("::", 1)[0]
    return f"{head}::*" if head in line_kinds() else "cases"


def ordered(findings: Sequence[GateFinding]) -> list[GateFinding]:
    """Put breaks first, and results of one run, which may be many, after the compared ones."""
    order = ("breaks", "reported", "excused")
    last = ("missing", "left out", "new")
    return sorted(findings, key=lambda f: (order.index(f.state), f.rule in last, f.rule))
