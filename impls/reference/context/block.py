"""Attention of some queries over one block of keys and values, and its gradient.

    forward     scores = q k^T / sqrt(D), -inf where hidden
                lse = log sum_j exp(scores_j);  out = exp(scores - lse) v
    backward    weights = exp(scores - lse), where ``lse`` is that over the keys of all blocks
                of_v = weights^T g;  of_scores = weights (g v^T - sum(g out)) / sqrt(D)
                of_q = of_scores k;  of_k = of_scores^T q

FlashAttention-2 (arXiv 2307.08691, section 3.1): backward needs no partial result, only the final
``out`` and ``lse``.  torch's kernel for CPUs computes both tile by tile and stores no score, so it
is used where it can be; elsewhere the formulas are computed as they stand here.  Where something is
hidden, the kernel takes the mask as numbers, one for each row and column: the heads of a group have
copies of it, samples and KV heads share it as ``hides`` does.

Queries and results are ``(samples, KV heads, rows, D)``, keys and values ``(samples, KV heads,
columns, D)``, ``hides`` fits to ``(samples, KV heads, rows, columns)``.  The query heads that share
a KV head stand below each other in ``rows``.  All are float32 or float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_FORWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)


def attend(query: Tensor, key: Tensor, value: Tensor, hides: Tensor) -> tuple[Tensor, Tensor]:
    """The result over this block alone, and the log-sum-exp of each row; -inf if all is hidden."""
    if has_kernel(query):
        given = [readable(part) for part in (query, key, value)]
        result, lse = _FORWARD(*given, attn_mask=added(hides, query))
        # The kernel gives such a row 0, which another block would have to outweigh.
        return result, lse.masked_fill(hides.all(-1), -math.inf)
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(hides, -math.inf)
    lse = scores.logsumexp(-1)
    # A row that sees nothing here has -inf, and weights of zero.
    finite = lse.masked_fill(lse == -math.inf, 0)
    return (scores - finite[..., None]).exp() @ value, lse


def gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hides: Tensor,
    back: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of this block in the gradients of queries, keys and values; ``back``: the gradient
    of the result, the result and the log-sum-exp of each row, over all blocks.
    """
    gradient, result, lse = back
    if has_kernel(query):
        given = [readable(part) for part in (gradient, query, key, value, result)]
        bias = added(hides, query)
        of_query, of_key, of_value = _BACKWARD(*given, lse, 0.0, False, attn_mask=bias)
        return of_query, of_key, of_value
    root = math.sqrt(query.shape[-1])
    scores = (query @ key.mT / root).masked_fill(hides, -math.inf)
    weights = (scores - lse[..., None]).exp()
    # The weights of a row sum to 1: what one gains, the others lose.
    lost = (gradient * result).sum(-1, keepdim=True)
    of_scores = weights * (gradient @ value.mT - lost) / root
    return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


def has_kernel(query: Tensor) -> bool:
    """Whether torch has a kernel for tensors like ``query``."""
    return query.device.type == "cpu" and _FORWARD is not None and _BACKWARD is not None


def readable(part: Tensor) -> Tensor:
    """``part`` as the kernel reads it: it takes the elements of a row to be neighbours."""
    return part if part.stride(-1) == 1 else part.contiguous()


def added(hides: Tensor, query: Tensor) -> Tensor | None:
    """The numbers that the kernel adds to scores: -inf where ``hides``, else 0; ``None``: it hides
    nothing.
    """
    if not hides.any():
        return None
    return torch.zeros(hides.shape, dtype=query.dtype).masked_fill(hides, -math.inf)
