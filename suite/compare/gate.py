"""Whether a run may pass beside its baseline: comparison and policy -> findings.  Pure functions.

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
    "evidence",
]


#: Verdicts that an expected failure is there for, and those that it does not expect.
_FAILING = verdicts.RED - {"xpass"} | verdicts.OPEN | {"xfail"}
_PASSING = verdicts.GREEN - {"xfail"} | {"xpass"}
#: Of the others a run holds nothing.
_DECIDED = frozenset(verdicts.VERDICTS) - verdicts.OPEN - {"skip"}
#: A result of the baseline that is none of these was decided there.
_LEFT_OPEN = verdicts.OPEN | {"skip"}
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
    """What :func:`judge` says.

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
        """What the reference decided and a run has to decide again."""
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
        broken, reported, excused = (
            len(self.of(state)) for state in ("breaks", "reported", "excused")
        )
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
        share = f"{self.share:.0%} decided of what the baseline decided"
        if self.decided and not self.due:
            share = "the baseline decided none of them"
        return (
            f"{head}: {broken} break, {reported} reported, {excused} excused; "
            f"{self.compared} results compared with {comparison.before.name}: {told}; {share}"
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
    gate = Gate(
        comparison,
        compared=comparison.comparable,
        decided=len(decided),
        again=sum(p.id in decided and p.before.verdict not in _LEFT_OPEN for p in pairs),
        failed=len(decided & judge.failed()),
        xfailed=sum(p.id in decided and p.after.verdict == "xfail" for p in pairs),
        skipped=len({p.id for p in pairs if p.after.verdict == "skip"} - decided),
        missing=len(judge.missing()),
        lost=judge.lost(),
        open=sum(p.before.verdict in _DECIDED and p.id not in decided for p in pairs),
        coverage=policy.policy.cases.coverage,
    )
    gate.findings += [GateFinding("breaks", "evidence", name, problem) for name, problem in doubts]
    for part in (
        judge.verdicts(),
        judge.figures(),
        judge.ratios(),
        judge.lost_ratios(),
        judge.faults(),
        judge.presence(),
        judge.expected(),
    ):
        gate.findings += part
    return gate


class _Judge:
    def __init__(
        self, comparison: RunComparison, policy_file: PolicyFile, today: datetime.date
    ) -> None:
        self.comparison, self.policy_file, self.today = comparison, policy_file, today
        self.policy = policy_file.policy
        self.times = comparison.times.allowed(self.policy.times, today)
        #: Expired entries at which a result broke already: :meth:`expected` tells the others.
        self.broken: set[int] = set()

    def decided(self) -> set[str]:
        """Ids of results that were compared and say something; an open ratio says nothing."""
        timed = self.comparison.after.timed
        decided = {
            pair.id
            for pair in self.comparison.pairs
            if pair.after.verdict in (verdicts.RED if pair.id in timed else _DECIDED)
        }
        return decided | {time.id for time in self.times if time.verdict != "inconclusive"}

    def missing(self) -> list[str]:
        """What the run lacks of the commands that it used."""
        kinds = {kind(name) for name in self.comparison.after.ids}
        missing = self.comparison.missing
        return [name for name in missing if kind(name) in kinds and self._in_scope(name)]

    def lost(self) -> int:
        """How many results that the reference decided the run left out, lacks, or has otherwise.

        But for planted faults; what the reference left open is nothing that a budget left out.
        """
        of, before = self.comparison, self.comparison.before.results
        names = {*of.left_out, *self.missing(), *(item.id for item in of.apart)}
        return sum(
            before[name].verdict not in _LEFT_OPEN
            for name in names
            if not name.startswith(FAULTS) and self._in_scope(name)
        )

    def failed(self) -> set[str]:
        """Ids of results that are red, or slower by more than is allowed."""
        red = {pair.id for pair in self.comparison.pairs if pair.after.verdict in verdicts.RED}
        return red | {time.id for time in self.times if time.verdict == "slower"}

    def verdicts(self) -> Iterator[GateFinding]:
        """Results whose verdict breaks, and those with a better one than before."""
        before, after = self.comparison.before, self.comparison.after
        for name, entry in after.cases.items():
            yield from self._verdict(entry, before.cases.get(name))
        for name, entry in after.timed.items():
            old = before.timed.get(name)
            if entry.verdict in _NO_RATIO:
                yield from self._verdict(entry, old)
            elif old is not None and old.verdict == "holds" and entry.verdict != "holds":
                # Whether a target is met hangs on the machine; `times` judges the efficiency.
                message = f"{entry.verdict}, holds in the baseline"
                yield self._finding("reported", "verdict", entry, message)

    def _verdict(self, entry: Entry, old: Entry | None) -> Iterator[GateFinding]:
        level, grade, was = self.policy.level(entry.verdict), "", ""
        if old is not None and old.verdict != entry.verdict:
            grade = exact_figures.word(exact_figures.VERDICT, old.verdict, entry.verdict)
            was = f", {old.verdict} in the baseline"
        message = f"{entry.verdict}{was}" + (f": {entry.reason}" if entry.reason else "")
        breaks = level == "break" or (level == "new" and grade == "worse")
        expected = self._expected(entry.id)
        excusable = breaks or entry.verdict == "xfail"
        if expected is not None and excusable and entry.verdict != "xpass":
            message += f" (expected until {expected.until}: {expected.reason})"
            if expected.until >= self.today:
                yield self._finding("excused", "verdict", entry, message)
            else:
                index = self.policy.xfails.index(expected)
                self.broken.add(index)
                place = self.policy_file.file, self.policy_file.line(["xfails", index])
                yield GateFinding("breaks", "expired", entry.id, message, *place)
        elif breaks:
            yield self._finding("breaks", "verdict", entry, message)
        elif entry.verdict == "xpass" and level != "ignore":
            yield self._finding("reported", "too good", entry, message)
        elif grade == "better":
            yield from self._perhaps(self.policy.figures.better, "too good", entry, message)
        elif level == "report":
            yield self._finding("reported", "verdict", entry, message)

    def figures(self) -> Iterator[GateFinding]:
        rules = self.policy.figures
        for pair in self.comparison.pairs:
            if pair.before.verdict != pair.after.verdict or pair.after.verdict in UNDECIDED:
                continue  # the verdict says it all: what broke was not run to its end
            for change in pair.changes:
                level: Level = getattr(rules, change.word)
                rule: Rule = "too good" if change.word == "better" else "figure"
                if level == "break" and not change.exact:
                    level = "report"
                message = change.sentence()
                allowed = self._allowed(change)
                if allowed is None or level != "break":
                    yield from self._perhaps(level, rule, pair.after, message)
                    continue
                until = f" until {allowed.until}" if allowed.until is not None else ""
                message += f" (allowed{until}: {allowed.reason})"
                if allowed.until is not None and allowed.until < self.today:
                    yield self._finding("breaks", "expired", pair.after, message)
                else:
                    yield self._finding("excused", rule, pair.after, message)

    def ratios(self) -> Iterator[GateFinding]:
        """Ratios that are certainly worse by more than is allowed, or certainly better."""
        for time in self.times:
            rules = {"slower": time.rule, "faster": "too good", "inconclusive": "time"}
            if rule := rules.get(time.verdict):
                level = getattr(self.policy.times, time.verdict)
                entry = self.comparison.after.timed[time.id]
                yield from self._perhaps(level, rule, entry, time.message)

    def lost_ratios(self) -> Iterator[GateFinding]:
        """Ratios of the baseline that the run did not measure (again), though it has the result."""
        rules = self.policy.cases
        there = {(time.id, time.ratio) for time in self.comparison.times}
        for pair in self.comparison.pairs:
            if pair.after.verdict in _NO_RATIO or not self._in_scope(pair.id):
                continue
            # Fewer cores than in the baseline are no fault of the run.
            fewer = pair.after.verdict == "oversubscribed"
            level = rules.incomparable if fewer else rules.missing
            for ratio, sample in pair.before.samples.items():
                if sample.blocks > 1 and (pair.id, ratio) not in there:
                    why = f": {pair.after.reason}" if pair.after.reason else ""
                    message = f"{ratio} was measured in the baseline; {pair.after.verdict}{why}"
                    rule: Rule = "not comparable" if fewer else "missing"
                    yield from self._perhaps(level, rule, pair.after, message)

    def faults(self) -> Iterator[GateFinding]:
        for change in self.comparison.kills:
            if change.word == "worse":
                message = "the planted fault survives; it was killed in the baseline"
                yield from self._perhaps(self.policy.cases.faults, "fault", change.id, message)

    def presence(self) -> Iterator[GateFinding]:
        """Results of one run only, and those that cannot be compared."""
        rules, before, after = self.policy.cases, self.comparison.before, self.comparison.after
        olds, news = before.results, after.results
        for name in self.missing():
            message = "in the baseline, not in the run"
            yield from self._perhaps(rules.missing, "missing", olds.get(name, name), message)
        used = {kind(name) for name in after.ids}
        unseen = Counter(kind(n) for n in self.comparison.missing if kind(n) not in used)
        for group, number in unseen.items():
            message = f"the run has none of the {number} results of the baseline"
            if rules.missing != "ignore":
                yield GateFinding("reported", "missing", group, message)
        for name, why in self.comparison.left_out.items():
            if self._in_scope(name):
                message = f"was left out by the run: {why}"
                yield from self._perhaps(rules.left_out, "left out", olds.get(name, name), message)
        for name in self.comparison.new:
            message = f"{news[name].verdict}; not in the baseline"
            yield from self._perhaps(rules.new, "new", news[name], message)
        for item in self.comparison.apart:
            entry = news[item.id]
            yield from self._perhaps(rules.incomparable, "not comparable", entry, item.why)

    def expected(self) -> Iterator[GateFinding]:
        """Entries of expected failures that have expired, or that nothing needs any more."""
        results = self.comparison.after.results
        for index, entry in enumerate(self.policy.xfails):
            matched = [r for name, r in results.items() if fnmatchcase(name, entry.cases)]
            failing = sum(result.verdict in _FAILING for result in matched)
            passing = sum(result.verdict in _PASSING for result in matched)
            file, line = self.policy_file.file, self.policy_file.line(["xfails", index])
            expired = entry.until < self.today
            if passing:
                state: State = "breaks" if entry.strict else "reported"
                message = f"all {passing} cases pass: remove the expected failure"
                if failing:
                    message = f"{passing} of {len(matched)} cases pass: narrow the pattern"
                yield GateFinding(state, "not needed", entry.cases, message, file, line)
            elif failing and expired and index not in self.broken:
                message = f"expired on {entry.until}, and nothing breaks for it: remove it"
                yield GateFinding("reported", "expired", entry.cases, message, file, line)
            elif not matched and (message := self._excuses_nothing(entry, expired)):
                yield GateFinding("reported", "not needed", entry.cases, message, file, line)

    def _excuses_nothing(self, entry: ExpectedFailure, expired: bool) -> str:
        """Why an entry that matches no result of the run does nothing; ``""``: none is awaited."""
        when = f"expired on {entry.until}; " if expired else ""
        missing = sum(
            fnmatchcase(name, entry.cases) and self._in_scope(name)
            for name in self.comparison.missing
        )
        if missing:
            what = f"matches only missing results ({missing}), which it does not excuse"
            return f"{when}{what}: say in cases.scope what a run has to have"
        if any(fnmatchcase(FAULTS + name, entry.cases) for name in self.comparison.after.kills):
            return f"{when}matches only planted faults, which it does not excuse: cases.faults does"
        return ""

    def _in_scope(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.policy.cases.scope)

    def _expected(self, name: str) -> ExpectedFailure | None:
        """The entry that expects `name` to break; of several the one that lasts longest."""
        matching = [entry for entry in self.policy.xfails if fnmatchcase(name, entry.cases)]
        return max(matching, key=lambda entry: entry.until, default=None)

    def _allowed(self, change: FigureChange) -> Allowed | None:
        matching = [
            entry
            for entry in self.policy.figures.allow
            if fnmatchcase(change.id, entry.cases)
            and any(fnmatchcase(change.figure, pattern) for pattern in entry.figures)
        ]
        return max(matching, key=lambda e: e.until or datetime.date.max, default=None)

    @classmethod
    def _perhaps(
        cls, level: Level, rule: Rule, entry: Entry | str, message: str
    ) -> Iterator[GateFinding]:
        if level != "ignore":
            yield cls._finding("breaks" if level == "break" else "reported", rule, entry, message)

    @staticmethod
    def _finding(state: State, rule: Rule, entry: Entry | str, message: str) -> GateFinding:
        """About a result, or about what has an id only (a planted fault)."""
        if isinstance(entry, str):
            return GateFinding(state, rule, entry, message)
        file, _, line = entry.source.rpartition(":")
        known = bool(file) and line.isdigit()
        return GateFinding(
            state, rule, entry.id, message, file if known else "", int(line) if known else None
        )


def kind(name: str) -> str:
    """What of a run one command makes: planted faults, the results of a wing, or cases."""
    if name.startswith(FAULTS):
        return f"{FAULTS}*"
    head = name.split("::", 1)[0]
    return f"{head}::*" if head in line_kinds() else "cases"


def ordered(findings: Sequence[GateFinding]) -> list[GateFinding]:
    """What breaks first; what only one run has, which may be much, after what was compared."""
    order = ("breaks", "reported", "excused")
    last = ("missing", "left out", "new")
    return sorted(findings, key=lambda f: (order.index(f.state), f.rule in last, f.rule))
