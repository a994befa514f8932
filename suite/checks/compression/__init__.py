"""What a compressed reduction does not send is kept, and sent later: nothing is lost.

For systems that show what they keep as optimizer slots ``<parameter>.residual@<coordinate>``: of
every data coordinate, parameter and step

    sent + residual after the step = gradient + residual before it

The residuals are the system's, the gradients the oracle's own, and what was sent is what one
process sends of the same (``Implementation.emulator``): so a residual that is lost, mixed up,
averaged or counted twice shows in the step in which that happens, even where the sum that is
applied is right.  Equal bits are asked of systems that declare ``bitwise``, where nothing was added
in another order before; elsewhere a relative Frobenius error of 1e-12.  Other slots with an ``@``
(factors, residuals of servers) equal the emulator's; what it does not speak of is zero: of
parameters that nobody has used.

*Cannot see* whether the emulator does what a method promises, such as an unbiased estimate: that is
for tests of the method over seeds; nor what is lost by a system that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from shardproof.checks import Needs, Outcome, causes
from shardproof.checks.causes.compressed import of_kept
from shardproof.checks.compression.slots import RESIDUAL, Slot, inherited, slots_of
from shardproof.checks.numbers import Differs, Moment, Tally
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow

NEEDS: Needs = ("values", "every rank")


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """Every slot of every step, up to the first step with a failure."""
    rows: list[ComparisonRow] = []
    before: dict[str, Tensor] = {}
    for step in evidence.steps if evidence.truth.steps else ():  # of a replay there are none
        held, owed = evidence.kept(step), inherited(evidence, step, before)
        moment = Moment(rows, step, "after_update kept", "what was not sent is not kept")
        wrong = []
        for slot in slots_of(evidence, step, held, owed):
            if slot.held is None:
                moment.problem(slot.name, (), f"no rank holds {slot.name!r}")
                continue
            moment.note(result := slot.result(), slot.name, "what reductions keep")
            wrong += [] if result.ok else [slot]
        try:
            moment.end(evidence.case.world)
        except Differs as failure:
            because = causes.before(partial(_cause, wrong), failure)
            problem = causes.before(partial(causes.of_members, evidence, step, ()), because)
            return [*rows, ComparisonRow(problem=problem)]
        # The system's own residuals: a wrong one shows in its step, not in those that follow.
        before = held
    return rows


def _cause(wrong: Sequence[Slot]) -> str:
    """A sentence on the residuals among ``wrong``."""
    residuals = [
        (slot.name.partition(RESIDUAL)[0], slot.held, slot.due, slot.sent)
        for slot in wrong
        if slot.held is not None and slot.sent is not None
    ]
    return of_kept(residuals) if residuals else ""


def decide(figures: Figures) -> Outcome:
    """The first comparison beyond its bound fails."""
    rows = figures.compared.get("compression", [])
    if not rows:
        return Outcome("compression", "skip", "no reduction keeps what it does not send")
    tally, bits = Tally.of(rows), sum(row.bound == 0 for row in rows)
    return tally.outcome("compression", {"compared": tally.compared, "bitwise": bits})
