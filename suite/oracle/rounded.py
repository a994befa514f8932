"""How far one rounding of each gradient moves an emulated system: the condition of its training.

An orthogonalization (PowerSGD's, arXiv 1905.13727, algorithm 1) multiplies round-off by the
condition of what it is given.  Where gradients have hardly a second direction that is hundreds in
one step, and what is kept carries it into the next.  No constant bound fits that; so the oracle
trains once more with gradients that are each off by one round-off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardproof.oracle.training import Fold

Tensors = dict[str, Tensor]


class Rounded:
    """``fold`` of gradients that are each off by a round-off, up or down by a draw."""

    def __init__(self, fold: Fold) -> None:
        self.fold = fold
        self._draws = torch.Generator().manual_seed(0)

    def __call__(self, step: int, parts: Sequence[Tensors]) -> Tensors:
        return self.fold(step, [{n: self._off(g) for n, g in part.items()} for part in parts])

    def __getattr__(self, name: str) -> object:
        return getattr(self.fold, name)  # ``sent``, ``kept`` and ``regroup``

    def _off(self, gradient: Tensor) -> Tensor:
        signs = torch.randint(2, gradient.shape, generator=self._draws).to(gradient) * 2 - 1
        return gradient * (1 + signs * torch.finfo(gradient.dtype).eps)


def spread(truth: Tensor, rounded: Tensor) -> float:
    """Relative distance in the Frobenius norm; 0 of nothing."""
    size = float(torch.linalg.vector_norm(truth))
    return float(torch.linalg.vector_norm(truth - rounded)) / size if size else 0.0
