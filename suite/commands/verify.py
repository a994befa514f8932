"""``shardproof verify RUN``: is the evidence whole, unchanged, and does it still give the verdicts?

Three questions, each answered from the run's folder alone: does every file and line have the digest
that the manifest gives it; has every planned case a line (a verdict, or why it was left out) and
every verdict a record; and does ``cases.verdict.decide_case`` make the same result of the record?
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardproof import strategies
from shardproof.backends import BACKENDS
from shardproof.backends.plugins import GROUP
from shardproof.cases.kills import Pair, parent_case, why_not_killed
from shardproof.cases.verdict import decide_case
from shardproof.checks.results import CaseResult, Kill
from shardproof.errors import Problem, SelectionError, one_line
from shardproof.evidence.account import Account
from shardproof.files import DAMAGE
from shardproof.runs import records
from shardproof.runs.bundle.form import Listing
from shardproof.runs.bundle.unpacking import unpacked
from shardproof.runs.header import OtherFormat
from shardproof.runs.integrity import changed
from shardproof.runs.records import LeadsOut, RecordError
from shardproof.runs.run_folder import Line, Run, lines, read, standard
from shardproof.verdicts import INTERRUPTED

#: What must come out again; the rest is time and names of files.
_JUDGED = (
    *("verdict", "reason", "checks", "worst_error", "bound", "bytes_sent", "bytes_expected"),
    *("depth", "loss_factor"),
)


@dataclass(frozen=True)
class Verified:
    """What :func:`verify` found: ``problems`` are sentences that name case and file."""

    cases: int
    kills: int
    left_out: int
    problems: list[str]
    benches: int = 0
    scalings: int = 0
    #: Lines of measured collectives, which are nothing but what was measured.
    collectives: int = 0

    def sentence(self) -> str:
        """One line for people."""
        if self.problems:
            return f"not verified: {len(self.problems)} problem(s)"
        kills = f", {self.kills} kills" if self.kills else ""
        kills += f", {self.benches} comparisons" if self.benches else ""
        kills += f", {self.scalings} scaling cells" if self.scalings else ""
        read = f", {self.collectives} measured collectives read" if self.collectives else ""
        return f"verified: {self.cases} cases{kills} judged again, {self.left_out} left out{read}"


def verify(path: Path) -> Verified:
    """Check the run in ``path``.

    :raises SelectionError: there is no run, or its evidence has another format.
    """
    damaged: list[Problem] = []
    run = read(path, damaged=damaged)
    problems = [*changed(path), *map(str, damaged)]
    results = [*run.cases, *run.mutant_cases]
    try:
        for problem in _again(run, results):  # those before an error stay
            problems.append(problem)
    except DAMAGE as error:
        where = f"{path / 'cases.jsonl'}"
        problems.append(f"{where}: not what this suite writes: {type(error).__name__} {error}")
    judged = [kill for kill in run.kills if not kill.left_out]
    return Verified(
        len(results),
        len(judged),
        len(run.left_out) + len(run.kills) - len(judged),
        problems,
        benches=len(run.benches),
        scalings=len(run.scalings),
        collectives=len(run.collectives),
    )


def verify_archive(archive: Path) -> tuple[Verified, Listing]:
    """Judge the run in a bundle again; every problem names the member that is at fault.

    :raises SelectionError: no bundle, a damaged one, or one that is not safe to unpack.
    """
    with unpacked(archive) as bundle:
        try:
            verified = verify(bundle.folder)
        except (OtherFormat, LeadsOut) as error:
            places = [p.file.replace(str(bundle.folder), str(archive)) for p in error.problems]
            own = [replace(p, file=f) for p, f in zip(error.problems, places, strict=True)]
            raise type(error)(own) from None
        except SelectionError:
            problem = f"{archive / 'run.json'}: cannot be read, so nothing was judged"
            verified = Verified(0, 0, 0, [problem])
        texts = (text.replace(str(bundle.folder), str(archive)) for text in verified.problems)
        problems = list(dict.fromkeys([*bundle.problems, *map(one_line, texts)]))
        return replace(verified, problems=problems), bundle.listing


def _again(run: Run, results: list[CaseResult]) -> Iterator[str]:
    """What is missing, and what comes out differently."""
    yield from _missing(run)
    for result in results:
        yield from _judged_again(run.path, result)
    for kill in run.kills:
        yield from _killed_again(kill, results)
    for line in run.timed:
        yield from _timed_again(run.path, line)
    yield from _reported_again(run.path)


def _missing(run: Run) -> Iterator[str]:
    """Planned cases and kills that have no line."""
    there, kills = run.ids, {kill.name for kill in run.kills}
    for invocation in run.header.invocations:
        ended = invocation.exit_code is not None
        for name in invocation.planned:
            # What a budget kept from running is told by the kill that it leaves open.
            if name not in there and not (invocation.kills and ended):
                yield f"{run.path / 'cases.jsonl'}: planned case {name} is missing"
        for name in invocation.benches:
            if name not in there and invocation.exit_code != INTERRUPTED:
                yield f"{run.path / 'cases.jsonl'}: planned comparison {name} is missing"
        for name in invocation.kills:
            if name not in kills:
                yield f"{run.path / 'cases.jsonl'}: planned fault {name} is missing"


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
        judged = decide_case(account)
        again, line = (json.loads(json.dumps(standard(r.to_dict()))) for r in (judged, result))
    except (RecordError, AssertionError, KeyError, TypeError, ValueError) as error:
        yield f"{path / name}: the record of {result.id} cannot be judged: {error!r}"
        return
    if judged.id != result.id or account.case.to_dict() != result.case.to_dict():
        yield f"{path / name}: is the record of {judged.id}, not of {result.id}"
        return
    for key in _JUDGED:
        if again.get(key) != line.get(key):
            if unknown := _unknown_strategy(account):
                yield f"{path / name}: {result.id}: {unknown}"
                return
            was, now = (_short(fields.get(key)) for fields in (line, again))
            both = f"the record gives {key} {now}, cases.jsonl says {was}"
            yield f"{path / name}: {result.id}: {both}"
            return


def _unknown_strategy(account: Account) -> str:
    """What to install where a package registers the strategy of ``account``; empty: nothing."""
    claimed = account.declaration.strategy if account.declaration else ""
    if not claimed or strategies.of(claimed).is_known:
        return ""
    return _unknown("strategy", claimed, strategies.GROUP)


def _unknown(what: str, name: str, group: str) -> str:
    remedy = f"install the package that registers it in {group!r}, and verify again"
    return f"{what} {name!r} is not known here: {remedy}"


def _timed_again(path: Path, line: Line) -> Iterator[str]:
    """Judge the raw times of a comparison, or of a scaling cell."""
    from shardproof.bench import evidence

    try:
        problem = evidence.verify_line(path, line)
    except (RecordError, KeyError, TypeError, ValueError) as error:
        problem = f"the raw times of {line['id']} cannot be judged: {error!r}"
    if problem is not None:
        yield f"{path / 'cases.jsonl'}: {problem}"


def _reported_again(path: Path) -> Iterator[str]:
    """Adjust the comparisons that stood before each report for one another again."""
    from shardproof.bench import stats
    from shardproof.bench.lines import PairLine

    so_far: dict[str, Line] = {}
    for line in lines(path):
        if line["kind"] == "bench":
            so_far[line["id"]] = line
        if line["kind"] != "bench report":
            continue
        try:
            report = stats.family(PairLine.model_validate(one) for one in so_far.values())
            again = {name: json.loads(beside.model_dump_json()) for name, beside in report.items()}
            stored = line["comparisons"]
        except (KeyError, TypeError, ValueError) as error:
            yield f"{path / 'cases.jsonl'}: the report over comparisons cannot be made: {error!r}"
            return
        for name in sorted({*again, *stored}):
            if again.get(name) != stored.get(name):
                where = f"{path / 'cases.jsonl'}: {name} in the report over all comparisons"
                now, before = _short(again.get(name)), _short(stored.get(name))
                yield f"{where}: they give {now}, not {before}"


def _killed_again(kill: Kill, results: list[CaseResult]) -> Iterator[str]:
    """Compare a mutant's result with its parent's again."""
    own = next((r for r in results if r.case.implementation == f"mutants/{kill.name}"), None)
    if own is None:
        if not kill.left_out:
            yield f"cases.jsonl: fault {kill.name} is {kill.verdict}, but its case is missing"
        return
    parent = parent_case(own.case, kill.parent)
    # By what it ran: ids of parents are digests, which runs of old words made of those.
    theirs = next((r for r in results if replace(r.case, id=parent.id) == parent), None)
    # A kill names what judging needs of the mutant.
    killed = not why_not_killed(Pair(kill, own.case, parent), own, theirs)
    if killed != kill.killed:
        yield f"cases.jsonl: fault {kill.name}: its results give killed={killed}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
