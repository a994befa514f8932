"""What makes wrong sums and residuals where gradients are compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.checks.causes import fits

#: What rounding on the way leaves over, relative.
_ROUNDED = 1e-3
#: A share of elements that are zero by chance.
_FEW = 0.01


def of_sent(
    held: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    wrong: Sequence[str],
    known: Mapping[str, float],
) -> str:
    """A sentence on sums of which ``wrong`` are not those of one process; empty: nothing fits."""
    times = fits.multiple({n: held[n] for n in wrong}, truth, _ROUNDED)
    if times is not None and abs(times - 1) > _ROUNDED and len(wrong) == len(held):
        return fits.factor(times, known, _ROUNDED)
    got, want = fits.flat(held, truth, wrong), fits.flat(truth, truth, wrong)
    # Sparse methods send few elements: which ones are not zero tells which ones were chosen.
    due, come = want != 0, got != 0
    missing, extra = int((due & ~come).sum()), int((come & ~due).sum())
    if missing + extra > _FEW * len(got):
        lost = f"{missing} of {int(due.sum())} that are due are missing"
        return f"other elements are sent: {lost}, {extra} others are there"
    if bool((want < 0).any()) and not bool((got < 0).any()):
        return "signs are lost: nothing is negative"
    if torch.allclose(got.abs(), want.abs(), rtol=_ROUNDED, atol=0.0):
        return f"{int((got * want < 0).sum())} of {len(got)} signs are turned round"
    return ""


#: Parameter, what is kept, what was wanted to be sent, what was sent.
Kept = tuple[str, Tensor, Tensor, Tensor]


def of_kept(kept: Sequence[Kept]) -> str:
    """A sentence on residuals, all of which are wrong; empty: nothing fits."""
    limit, (_, *tensors) = fits.LEFT_OVER["float64"], zip(*kept, strict=True)
    have, wanted, sent = map(fits.end_to_end, tensors)
    due = wanted - sent
    if not have.any():
        return "nothing is kept"
    if fits.equal(have, wanted, limit):
        return "what was sent is still in what is kept"
    times = fits.multiple({"kept": have}, {"kept": due}, limit)
    if times is not None and abs(times - 1) > limit:
        return f"what is kept is {times:.4g} times what was not sent"
    # Gaps of all coordinates, added by parameter: where they cancel, only the sum is right.
    sums: dict[str, Tensor] = {}
    for name, own, gradient, told in kept:
        sums[name] = sums.get(name, torch.zeros_like(own)) + (own - (gradient - told))
    if all(float(gap.norm()) <= limit * float(due.norm()) for gap in sums.values()):
        return "only the sum over ranks of what is kept is right: each lacks what all lack together"
    return ""
