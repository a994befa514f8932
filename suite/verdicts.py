"""Verdicts in order of gravity, what they count as, and the exit code that they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Protocol, get_args

#: Gravest first; the order in which tables and summaries name them.
Verdict = Literal[
    "fail",
    "crash",
    "hang",
    "xpass",
    "refused",
    "judge error",
    "over budget",
    "flaky",
    "undecidable",
    "inconclusive",
    "precondition",
    "pass (replicas only)",
    "pass",
    "pass (working precision only)",
    "xfail",
    "skip",
]
#: All that can be said of a case judged in the lane ``working_precision``: it misses small faults.
WORKING_PRECISION_ONLY: Final = "pass (working precision only)"
#: What the judge says of the system cannot be trusted: a check broke, or passed without its proof.
JUDGE_ERROR: Final = "judge error"
#: A rank computed on until its budget of CPU seconds was spent: nobody knows what it would end in.
OVER_BUDGET: Final = "over budget"
#: It failed before, and not again, judged by the same code (``runs.run_folder.read``).
FLAKY: Final = "flaky"
#: Replicas are equal, and nothing was compared with the oracle: a fault that all share goes unseen.
REPLICAS_ONLY: Final = "pass (replicas only)"
VERDICTS: tuple[str, ...] = get_args(Verdict)
#: ``refused``: the scenario gives options that the implementation does not take.
RED = frozenset({"fail", "crash", "hang", "xpass", "refused"})
OPEN = frozenset(
    {JUDGE_ERROR, OVER_BUDGET, FLAKY, "undecidable", "inconclusive", "precondition", REPLICAS_ONLY}
)
GREEN = frozenset({"pass", WORKING_PRECISION_ONLY, "xfail"})

HELD, BROKEN, BAD_INPUT, NOT_DECIDED, INTERRUPTED = 0, 1, 2, 3, 130


def kind(verdict: str) -> str:
    """The verdict without its cause: ``hang(rank 2 ...)`` is ``hang``."""
    if verdict in VERDICTS:
        return verdict
    head = verdict.split("(", 1)[0].strip()
    return head if head in VERDICTS else "undecidable"


class HasVerdict(Protocol):
    """A result of a case, or a line that a run keeps of it."""

    verdict: str


def count(results: Iterable[HasVerdict]) -> Counter[str]:
    """How many results have each verdict."""
    return Counter(kind(result.verdict) for result in results)


def exit_code(counts: Mapping[str, int]) -> int:
    """0 all held, 1 something broke, 2 options were refused, 3 something is open or nothing was
    judged.
    """
    if any(counts.get(verdict) for verdict in RED - {"refused"}):
        return BROKEN
    if counts.get("refused"):
        return BAD_INPUT
    if any(counts.get(verdict) for verdict in OPEN):
        return NOT_DECIDED
    return HELD if any(counts.get(verdict) for verdict in GREEN) else NOT_DECIDED


def gravest(codes: Iterable[int]) -> int:
    """The exit code of a command that did what ended with ``codes``."""
    return max(codes, key=(HELD, NOT_DECIDED, BROKEN, BAD_INPUT, INTERRUPTED).index)


def summary(counts: Mapping[str, int], left_out: int) -> str:
    """The closing line: counts judged, xfailed, skipped and left out."""
    judged = sum(n for verdict, n in counts.items() if verdict not in ("skip", "xfail"))
    parts = [f"{counts[v]} {v}" for v in VERDICTS if counts.get(v) and v not in ("skip", "xfail")]
    return (
        f"{judged} judged ({', '.join(parts) or 'none'}), {counts.get('xfail', 0)} xfailed, "
        f"{counts.get('skip', 0)} skipped, {left_out} left out"
    )
