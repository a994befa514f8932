"""Random draws for dropout that no cut of the work can change, and generators that a cut can.

A counter-based draw is a pure function of its key and its place: nothing has to be kept or put
back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_LOW = 0xFFFFFFFF


def counter_mask(
    keys: Tensor, site: int, shape: Sequence[int], first: int = 0, rows: Tensor | None = None
) -> Tensor:
    """A fair coin per element: bool ``(samples, *shape)``.

    ``keys``, int64 ``(samples,)`` below 2^31, stand for seed, step and sample; ``site`` is the
    dropout in the model.  ``shape`` is that of one sample, or of its part from ``first`` on along
    the first dimension: the position in the sample is part of the draw.  ``rows`` are positions
    that do not follow each other.
    """
    inner = math.prod(shape[1:])
    if rows is None:
        rows = torch.arange(first, first + shape[0], device=keys.device)
    place = (rows[:, None] * inner + torch.arange(inner, device=keys.device)).flatten()
    mixed = _mix(keys[:, None] ^ _mix(place + (site << 24))[None, :])
    return (mixed & 0x10000 != 0).view(len(keys), *shape)


def _mix(value: Tensor) -> Tensor:
    """A 32-bit integer hash on int64 (two rounds of shift-multiply; products stay below 2^63)."""
    value = value & _LOW
    for factor in (0x2C1B3C6D, 0x297A2D39):
        value = ((value ^ (value >> 15)) * factor) & _LOW
    return value ^ (value >> 15)


def generators(module: nn.Module) -> dict[str, torch.Generator]:
    """Generators of the parts of ``module`` that draw in forward (name -> generator)."""
    generators = {name: getattr(child, "generator", None) for name, child in module.named_modules()}
    return {name: g for name, g in generators.items() if isinstance(g, torch.Generator)}


def read_draws(module: nn.Module) -> dict[str, Tensor]:
    """States of these generators (name -> state)."""
    return {name: generator.get_state() for name, generator in generators(module).items()}


def restore_draws(module: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Set these generators to ``states``."""
    for name, generator in generators(module).items():
        generator.set_state(states[name])
