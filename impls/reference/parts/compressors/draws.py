"""Random numbers that are equal on all ranks, and the number of elements for a density."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import torch
from torch import Tensor


def count(density: float, numel: int) -> int:
    """The number of elements for ``density`` of ``numel``, rounded up."""
    return math.ceil(Fraction(str(density)) * numel)


def generator(*key: object) -> torch.Generator:
    """A generator that is equal on all ranks for the same ``key``."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def mask(seed: int, step: int, name: str, numel: int, density: float) -> Tensor:
    """Indices of the elements of parameter ``name`` sent in ``step``."""
    order = torch.randperm(numel, generator=generator(seed, step, name))
    return order[: count(density, numel)]


def first_factor(seed: int, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """PowerSGD's first factor: numbers of a standard normal distribution."""
    drawn = torch.randn(rows, columns, generator=generator(seed, name), dtype=torch.float64)
    return drawn.to(dtype)
