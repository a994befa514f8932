"""A compressed reduction keeps its unsent rest and sends it later: nothing is lost.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shardproof import axes
from shardproof.backends import BACKENDS
from shardproof.checks import Needs, Outcome, causes, numbers
from shardproof.checks.causes.gradients import of_kept
from shardproof.checks.numbers import FP64_BOUND, Compare, Comparison, root_mean_square
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow
from shardproof.oracle import members
from shardproof.oracle.rounded import spread

NEEDS: Needs = ("values", "every rank")

#: Roundings of every gradient element that a sound system may be off by: of its products and sums.
ROUNDINGS = 10

#: Slots of residuals, but for the number of the coordinate.
RESIDUAL = ".residual@"


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """Every slot of every step, up to the first step with a failure."""
    rows: list[ComparisonRow] = []
    before: dict[str, Tensor] = {}
    for step in evidence.steps if evidence.truth.steps else ():  # of a replay there are none
        held, owed = evidence.kept(step), inherited(evidence, step, before)
        moment = numbers.Moment(rows, step, "after_update kept", "differs from what was not sent")
        wrong = []
        for slot in slots_of(evidence, step, held, owed):
            if slot.held is None:
                moment.problem(slot.name, (), f"no rank holds {slot.name!r}")
                continue
            moment.note(result := slot.result(), slot.name, "the residual")
            wrong += [] if result.ok else [slot]
        try:
            moment.end(evidence.case.world)
        except numbers.Differs as failure:
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
    if not (rows := figures.compared.get("compression", [])):
        return Outcome("compression", "skip", "no reduction keeps a residual")
    tally, bits = numbers.Tally.of(rows), sum(row.bound == 0 for row in rows)
    return tally.outcome("compression", {"compared": tally.compared, "bitwise": bits})


# ------------------------------------------------------------- what each slot holds, and must hold


@dataclass(frozen=True)
class Slot:
    """The value ``held`` in the slot ``name``, and the expected one.

    Of a residual ``held`` stands beside ``sent``: together they are ``due``.
    """

    name: str
    held: Tensor | None
    due: Tensor
    compare: Compare
    sent: Tensor | None = None

    def result(self) -> Comparison:
        """The comparison; of nothing with nothing where no rank holds it."""
        assert self.held is not None
        return self.compare(self.held if self.sent is None else self.sent + self.held, self.due)


def slots_of(
    evidence: Evidence, step: int, held: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Iterator[Slot]:
    """The rule of residuals after ``step``; ``before`` holds the residuals before it."""
    truth = evidence.truth.steps[step]
    told = set(truth.kept)
    floor = numbers.ZERO_FLOOR * root_mean_square([g for own in truth.given for g in own.values()])
    close = _above(floor * torch.finfo(torch.float64).eps / 2)
    exact = numbers.bitwise if _same_bits(evidence) else close
    for coordinate, (given, sent) in enumerate(zip(truth.given, truth.sent, strict=False)):
        for parameter, tensor in sent.items():
            name = f"{parameter}{RESIDUAL}{coordinate}"
            told.add(name)
            nothing = torch.zeros_like(tensor)
            #     sent + residual after = gradient + residual before
            due = given.get(parameter, nothing) + before.get(name, nothing)
            yield Slot(name, held.get(name), due, exact, tensor)
    for name, tensor in truth.kept.items():
        slot = Slot(name, held.get(name), tensor, close)
        if slot.held is not None and not slot.result().ok:
            slot = replace(slot, compare=_conditioned(evidence, step, name, close))
        yield slot
    for name in held.keys() - told:
        yield Slot(name, held[name], torch.zeros_like(held[name]), numbers.bitwise)


def inherited(evidence: Evidence, step: int, before: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``before``, by the coordinates of ``step``, if its members are others."""
    if not evidence.case.changes_members or not step:
        return before
    found: dict[str, Tensor] = {}
    for coordinate, old in enumerate(members.heirs(evidence.members, step)):
        for number in old:
            for name, tensor in before.items():
                parameter, slot, own = name.rpartition(RESIDUAL)
                if slot and own == str(number):
                    new = f"{parameter}{RESIDUAL}{coordinate}"
                    found[new] = found[new] + tensor if new in found else tensor
    return found


def _above(floor: float) -> Compare:
    """Relative errors; rounding relative to the whole model is no larger in the system."""
    relative = numbers.relative_frobenius(FP64_BOUND)

    def compare(actual: Tensor, truth: Tensor) -> Comparison:
        if root_mean_square([truth]) > floor:
            return relative(actual, truth)
        return Comparison(root_mean_square([actual]), floor)

    return Compare(compare, relative.parts)


def _conditioned(evidence: Evidence, step: int, name: str, close: Compare) -> Compare:
    """``close``, or a bound of :data:`ROUNDINGS` times what a rounding of all gradients makes."""
    rounded = evidence.rounded
    if rounded is None or name not in rounded.steps[step].kept:
        return close
    moved = spread(evidence.truth.steps[step].kept[name], rounded.steps[step].kept[name])
    bound = ROUNDINGS * moved
    return numbers.relative_frobenius(bound) if bound > FP64_BOUND else close


def _same_bits(evidence: Evidence) -> bool:
    """Whether gradients of this run have the oracle's bits: all that was added, in its order."""
    case, facts = evidence.case, evidence.model_facts
    return (
        evidence.declaration.exactness == "bitwise"
        and BACKENDS[case.backend].adds_like_one(case.world)
        # The norm that clips is a sum over ranks, which may add in another order.
        and case.optimizer.clip_norm is None
        and evidence.declaration.emulates == "step"
        # A rate for other members may be rounded otherwise than the oracle's.
        and all(step.rate == 1.0 for step in evidence.members)
        and axes.size(case.mesh, axes.exchanging(case.mesh)) == 1
        and not any(t.strided for t in (facts.parameters if facts else ()))
    )
