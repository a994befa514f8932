"""Invalid options are refused with an error that names them, not with wrong numbers.

The scenario states ``expect.refuses: TEXT``; the case passes if a rank raises and its message holds
TEXT.  Judged from the ranks' errors, since a refusing implementation leaves no records.

*Cannot see* whether the refusal was necessary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.checks import Needs, Outcome

NEEDS: Needs = ()


def judge_errors(expected: str, errors: Sequence[Any]) -> Outcome:
    """``errors``: a :class:`~shardproof.launch.ranks.RankOutcome` per rank."""
    raised = [error for error in errors if error.status == "raised"]
    for error in raised:
        if expected.lower() in f"{error.error_type}: {error.message}".lower():
            return Outcome("refusals", "pass", f"rank {error.rank}: {error.message.strip()[:300]}")
    if raised:
        first = raised[0]
        what = f"rank {first.rank} raised {first.error_type}: {first.message.strip()[:300]}"
        message = f"expected a refusal that says {expected!r}, but {what}"
        return Outcome("refusals", "fail", message)
    return Outcome("refusals", "fail", f"nothing was refused; expected {expected!r}")


def decide(evidence: Any) -> Outcome:
    """With complete records every rank ran to its end, so nothing was refused."""
    if (expected := evidence.case.expect.get("refuses")) is None:
        return Outcome("refusals", "skip", "the scenario expects no refusal")
    return judge_errors(expected, ())
