"""What made a wrong meeting of ranks that train alone: forgotten, early, or of something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.checks.one_update import update_of
from shardproof.evidence.assembled import CoordinateEvidence

#: What a cause may leave over, relative to how far the ranks' own updates lie from the truth.
_LEFT_OVER = 1e-6
_AFTER = ("after_update", "parameters")


def of_meeting(evidence: CoordinateEvidence, step: int) -> str:
    """A sentence on the parameters of one trajectory after ``step``; empty: nothing explains them.

    Asked where the gradients of the step, and all before it, are right.
    """
    held = evidence.observed(step, *_AFTER).first()
    truth = evidence.truth.steps[step]
    others = [update_of(other, step).make().parameters for other in evidence.base.trajectories]
    names = [
        name
        for name in evidence.workload.trainable_names
        if name in held
        and held[name].shape == truth.parameters[name].shape
        and _is_wrong(held[name], truth.parameters[name], [other[name] for other in others])
    ]
    if not names:
        return ""

    def flat(tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].double().reshape(-1) for name in names])

    have, want = flat(held), flat(truth.parameters)
    ends = [flat(other) for other in others]
    own, mean = ends[evidence.coordinate], torch.stack(ends).mean(0)
    # Relative to how far the ranks are apart: parameters themselves are much larger.
    near = _LEFT_OVER * float(torch.stack([(end - mean).norm() for end in ends]).max())

    def is_near(value: Tensor) -> bool:
        return float((have - value).norm()) <= near

    if not truth.met:
        early = is_near(mean) and not is_near(own)
        return "ranks have met before it was time: these are means" if early else ""
    everywhere = [
        flat(other.observed(step, *_AFTER).first()) for other in evidence.base.trajectories
    ]
    for number, end in enumerate(ends):
        if all(float((each - end).norm()) <= near for each in everywhere):
            return f"no mean: all have those of data coordinate {number}"
    if is_near(own):
        return "no meeting took place: this is what the rank's own update makes"
    ratio = float(have @ mean / (mean @ mean))
    if float((want - mean).norm()) <= near and is_near(ratio * mean):
        return f"{ratio:.6g} times the mean of what ranks found"
    if is_near(mean):
        return "the mean of what ranks found, without an outer step"
    met = [s for s in range(step) if evidence.truth.steps[s].met]
    before = evidence.truth.steps[met[-1]].parameters if met else evidence.truth.initial
    start = flat(before)
    #     start ------ due ------> want
    #     start --- made ---> have             made = ratio x due, where they point the same way
    due, made = want - start, have - start
    if not due.norm():
        return ""
    ratio = float(made @ due / (due @ due))
    if float((made - ratio * due).norm()) > max(near, _LEFT_OVER * float(made.norm())):
        return ""
    if ratio < 0:
        return f"the outer step leads away from what ranks found: {ratio:.6g} times the right one"
    return f"{ratio:.6g} times the outer step that was due"


def _is_wrong(held: Tensor, truth: Tensor, found: Sequence[Tensor]) -> bool:
    """Whether ``held`` is further from the truth than rounding takes it, beside ranks' own ends."""
    apart = max(float((other - found[0]).double().norm()) for other in found)
    return float((held - truth).double().norm()) > _LEFT_OVER * apart
