"""The failures, in blocks: one for each cause, however many cases show it.

The terminal, the reports and the gate's summary all group here.  Failures share a cause where the
implementation, the check that failed first and its sentence agree once the numbers of the case are
left out: world, step, rank, size.  The simplest case leads its block, since it is the one to rerun,
but behind those whose sentence leaves no question open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardproof import verdicts
from shardproof.backends import BACKENDS
from shardproof.checks import CHECKS
from shardproof.checks.results import ALIKE, FINDING, CaseResult
from shardproof.table import number, some

#: Ids that a block names beside that of its simplest case.
NAMED = 3
#: The tensor that a comparison names, and the moment: ``'w' at step 0, gradients_final, rank 0:``.
_PLACE = re.compile(r"(?P<name>'[^']+') at step -?\d+, (?P<phase>[^,:]+), ")
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
#: Stands where the search for a cause raised; the error is no cause of what the sentence tells.
_UNTOLD = re.compile(
    rf"no cause could be determined \(\w+\((?:[^'\"()]|{_QUOTED}|\([^()]*\))*\)\)(?:: |$)"
)
#: How much was wrong, at the end of a sentence.
_COUNTS = re.compile(r" \((?:wrong|different): [^()]*\)$")
_LAST_CALLS = re.compile(r" \[(?:its )?last calls?: .*\]$")
#: Calls that do not match: the operation of each rank.
_MISMATCH, _CALLED = "(does not|do not) match: ", re.compile(r"\branks? [\d,-]+ calls? (\w+)")
#: What a factor may be made of, such as ``(2 = ranks or micro-batches, ...)``: by the case.
_EQUALS = re.compile(r" \([\d.]+ = [^()]*\)")
_RANKS = re.compile(r"\branks? (?:\[[\d, ]*\]|\d+(?:[-,] ?\d+)*)")
#: Any number but that of a line in a file.
_NUMBER = re.compile(r"(\.\w+:\d+)|[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Failure:
    """Something that broke: ``kind`` is ``case``, ``faults`` or the label of a wing's results.

    ``size`` orders cases by how simple they are to run again; ``implementation`` is empty for what
    is no case.
    """

    kind: str
    id: str
    verdict: str
    reason: str
    rerun: str = ""
    implementation: str = ""
    size: tuple[float, ...] = ()
    result: CaseResult | None = None

    @property
    def names(self) -> str:
        """All tensors of which a sentence names the first few; empty: it names all."""
        found = [o.figures.get("names", ()) for o in self.result.checks] if self.result else []
        return "\n".join(f"all of them: {', '.join(names)}" for names in found if len(names) > 3)


@dataclass(frozen=True)
class FailureBlock:
    """Failures of one cause, the simplest first."""

    failures: tuple[Failure, ...]

    @property
    def first(self) -> Failure:
        """The one to look at and to run again."""
        return self.failures[0]

    def more(self) -> str:
        """How many others there are, and the ids of some; empty: none."""
        others = [failure.id for failure in self.failures[1:]]
        more = number(len(others), "more case")
        return f"the same in {more}: {some(others, NAMED)}" if others else ""


def of_result(result: CaseResult) -> Failure:
    """The failure of a judged case."""
    case, workload = result.case, result.case.workload
    micro_batches, clipped = workload.micro_batches * workload.windows, case.optimizer.clip_norm
    simple = size(case.world, micro_batches, case.steps, case.backend, clipped is not None)
    failure = Failure("case", result.id, result.verdict, result.reason, result.rerun)
    return replace(failure, implementation=case.implementation, size=simple, result=result)


def size(
    world: int, micro_batches: int, steps: int, backend: str, clipped: bool
) -> tuple[float, ...]:
    """How much it takes to run a case, for sorting: smaller is simpler."""
    on = BACKENDS.of_record(backend)
    return world, micro_batches, steps, on.takes_over, on.default_seconds, clipped


def size_of_cell(world: int, backend: str, cell: Mapping[str, Any]) -> tuple[float, ...]:
    """The same of a case as a snapshot keeps it, without what is empty or off."""
    workload, optimizer = cell.get("workload") or {}, cell.get("optimizer") or {}
    micro_batches = workload.get("micro_batches", 1) * workload.get("windows", 1)
    clipped = optimizer.get("clip_norm") is not None
    return size(world, micro_batches, cell.get("steps", 1), backend, clipped)


def blocks(failures: Iterable[Failure]) -> list[FailureBlock]:
    """One block for each cause, the gravest verdict first, then as given."""
    members: dict[tuple[str, ...], list[Failure]] = {}
    for failure in failures:
        of_case = failure.implementation, *cause(failure.verdict, failure.reason)
        key = (failure.kind, *(of_case if failure.kind == "case" else (failure.id,)))
        members.setdefault(key, []).append(failure)
    groups = (sorted(group, key=_plainness) for group in members.values())
    found = [FailureBlock(tuple(group)) for group in groups]
    return sorted(found, key=lambda block: min(map(_gravity, block.failures)))


def _plainness(failure: Failure) -> tuple[object, ...]:
    """Sorts what leaves no question open first, then what is simple to run again, then short."""
    reason = failure.reason
    is_open = ALIKE in reason or bool(_UNTOLD.search(reason))
    return is_open, failure.size, reason.count("\n"), len(reason), failure.id


def _gravity(failure: Failure) -> int:
    """Only verdicts of cases are ordered: what is no case comes after them."""
    if failure.kind != "case":
        return len(verdicts.VERDICTS)
    return verdicts.VERDICTS.index(verdicts.kind(failure.verdict))


def cause(verdict: str, reason: str) -> tuple[str, str]:
    """The first failure (a check, or else the kind of verdict), and its cause without numbers.

    ``reason`` is that of a result: a line for each check that failed, as ``check: sentence``.
    """
    line = next(iter(reason.splitlines()), "")
    check, colon, sentence = line.partition(": ")
    if not colon or check not in CHECKS:
        check, sentence = verdicts.kind(verdict), _LAST_CALLS.sub("", line)
        if re.search(_MISMATCH, line):  # one backend ends the ranks, in another they wait for ever
            return "calls", " and ".join(sorted({*_CALLED.findall(line)}))
    sentence = _UNTOLD.sub("", sentence)
    finding, place = FINDING.search(sentence), _PLACE.search(sentence)
    first = finding or place
    if first is not None and (told := sentence[: first.start()].rstrip(": ")):
        sentence = told
    elif place is not None:  # a tensor, and at what it differs: an update however it is compared
        phase = "update" if "update" in place["phase"] else place["phase"]
        sentence = f"{place['name']} at {phase}"
    return check, without_numbers(_COUNTS.sub("", sentence))


def without_numbers(sentence: str) -> str:
    """``sentence`` with a sign in the place of ranks and numbers, each part once."""
    text = _RANKS.sub("rank #", _EQUALS.sub("", sentence))
    text = _NUMBER.sub(lambda found: found[1] or "#", text)
    return "; ".join(dict.fromkeys(text.split("; ")))
