"""``shardproof verify RUN``: is the evidence whole, unchanged, and does it still give the verdicts?

Three questions, each answered from the run's folder alone: does every file and line have the digest
that the manifest gives it; has every planned case a line (a verdict, or why it was left out) and
every verdict a record; and does ``cases.verdict.decide_case`` make the same result of the record?
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardproof import strategies
from shardproof.backends import BACKENDS
from shardproof.backends.plugins import GROUP
from shardproof.cases.kills import PlantedPair, failing, parent_case, why_not_killed
from shardproof.cases.verdict import decide_case
from shardproof.checks.results import CaseResult, Kill
from shardproof.errors import Problem, SelectionError, one_line, shorten
from shardproof.evidence.account import Account
from shardproof.files import DAMAGE, standard
from shardproof.runs import records
from shardproof.runs.bindings import contradiction, unbound
from shardproof.runs.bundle.form import Listing
from shardproof.runs.bundle.unpacking import unpacked
from shardproof.runs.header import OtherFormat
from shardproof.runs.integrity import changed
from shardproof.runs.run_folder import Run, read_as_written
from shardproof.verdicts import FLAKY, INTERRUPTED, RED, kind
from shardproof.wings import LineKind, wings_of

#: What must come out again; the rest is time and names of files.
_JUDGED = (
    *("verdict", "reason", "checks", "worst_error", "bound", "bytes_sent", "bytes_expected"),
    *("depth", "loss_factor"),
)


@dataclass(frozen=True)
class Verified:
    """The result of :func:`verify`: ``problems`` are sentences with case and file."""

    cases: int
    kills: int
    left_out: int
    problems: list[str]
    #: Results of wings, by kind; those that are not judged were only read.
    others: Mapping[LineKind, int] = field(default_factory=dict)
    #: Which lines were not read, in a sentence.
    unread: str = ""
    #: Cases whose verdict is red.
    broken: int = 0
    #: Cases that failed before and do no longer, by the same code.
    flaky: int = 0

    def sentence(self) -> str:
        """One line for people."""
        if self.problems:
            return f"not verified: {len(self.problems)} problem(s)"
        judged = [f"{self.cases} cases", *([f"{self.kills} kills"] if self.kills else [])]
        judged += [f"{n} {kind.noun}s" for kind, n in self.others.items() if kind.is_judged]
        told = [f"verified: {', '.join(judged)} judged again", f"{self.left_out} left out"]
        told += [f"{n} {kind.noun}s read" for kind, n in self.others.items() if not kind.is_judged]
        if self.broken:
            told[-1] += f"; {self.broken} of {self.cases} cases failed, as its evidence shows"
        if self.flaky:
            told[-1] += f"; {self.flaky} of {self.cases} cases are flaky: they failed before"
        return ", ".join(told) + (f". {self.unread}" if self.unread else "")


def verify(path: Path) -> Verified:
    """Check the run in ``path``.

    :raises SelectionError: there is no run, or its evidence has another format.
    """
    damaged: list[Problem] = []
    run = read_as_written(path, damaged=damaged)
    problems = [*changed(path), *map(str, damaged)]
    results = [*run.cases, *run.mutant_cases]
    try:
        for problem in _again(run, results):  # those before an error stay
            problems.append(problem)
    except DAMAGE as error:
        where = f"{path / 'cases.jsonl'}"
        problems.append(f"{where}: damaged, or not of this suite: {type(error).__name__} {error}")
    judged = [kill for kill in run.kills if not kill.left_out]
    left_out = len(run.left_out) + len(run.kills) - len(judged)
    others = {kind: len(lines) for kind, lines in run.known(judged_only=False).items()}
    broken = sum(kind(result.verdict) in RED for result in run.cases)
    flaky = sum(result.verdict == FLAKY for result in run.told_flaky().cases)
    counts = len(results), len(judged), left_out
    return Verified(*counts, problems, others, run.unread, broken, flaky)


def verify_archive(archive: Path) -> tuple[Verified, Listing]:
    """Judge the run in a bundle again; every problem names the member that is at fault.

    :raises SelectionError: no bundle, a damaged one, or one that is not safe to unpack.
    """
    with unpacked(archive) as bundle:
        try:
            verified = verify(bundle.folder)
        except (OtherFormat, records.LeadsOut) as error:
            there, here = str(bundle.folder), str(archive)
            own = [replace(p, file=p.file.replace(there, here)) for p in error.problems]
            raise type(error)(own) from None
        except SelectionError:
            problem = f"{archive / 'run.json'}: cannot be read, so nothing was judged"
            verified = Verified(0, 0, 0, [problem])
        texts = (text.replace(str(bundle.folder), str(archive)) for text in verified.problems)
        problems = list(dict.fromkeys([*bundle.problems, *map(one_line, texts)]))
        return replace(verified, problems=problems), bundle.listing


def _again(run: Run, results: list[CaseResult]) -> Iterator[str]:
    """The missing parts, and the results that differ."""
    yield from _missing(run)
    yield from unbound(run)
    for result in (*run.superseded, *results):
        yield from _judged_again(run.path, result)
    for kill in run.kills:
        yield from _killed_again(kill, results)
    for wing in wings_of(run):
        yield from wing.verify(run)


def _missing(run: Run) -> Iterator[str]:
    """Planned cases and kills that have no line."""
    kills, where = {kill.name for kill in run.kills}, run.path / "cases.jsonl"
    for one in run.header.invocations:
        # What a budget kept from running is told by the kill that it leaves open.
        told = one.kills and one.exit_code is not None
        planned = (
            ("case", [] if told else one.planned, run.ids),
            ("result", [] if one.exit_code == INTERRUPTED else one.benches, run.ids),
            ("fault", one.kills, kills),
        )
        for what, names, there in planned:
            for name in names:
                if name not in there:
                    yield f"{where}: planned {what} {name} is missing"


def _judged_again(path: Path, result: CaseResult) -> Iterator[str]:
    """Judge the record of ``result``; what comes out differently."""
    name = result.record
    if not name:
        yield f"{path / 'cases.jsonl'}: {result.id} has no record"
        return
    try:
        account = Account.from_dict(records.read(path / name))
        if account.case.backend not in BACKENDS:
            yield f"{path / name}: {result.id}: {_unknown('backend', account.case.backend, GROUP)}"
            return
        if problem := contradiction(account):
            yield f"{path / name}: {result.id}: {problem}"
            return
        judged = decide_case(account)
        again, line = (json.loads(json.dumps(standard(r.to_dict()))) for r in (judged, result))
    except (records.RecordError, AssertionError, KeyError, TypeError, ValueError) as error:
        yield f"{path / name}: the record of {result.id} cannot be judged: {error!r}"
        return
    if judged.id != result.id or account.case.to_dict() != result.case.to_dict():
        yield f"{path / name}: is the record of {judged.id}, not of {result.id}"
        return
    if (result.data or "") != account.data_digest:
        yield f"{path / name}: {result.id}: cases.jsonl names a different data set"
    # What only calls tells its events by records that are not kept.
    for key in (*_JUDGED, *(["seen"] if account.case.steps else [])):
        if again.get(key) != line.get(key):
            if unknown := _unknown_strategy(account):
                yield f"{path / name}: {result.id}: {unknown}"
                return
            was, now = (shorten(repr(fields.get(key)), 200) for fields in (line, again))
            both = f"the record gives {key} {now}, cases.jsonl says {was}"
            yield f"{path / name}: {result.id}: {both}"
            return


def _unknown_strategy(account: Account) -> str:
    """The package to install if it registers the strategy of ``account``; empty: none."""
    claimed = account.declaration.strategy if account.declaration else ""
    if not claimed or strategies.of(claimed).is_known:
        return ""
    return _unknown("strategy", claimed, strategies.GROUP)


def _unknown(what: str, name: str, group: str) -> str:
    remedy = f"install the package that registers it in {group!r}, and verify again"
    return f"unknown {what} {name!r}: {remedy}"


def _killed_again(kill: Kill, results: list[CaseResult]) -> Iterator[str]:
    """Compare a mutant's result with its parent's again."""
    named, depth = f"mutants/{kill.name}", kill.depth or ""
    planted = (r for r in results if r.case.implementation == named and r.case.depth == depth)
    own = next(planted, None)
    if own is None:
        if not kill.left_out:
            yield f"cases.jsonl: fault {kill.name} is {kill.verdict}, but its case is missing"
        return
    parent = parent_case(own.case, kill.parent)
    # By what it ran: ids of parents are digests, which runs of old words made of those.
    theirs = next((r for r in results if replace(r.case, id=parent.id) == parent), None)
    # A kill names what judging needs of the mutant.
    killed = not why_not_killed(PlantedPair(kill, own.case, parent), own, theirs)
    if killed != kill.killed or failing(own) != kill.failing:
        yield f"cases.jsonl: fault {kill.name}: its results give killed={killed}"
