"""The factor of clipping in low precision, against the roundings of correct runs.

In bf16 a gradient may err by several per cent, so a factor that is 1 % off hides in its errors.
But a factor is one number: from what a rank shows before and after clipping it is known to a small
part of one round-off.  Each rank is held to the norm that it reports, which the check ``norm``
judges, or to that of the gradients that are shown.

    correct   limit / (norm + 1e-6), as computed in fp64
              the same rounded to the dtype of the gradients, as a product with them may do
              computed in that dtype, as torch's ``clip_grad_norm_`` does

Allowed is what lies between these, and the rounding of the products: n products of random sign err
together by 1 / sqrt(n) of one, and never by more than one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shardproof.checks.causes.fits import pieces
from shardproof.contract import Piece
from shardproof.evidence.assembled import Evidence

#: What guards the division in torch; others leave it out.
_EPSILON = 1e-6
#: Standard deviations of a sum of roundings.
_SIGMAS = 6.0
#: Of a quotient in fp32.
_QUOTIENT = 2.0**-22


def problems(evidence: Evidence, step: int) -> Iterator[tuple[int, str]]:
    """Every rank whose gradients were multiplied by another factor, and a sentence."""
    limit = evidence.case.optimizer.clip_norm
    given = dict(pieces(evidence, step, "gradients_final", "gradients"))
    # FSDP1 clips by a norm in fp32, and reports it rounded.
    shown = evidence.observed(step, "gradients_final", "gradients").first()
    whole = math.hypot(*(float(tensor.double().norm()) for tensor in shown.values()))
    for rank, clipped in pieces(evidence, step, "after_clip", "gradients"):
        norm = evidence.ranks[rank].steps[step].norm
        if limit is None or not norm or not math.isfinite(norm):
            continue
        before, after = _by_place(given.get(rank, ())), _by_place(clipped)
        pairs = [(before[key], after[key]) for key in before.keys() & after.keys()]
        if pairs and (problem := _wrong(pairs, limit, (norm, whole or norm))):
            yield rank, problem


def _by_place(own: Iterable[Piece]) -> dict[object, Tensor]:
    return {(p.name, p.slices, p.flat_range, p.replica): p.tensor for p in own}


def _wrong(pairs: list[tuple[Tensor, Tensor]], limit: float, norms: tuple[float, float]) -> str:
    """What is wrong with the factor between two states of one rank; empty: nothing."""
    dtype = max((after.dtype for _, after in pairs), key=lambda kind: torch.finfo(kind).eps)
    unit = torch.finfo(dtype).eps / 2
    lost = torch.finfo(dtype).smallest_normal * unit  # by a product that underflows
    x, y = (torch.cat([pair[n].double().reshape(-1) for pair in pairs]) for n in (0, 1))
    squares = float(x @ x)
    if not squares or not math.isfinite(squares):
        return ""
    found = float(x @ y) / squares
    together = min(1.0, _SIGMAS * float(x.square().norm()) / squares)
    noise = unit * together * abs(found) + lost * float(x.abs().sum()) / squares
    right = [min(1.0, one) for norm in norms for one in _correct(limit, norm, dtype)]
    slack = _QUOTIENT + _EPSILON / min(norms)
    if min(right) * (1 - slack) - noise <= found <= max(right) * (1 + slack) + noise:
        return ""
    off = f"{found:.6g}, expected {right[0]:.6g} by the norm that it reports"
    kind = str(dtype).removeprefix("torch.")
    return f"gradients were clipped by the factor {off}: more than rounding in {kind} explains"


def _correct(limit: float, norm: float, dtype: torch.dtype) -> Iterator[float]:
    true, over = limit / (norm + _EPSILON), torch.tensor(norm, dtype=dtype) + _EPSILON
    yield true
    yield float(torch.tensor(true, dtype=dtype))
    # A number over a tensor is two roundings in torch: its reciprocal, and the product.
    yield float(limit / over)
    yield float(torch.tensor(limit, dtype=dtype) / over)
