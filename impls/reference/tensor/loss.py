"""Cross-entropy over classes on several ranks: no rank ever holds all logits.

The loss of a target needs three sums over all classes and one of the logits: each rank sums over
its own classes, and only numbers per target travel (Megatron-LM, arXiv 1909.08053, section 3: b*s
numbers in place of b*s*v).

    each rank       largest own logit             all-reduce (max)     m
    each rank       sum of exp(logit - m)         all-reduce (sum)     S
                    logit of the target - m, 0 where another rank has it       t
                    with smoothing e: sum of (logit - m)                       u
    all ranks       (1 - e) (log S - t) + e (log S - u / classes)

``classes`` are those of the whole vocabulary, whatever each rank has of them; the last ranks may
have fewer.  The gradient of each own logit, ``exp(logit - m) / S - (1 - e) [target] - e / classes``
times the target's weight, needs no further message.  Targets that are ignored have neither loss nor
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.contract import CrossEntropy


def cross_entropy(
    logits: Tensor, targets: Tensor, form: CrossEntropy, classes: range, total: int, comm: Comm
) -> Tensor:
    """Losses ``(targets,)`` of ``logits (targets, len(classes))``, equal on all ranks.

    Args:
        logits: Of this rank's ``classes``, in the dtype to compute in.
        targets: int64 ``(targets,)``: numbers of classes, or ``form.ignore_index``.
        form: Label smoothing and the ignored index.
        classes: Those of the ``total`` that this rank has; at least one.
        total: Of all ranks together.
        comm: Over the ranks that share them.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets, form, classes, total, comm)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        form: CrossEntropy,
        classes: range,
        total: int,
        comm: Comm,
    ) -> Tensor:
        # The largest of all ranks: with each rank's own, sums of exponentials could not be added.
        largest = logits.amax(-1)
        comm.all_reduce(largest, "max")
        shifted = logits - largest[:, None]
        place = (targets - classes.start)[:, None]
        here = (place >= 0) & (place < len(classes))
        place = place.clamp(0, len(classes) - 1)
        target = shifted.gather(-1, place).masked_fill(~here, 0)[:, 0]
        smoothed = [shifted.sum(-1)] if form.label_smoothing else []
        # In place, after all that reads `shifted`: logits are the largest tensor of the model.
        chances = shifted.exp_()
        sums = torch.stack([chances.sum(-1), target, *smoothed])
        # One message for all sums: what is sent is small, so its latency is what counts.
        comm.all_reduce(sums)
        logarithm = sums[0].log()
        losses = (1 - form.label_smoothing) * (logarithm - sums[1])
        if form.label_smoothing:
            losses += form.label_smoothing * (logarithm - sums[2] / total)
        counted = targets != form.ignore_index
        chances /= sums[0][:, None]
        ctx.save_for_backward(chances, place, here, counted)
        ctx.smoothing, ctx.total = form.label_smoothing, total
        return losses.masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        chances, place, here, counted = ctx.saved_tensors
        weights = gradients[0].masked_fill(~counted, 0)[:, None]
        slope = chances - ctx.smoothing / ctx.total if ctx.smoothing else chances.clone()
        slope.scatter_add_(-1, place, (ctx.smoothing - 1) * here.to(slope.dtype))
        return slope * weights, None, None, None, None, None
