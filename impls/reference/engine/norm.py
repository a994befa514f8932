"""Global gradient norm and clipping, from parts on one or several ranks.

Same formula as ``torch.nn.utils.clip_grad_norm_``: gradients are multiplied by
``min(1, max_norm / (norm + 1e-6))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shardproof.comm import Comm

#: Sum of ``|g| ** order`` of one part, and the mesh axes over which such sums must be added.
NormPart = tuple[Tensor, tuple[str, ...]]

#: Guards the division, as in torch.
EPSILON = 1e-6


def power_sum(gradient: Tensor, order: float = 2.0) -> Tensor:
    """``sum |g| ** order`` as a float64 scalar, whatever the dtype of ``gradient``."""
    norm = torch.linalg.vector_norm(gradient, order, dtype=torch.float64)
    return norm**order


def total_norm(parts: Iterable[NormPart], comm: Callable[..., Comm], order: float = 2.0) -> Tensor:
    """Global norm (float64 scalar) of all ``parts``; ``comm(axis)`` gives the communicators.

    Sums are added along one axis after the other.  Parts that are whole on every rank have no axes
    and are counted once, locally.
    """
    sums: dict[tuple[str, ...], Tensor] = {}
    for value, axes in parts:
        sums[axes] = sums.get(axes, torch.zeros((), dtype=torch.float64)) + value
    total = torch.zeros((), dtype=torch.float64)
    for axes in sorted(sums):  # one order on all ranks
        for axis in axes:
            comm(axis).all_reduce(sums[axes])
        total = total + sums[axes]
    return total ** (1.0 / order)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that limits the norm of gradients to ``max_norm``."""
    return (max_norm / (norm + EPSILON)).clamp(max=1.0)
