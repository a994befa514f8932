"""Does a check that passed hold its proof?  A second look at stored figures, by other code.

A check that compares nothing, too little, or a tensor with itself finds no fault.  So the rows of
``equivalence`` (of what reductions keep, those of ``compression``) must cover everything that the
ranks held when they were asked, and none may deny what two witnesses say that the check does not
touch: the norms of what was observed, and those of the oracle.  By the reverse triangle inequality
they differ by no more than the tensors do.

*Cannot see* a fault of the judge that moves the norm of no tensor; nor, where an update is replayed
from the system's own state, whether that state is the oracle's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardproof.case import Lane
from shardproof.checks import Outcome
from shardproof.checks.equivalence import judged_lane
from shardproof.checks.norm import BOUNDS as NORM_BOUNDS
from shardproof.checks.numbers import FP64_BOUND
from shardproof.evidence.assembled import KEPT, Figures
from shardproof.evidence.records import ComparisonRow, TensorRow
from shardproof.verdicts import JUDGE_ERROR

#: Relative to the norm of the whole model: ten times the bound of a tensor in the lane fp64.
ROUNDING = 10 * FP64_BOUND
#: Step, phase and name of a comparison.
Place = tuple[int, str, str]


def audited(outcome: Outcome, figures: Figures) -> Outcome:
    """``outcome``, or that the judge cannot be trusted, where a pass lacks its proof."""
    if outcome.check not in ("equivalence", "compression") or outcome.status != "pass":
        return outcome
    rows = figures.compared.get(outcome.check, [])
    if outcome.check == "compression":
        problem = _uncovered(_kept(figures), rows)
    else:
        problem = _uncovered(_expected(figures), rows) or _denied(figures)
    return replace(outcome, status=JUDGE_ERROR, message=problem) if problem else outcome


def _uncovered(expected: Iterable[Place], rows: list[ComparisonRow]) -> str:
    """A comparison beyond its bound, or one of ``expected`` that was not made."""
    for row in rows:
        if row.error is not None and row.bound is not None and not row.error <= row.bound:
            return f"passes, though {row.name!r} errs by {row.error} (bound {row.bound})"
    compared = {(row.step, row.phase, row.name) for row in rows if row.error is not None}
    for step, phase, name in (place for place in expected if place not in compared):
        return f"passes, though {name!r} was not compared at step {step} ({phase})"
    return ""


def _expected(figures: Figures) -> Iterator[Place]:
    """The tensors that must have been compared: parameters always, and all others observed."""
    names = figures.workload.parameter_names
    yield from ((-1, "initial parameters", name) for name in names)
    if figures.declaration.oracle == "replay":
        yield from ((figures.steps[-1], "drained parameters", name) for name in names)
        return
    replayed = _updates_are_replayed(figures, lane := judged_lane(figures))
    update = "replayed update of {}" if replayed else "after_update {}"
    yield from ((step, update.format("parameters"), n) for step in figures.steps for n in names)
    for row in figures.tensors:
        if KEPT in row.name:
            continue  # the check compression's
        if row.kind == "optimizer" and row.point == "after_update":
            yield row.step, update.format("optimizer"), row.name
        elif lane != "working_precision" and (phase := _phase(figures, row, replayed)):
            yield row.step, phase, row.name


def _kept(figures: Figures) -> Iterator[Place]:
    """All that reductions kept, of which equivalence knows nothing."""
    for row in figures.tensors:
        if KEPT in row.name and row.point == "after_update":
            yield row.step, "after_update kept", row.name


def _denied(figures: Figures) -> str:
    """The first tensor whose norm is not the oracle's: no bound of a passing lane allows it."""
    if figures.declaration.oracle == "replay":
        return ""
    if (lane := judged_lane(figures)) == "working_precision":
        return _global_norm_denied(figures)
    replayed, seen = _updates_are_replayed(figures, lane), 0
    for row in figures.tensors:
        phase = _phase(figures, row, replayed)
        step = figures.oracle.steps[row.step] if phase else None
        truth = step.of_share(row.replica).norms.get(phase, {}) if step else {}
        if row.name not in truth or row.dtype != figures.case.dtype:
            continue  # held rounded, beside a master
        seen += 1
        norm = truth[row.name]
        # What is noise where the truth is 0 is small beside the whole model.
        if not abs(row.norm - norm) <= ROUNDING * math.hypot(norm, *truth.values()):
            what = f"the norm of {row.name!r} at step {row.step} ({phase})"
            return f"passes, though {what} is {row.norm:.17g}, and the oracle's {norm:.17g}"
    return "" if seen else "passes, though no record of the ranks holds a tensor"


def _global_norm_denied(figures: Figures) -> str:
    """In working precision trajectories part, so the first gradients are asked, all together."""
    oracle = figures.oracle.steps[0]
    first: dict[str, float] = {}
    for row in figures.tensors:
        if (row.step, row.point, row.kind) == (0, "gradients_final", "gradients"):
            first.setdefault(row.name, row.norm)
    norm, bound = math.hypot(*first.values()), NORM_BOUNDS[figures.case.lowest_dtype]
    if oracle.skipped or abs(norm - oracle.norm) <= bound * oracle.norm:
        return ""
    what = "the norm of all gradients at step 0"
    return f"passes, though {what} is {norm:.9g}, and the oracle's {oracle.norm:.9g}"


def _phase(figures: Figures, row: TensorRow, replayed: bool) -> str:
    """The phase in which the oracle's own trajectory is compared with ``row`` (empty: in none)."""
    if row.step < 0:
        return ""
    if row.kind == "gradients":
        clipped = row.point != "after_clip" or figures.case.optimizer.clip_norm is not None
        known = row.point in ("gradients_final", "after_clip") and clipped
        return row.point if known and not figures.oracle.steps[row.step].skipped else ""
    if row.kind in ("parameters", "optimizer") and row.point == "after_update":
        return "" if replayed else f"after_update {row.kind}"
    return ""


def _updates_are_replayed(figures: Figures, lane: Lane) -> bool:
    return lane == "working_precision" or (
        lane == "fp64" and figures.case.optimizer.name == "adamw"
    )
