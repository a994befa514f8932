"""The global gradient norm that clipping used equals the true one, on every rank.

True is the oracle's, or that of a rank's own trajectory where ranks train alone; in lane
working_precision, where trajectories part from the oracle's and every step is judged alone, it is
the norm of the gradients that the system shows, which ``equivalence`` judges.

Clipping hides scale: a sum in place of a mean moves the clipped parameters by 1e-7 only, so the
norm *before* clipping is compared.  A case in which clipping is never active proves nothing and is
a ``precondition``.

*Cannot see* errors that leave the norm alone (a permuted gradient), nor anything with clipping off.
"""

from __future__ import annotations

import math

import torch

from shardproof.checks import Needs, Outcome, Worst, causes
from shardproof.checks.causes.scalars import of_norm
from shardproof.checks.equivalence import judged_lane
from shardproof.checks.numbers import FP64_BOUND, NARROW
from shardproof.evidence.assembled import Evidence, Figures
from shardproof.evidence.records import ComparisonRow

NEEDS: Needs = ("values",)

#: Bound of the relative error by dtype (float32: 100 round-offs; norms are sums of thousands).
BOUNDS = {"float64": FP64_BOUND, "float32": 1.2e-5, "bfloat16": 0.05, "float16": 0.01}
#: Roundings of a norm that is kept in a narrow dtype: of a tensor's own norm, of its square and of
#: the sum over ranks, and of the root (half of one); then of the norm of these.  And of one that is
#: added up in a wider dtype from what torch gives for shards: of a tensor's norm, and of theirs.
_ROUNDINGS, _OF_SHARDS = 4, 2


def _bound(dtype: str, norm: float, truth: float) -> float:
    """The error that correct runs may have.

    A norm that is no number of a narrow dtype was added up in a wider one, at worst from the norms
    of shards.
    """
    if dtype not in NARROW:
        return BOUNDS[dtype]
    narrow = torch.finfo(getattr(torch, dtype))
    unit = max(narrow.eps / 2, narrow.smallest_normal * narrow.eps / (truth or 1.0))
    is_rounded = float(torch.tensor(norm, dtype=getattr(torch, dtype))) == norm
    return min(unit * (_ROUNDINGS if is_rounded else _OF_SHARDS) + BOUNDS["float32"], BOUNDS[dtype])


def measure(evidence: Evidence) -> list[ComparisonRow]:
    """The cause of the first wrong norm, where one is wrong."""
    outcome = decide(evidence)
    if outcome.status != "fail" or (worst := outcome.worst) is None:
        return []
    rank = int(worst.owner.removeprefix("rank "))
    true = _truths(evidence)[worst.step][rank]
    if (held := evidence.ranks[rank].steps[worst.step].norm) is None:
        return []
    sentence = causes.told(lambda: of_norm(evidence, worst.step, rank, held, true))
    return [ComparisonRow(worst.step, worst.phase, worst.name, worst.owner, problem=sentence)]


def decide(evidence: Figures) -> Outcome:
    """Compare ``StepResult.norm`` of every rank and step with the oracle's pre-clip norm."""
    if (limit := evidence.case.optimizer.clip_norm) is None:
        return Outcome("norm", "skip", "clipping is off")
    compared, active = list[Worst](), 0
    for step, truths in _truths(evidence).items():
        # Where each rank trains alone, one clipped rank makes the step a test.
        active += max(truths.values()) > limit
        for record in evidence.records:
            truth = truths.get(record.rank)
            if truth is None or not record.steps[step].present:
                continue
            value, owner = record.steps[step].norm, f"rank {record.rank}"
            if value is None:
                return Outcome("norm", "fail", f"{owner} reports no norm at {step=}")
            error = abs(value - truth) / (truth or 1.0)
            # NaN would compare as neither larger nor smaller, and max would pass it over.
            error = math.inf if math.isnan(error) else error
            bound = _bound(evidence.case.lowest_dtype, value, truth)
            compared.append(Worst("gradient norm", step, "gradients_final", owner, error, bound))
    worst = max(compared, key=lambda this: this.error)
    figures = {"clipped_steps": active, "steps": len(evidence.steps)}
    if wrong := [this for this in compared if this.error > this.bound]:
        counts = [sum(one.step == wrong[0].step for one in of) for of in (wrong, compared)]
        told = [row.problem for row in evidence.compared.get("norm", ()) if row.problem]
        message = ": ".join([*told, f"pre-clip global norm is wrong: {wrong[0]}"])
        if counts[1] > 1:
            message += " (wrong: on {} of {} ranks)".format(*counts)
        return Outcome("norm", "fail", message, wrong[0], figures)
    if not active:
        message = f"the norm never exceeds clip_norm={limit}: lower it in the scenario"
        return Outcome("norm", "precondition", message, worst, figures)
    return Outcome("norm", "pass", "", worst, figures)


def _truths(evidence: Figures) -> dict[int, dict[int, float]]:
    """Step -> rank -> the norm to clip by; an overflow has none."""
    # One copy of every gradient that is shown before clipping.
    shown: dict[int, dict[str, float]] = {}
    for row in evidence.tensors if judged_lane(evidence) == "working_precision" else ():
        if (row.point, row.kind) == ("gradients_final", "gradients"):
            shown.setdefault(row.step, {}).setdefault(row.name, row.norm**2)
    truths: dict[int, dict[int, float]] = {}
    for step in evidence.steps:
        for record in evidence.records:
            truth = evidence.oracle.steps[step].of_share(record.steps[step].share)
            if not truth.skipped:
                norm = math.sqrt(sum(shown[step].values())) if step in shown else truth.norm
                truths.setdefault(step, {})[record.rank] = norm
    return truths
