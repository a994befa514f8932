"""What all ranks draw alike, and how many elements a density means."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import torch
from torch import Tensor


def count(density: float, numel: int) -> int:
    """Elements that ``density``, taken as it is written, means of ``numel``: rounded up."""
    return math.ceil(Fraction(str(density)) * numel)


def generator(*key: object) -> torch.Generator:
    """The same for the same ``key`` on all ranks, whatever else has been drawn."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def mask(seed: int, step: int, name: str, numel: int, density: float) -> Tensor:
    """Indices of the elements of parameter ``name`` that are sent in ``step``."""
    order = torch.randperm(numel, generator=generator(seed, step, name))
    return order[: count(density, numel)]


def first_factor(seed: int, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """What PowerSGD starts from: numbers of a standard normal distribution."""
    drawn = torch.randn(rows, columns, generator=generator(seed, name), dtype=torch.float64)
    return drawn.to(dtype)
