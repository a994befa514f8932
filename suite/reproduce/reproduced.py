"""A run that was run again elsewhere: of each case, what is equal, what only agrees, what differs.

Verdicts and exact figures are compared by :mod:`shardproof.compare.compare`.  Beside that stand the
digests of every tensor that a rank observed: bit for bit the same, or both within the case's bound
of the oracle, or neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.compare.compare import Pairing, compare
from shardproof.compare.snapshot import of_run
from shardproof.runs import records
from shardproof.runs.header import Invocation
from shardproof.runs.run_folder import Run
from shardproof.table import number

#: ``not compared``: nothing of it was to be compared, wherever it is run.
Word = Literal["differs", "cannot be compared", "agrees", "equal", "not compared"]
#: From what needs a look to what does not.
ORDER: tuple[Word, ...] = ("differs", "cannot be compared", "agrees", "equal", "not compared")
#: Verdicts of a case that this machine, or this version, does not run as the other did.
_NOT_HERE = {"skip", "refused", "precondition", verdicts.JUDGE_ERROR, verdicts.OVER_BUDGET}
#: What a digest is of.
_PLACE = ("step", "point", "kind", "name", "replica")


@dataclass(frozen=True)
class Reproduced:
    """The outcome of one result of the first run."""

    id: str
    word: Word
    why: str = ""

    def sentence(self) -> str:
        return f"{self.word}: {self.id}" + (f": {self.why}" if self.why else "")


def beside(run: Run) -> dict[str, str]:
    """By its id why a result of ``run`` has nothing that another machine could have the same."""
    fault = "a planted fault: `shardproof mutants` weighs it against its parent"
    told = {f"mutants/{kill.name}": fault for kill in run.kills}
    others = (line for lines in run.others.values() for line in lines)
    told |= {str(line.get("id")): "timed: seconds are of one machine" for line in others}
    told |= {line.id: f"was left out: {line.reason}" for line in run.left_out}
    for result in run.cases:
        if verdicts.kind(result.verdict) == "skip":
            told[result.id] = f"was skipped: {result.reason}"
        elif result.case.fault is not None:
            told[result.id] = "a fault plan: what ranks do after one is ended differs between runs"
    return told


def judge(
    before: Run, after: Run | None, obstacles: Mapping[str, str], ids: frozenset[str]
) -> list[Reproduced]:
    """The outcome in ``after`` of each of ``ids`` in ``before``, the important ones first.

    ``obstacles``: why a case could not be run again here.
    """
    told = beside(before)
    outcomes = [Reproduced(name, "not compared", why) for name, why in told.items() if name in ids]
    results = [one for one in before.cases if one.id in ids and one.id not in told]
    outcomes += list(_compared(before, after, results, obstacles))
    return sorted(outcomes, key=lambda outcome: (ORDER.index(outcome.word), outcome.id))


def _compared(
    before: Run, after: Run | None, results: Sequence[CaseResult], obstacles: Mapping[str, str]
) -> Iterator[Reproduced]:
    comparison = None if after is None else compare(of_run(before), of_run(after))
    pairs = {pair.id: pair for pair in comparison.pairs} if comparison else {}
    apart = comparison.apart if comparison else {}
    left_out = {line.id: line.reason for line in after.left_out} if after else {}
    again = {result.id: result for result in after.cases} if after else {}
    for old in results:
        new = again.get(old.id)
        if old.id in obstacles or new is None or after is None:
            why = obstacles.get(old.id) or left_out.get(old.id) or "was not run"
        elif verdicts.kind(new.verdict) in _NOT_HERE - {verdicts.kind(old.verdict)}:
            why = f"{new.verdict} here: {new.reason}"
        elif old.id in apart:
            why = f"{apart[old.id]} (here {new.verdict}, there {old.verdict})"
        else:
            yield _beside_each_other((before, old), (after, new), pairs[old.id])
            continue
        yield Reproduced(old.id, "cannot be compared", why)


def _beside_each_other(
    first: tuple[Run, CaseResult], second: tuple[Run, CaseResult], pair: Pairing
) -> Reproduced:
    (before, old), (after, new) = first, second
    name = old.id
    if changes := [change for change in pair.changes if change.exact]:
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        return Reproduced(name, "differs", changes[0].sentence() + more)
    try:
        ours, theirs = (_digests(run.path, of) for run, of in (first, second))
    except records.RecordError as error:
        return Reproduced(name, "cannot be compared", str(error))
    if ours == theirs:
        what = number(len(ours), "digest") if ours else f"{new.verdict}; no tensors"
        return Reproduced(name, "equal", what)
    places = [place for place in {*ours, *theirs} if ours.get(place) != theirs.get(place)]
    first_one = " ".join(str(part) for part in min(places, key=str) if part is not None)
    why = f"{len(places):,} of {len({*ours, *theirs}):,} digests differ, one is: {first_one}"
    here = _environment(before, old.id, after)
    if ours.keys() == theirs.keys() and _within(old) and _within(new):
        errors = f"error {old.worst_error:.2g} there, {new.worst_error:.2g} here"
        return Reproduced(name, "agrees", f"{errors}, bound {new.bound:.2g}; {why}")
    if here and old.case.lane != "dyadic" and ours.keys() == theirs.keys():
        return Reproduced(name, "cannot be compared", f"bits of {here}; {why}")
    return Reproduced(name, "differs", why)


def _within(result: CaseResult) -> bool:
    """Whether the judge compared its numbers with the oracle by a bound that leaves room."""
    held = verdicts.kind(result.verdict) in verdicts.GREEN - {"xfail"}
    return held and result.worst_error is not None and bool(result.bound)


def _digests(run: Path, result: CaseResult) -> dict[tuple[Any, ...], str]:
    if result.record is None:
        raise records.RecordError(f"{run}: there is no record of {result.id}")
    rows = records.sections(run / result.record, "tensor")["tensor"]
    return {tuple(row[key] for key in _PLACE): row["digest"] for row in rows}


def _environment(before: Run, name: str, after: Run) -> str:
    """The differences in computing here from where ``before`` ran the case; empty: none known."""
    there, here = _ran(before, name), _ran(after, name)
    for what, was, now in (
        ("torch", there.packages.get("torch"), here.packages.get("torch")),
        ("kernels", there.fingerprint.kernels, here.fingerprint.kernels),
        ("hardware", there.fingerprint.label, here.fingerprint.label),
    ):
        if was != now:
            return f"other {what}: {_shown(was)}, here {_shown(now)}"
    return ""


def _ran(run: Run, name: str) -> Invocation:
    """The invocation that ran a case: the last one that was about to."""
    planned = [one for one in run.header.invocations if name in one.planned]
    return planned[-1] if planned else run.header.last


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={one}" for key, one in value.items())
    return str(value)


def summary(outcomes: Sequence[Reproduced]) -> str:
    """How many are equal, agree, differ, and could not be compared."""
    counts = Counter[str](outcome.word for outcome in outcomes)
    words = {
        "equal": "equal in every digest",
        "agrees": "within their bound only",
        "differs": "not reproduced",
        "cannot be compared": "cannot be compared",
        "not compared": "nothing to compare",
    }
    return ", ".join(f"{counts[word]} {text}" for word, text in words.items())


def exit_code(outcomes: Sequence[Reproduced]) -> int:
    """1 one does not come out again; 3 some, or all, could not be compared here; 0 all came out."""
    words = {outcome.word for outcome in outcomes}
    if "differs" in words:
        return verdicts.BROKEN
    if "cannot be compared" in words or not words & {"equal", "agrees"}:
        return verdicts.NOT_DECIDED
    return verdicts.HELD
