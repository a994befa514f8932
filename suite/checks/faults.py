"""A fault that the suite made on purpose came to what its plan expects, in the right sentence.

The scenario's ``faults`` say what is done to which rank, and ``expect`` the verdict, the rank that
the sentence must blame and texts in it.  The case passes if its verdict without this check is that
one, and came in time.  Time is no evidence, so looks of the watchdog count, those at which no rank
could go on: no more than a standstill takes, and 2 s' worth.  A fault that never happened is a
``precondition``.

*Cannot see* what a rank did that was killed before it could write it down, nor faults that no plan
makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.case import Fault
from shardproof.checks import Needs, Outcome
from shardproof.launch.outcome import RankOutcome

NEEDS: Needs = ()


def judge_end(
    fault: Fault,
    verdict: str,
    reason: str,
    blamed: int | None,
    outcomes: Sequence[RankOutcome],
    most_looks: int,
) -> Outcome:
    """Whether ``verdict`` and ``reason``, without this check, are what the plan expects.

    ``blamed``: the rank that they name; ``most_looks``: at ranks that cannot go on.
    """
    where = f"rank {fault.rank}, step {fault.step}, {fault.phase}"
    spoilt = next((o for o in outcomes if o.rank == fault.rank), None)
    if spoilt is None or spoilt.injected is None:
        what = f"the rank made no call there that {fault.kind} can disturb"
        message = f"the fault never happened ({where}): {what}; choose another place"
        return Outcome("faults", "precondition", f"{message} [{verdict}: {reason}]")
    figures = {
        "ended_s_after_the_fault": max(o.ended for o in outcomes) - spoilt.injected,
        "idle_looks_after_the_fault": spoilt.idle_looks,
    }
    told = f"{fault.kind} ({where}) gives {verdict}: {reason}".rstrip(": ")
    wrong = ""
    # From coarse to fine: the time of the end means nothing under another verdict.
    if verdict not in fault.verdicts:
        wrong = f"expected {' or '.join(fault.verdicts)}"
    elif fault.blames is not None and blamed != fault.blames:
        named = "no rank" if blamed is None else f"rank {blamed}"
        wrong = f"expected rank {fault.blames} as the cause, not {named}"
    elif unsaid := [words for words in fault.says if words not in reason]:
        wrong = f"expected a sentence that contains {unsaid[0]!r}"
    elif spoilt.idle_looks > most_looks:
        late = f"{spoilt.idle_looks} in which ranks could not continue"
        wrong = f"expected an end within {most_looks} looks of the watchdog, not {late}"
    if wrong:
        return Outcome("faults", "fail", f"{wrong}: {told}", figures=figures)
    return Outcome("faults", "pass", f"as expected, {told}", figures=figures)


def decide(evidence: Any) -> Outcome:
    """Without a fault plan there is nothing to judge; with one the verdict is (``judge_end``)."""
    return Outcome("faults", "skip", "the scenario plans no fault")
