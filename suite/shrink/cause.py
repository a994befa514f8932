"""The cause of a failure, as a record that two cases of different size can share.

It is made of the verdict and of the account's data: which check failed first, what kind of state
its first wrong comparison is of and at which moment, or how the ranks ended.  The judge's sentences
hold sizes and names of tensors, which a reduction changes; only their words are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from shardproof import verdicts
from shardproof.backends.errors import CollectiveMismatch
from shardproof.cases import kinds
from shardproof.checks import Outcome
from shardproof.checks.results import FINDING, CaseResult, claim_of
from shardproof.files import Stored, from_plain
from shardproof.launch.outcome import RankOutcome, root_cause
from shardproof.runs.blocks import without_numbers

#: Ends that can be shrunk, and the statuses of a check that give them.
ENDS = ("fail", "crash", "hang", verdicts.OVER_BUDGET, verdicts.JUDGE_ERROR, "undecidable")
#: The last word of a phase that names a kind of state.
_STATES = ("parameters", "optimizer", "buffers", "extra")
#: Kind of state of the phases that do not end in one.
_OF_PHASE = {"gradients_final": "gradients", "after_clip": "gradients", "forward": "loss"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")
_PLACE = re.compile(r"\bstep #, (\w+(?: \w+)?)[:,]")
_FRAME = re.compile(r"([^/\\]+):\d+ in (.+)$")


@dataclass(frozen=True)
class Cause(Stored):
    """Why a case fails, without anything that depends on its size.

    ``end``: the kind of verdict.  ``check``: the first check that gave it; empty: ranks ended it.
    ``state``: the kind of state that was wrong (``gradients``, ``parameters``, ``loss``, ...), the
    operation of a call, or the type of an error.  ``phase``: the moment of a step, or the method of
    the contract that ran.  ``says``: the operation that the judge names as the cause, or the words
    of an error; empty: none.
    """

    end: str
    check: str = ""
    state: str = ""
    phase: str = ""
    says: str = ""

    def same(self, other: Cause) -> bool:
        """Whether ``other`` is this cause; one that names no operation may be any."""
        if (self.end, self.check) != (other.end, other.check):
            return False
        ours, theirs = (
            [_tokens(text) for text in (one.state, one.phase, one.says)] for one in (self, other)
        )
        is_open = bool(self.check) and not (ours[-1] and theirs[-1])
        return ours[:-1] == theirs[:-1] and (is_open or ours[-1] == theirs[-1])

    def __str__(self) -> str:
        parts = [self.check, self.state, self.phase]
        told = ", ".join(part for part in parts if part)
        return f"{self.end}: {told}" + (f" ({self.says})" if self.says else "")


def cause_of(result: CaseResult, account: Mapping[str, Any]) -> Cause | None:
    """The cause of a failure; ``None``: the case did not fail.  ``account``: as JSON."""
    end = verdicts.kind(result.verdict)
    if end not in ENDS:
        return None
    if (first := next((o for o in result.checks if o.status == end), None)) is not None:
        return _of_check(end, result, first, account)
    outcomes = [from_plain(RankOutcome, one) for one in account.get("outcomes") or ()]
    if (cause := root_cause(outcomes)) is not None:
        return _of_end(end, cause)
    return Cause(end, says=words(result.reason))


def _of_check(end: str, result: CaseResult, outcome: Outcome, account: Mapping[str, Any]) -> Cause:
    line = f"{outcome.check}: {outcome.message}"
    says = ""
    if claim_of(line) == "operation":
        found = FINDING.search(outcome.message)
        says = words(outcome.message[: found.start()] if found else outcome.message)
    if kinds.of(result.case.workload).tests_backend:
        # ``broadcast (tensor), root last, bfloat16: ...``: the call is what a mistake is of.
        return Cause(end, outcome.check, re.split(r"[\s(:,]", outcome.message, maxsplit=1)[0])
    row = first_wrong((account.get("figures") or {}).get("compared", {}).get(outcome.check) or ())
    if row is not None:
        phase = str(row["phase"])
        last = phase.split()[-1]
        state = last if last in _STATES else _OF_PHASE.get(phase, phase)
        return Cause(end, outcome.check, state, phase, says)
    told = words(outcome.message)
    moment = _PLACE.search(without_numbers(outcome.message))
    return Cause(end, outcome.check, _head(told), moment[1] if moment else "", "")


def first_wrong(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first stored comparison beyond its bound; ``None``: the failure is no comparison."""
    for row in rows:
        error, bound = row.get("error"), row.get("bound")
        if row.get("problem"):
            return None
        if error is None or bound is None or not row.get("tested", True):
            continue
        if not float(error) <= float(bound):  # NaN is beyond any bound
            return row
    return None


def _of_end(end: str, cause: RankOutcome) -> Cause:
    if cause.error_type == CollectiveMismatch.__name__ or end == "hang":
        return Cause(end, state=cause.error_type or cause.status, phase=cause.cause)
    found = _FRAME.search(cause.place)
    where = f"{PurePath(found[1]).name} {found[2]}" if found else ""
    how = cause.error_type or f"{cause.status} {cause.signal or cause.exit_code or ''}".strip()
    says = words(cause.message) if end == "crash" else ""
    return Cause(end, state=how, phase=" in ".join(filter(None, (cause.method, where))), says=says)


def words(message: str) -> str:
    """The first line of an error that is not empty, without numbers, names and brackets."""
    text = next(filter(str.strip, message.splitlines()), "")
    text = _QUOTED.sub("", text)
    for _ in range(3):  # nested ones
        text = _BRACKETS.sub("", text)
    text = without_numbers(text).replace("#", "")
    return " ".join(re.sub(r"(?:\s*,)+", ",", text).split()).strip(" :;,.")


def _tokens(text: str) -> list[str]:
    """The words of ``text`` that say the same of one thing and of several."""
    found = re.findall(r"[A-Za-z_]+", text)
    return [w.rstrip("s") or w for w in found if w not in ("is", "are", "and", "all", "the")]


def _head(sentence: str) -> str:
    """The beginning of ``sentence``, before words that depend on sizes."""
    return re.split(r" (?:and|more|promises?|expected|on ranks?)\b", sentence, maxsplit=1)[0][:80]
