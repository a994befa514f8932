"""The messages between workers and parameter servers as one flat tensor: values, used parameters
and their version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Message:
    """The content of a push: gradients of used parameters, and the version they were computed
    from.
    """

    gradients: Mapping[str, Tensor]
    version: int


def pack(like: Mapping[str, Tensor], used: Mapping[str, Tensor], version: int) -> Tensor:
    """``used``, or ``like`` itself, end to end; the used parameters; and the version."""
    values = {n: used.get(n, torch.zeros_like(t)) if used else t for n, t in like.items()}
    flags = [float(name in used) for name in like]
    first = next(iter(like.values()))
    tail = torch.tensor([*flags, float(version)], dtype=first.dtype, device=first.device)
    return torch.cat([*(tensor.detach().reshape(-1) for tensor in values.values()), tail])


def unpack(flat: Tensor, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[bool], int]:
    """The content packed by :func:`pack`: tensors, used parameters, the version."""
    sizes = [tensor.numel() for tensor in like.values()]
    *parts, tail = flat.split([*sizes, len(sizes) + 1])
    pairs = zip(like.items(), parts, strict=True)
    *flags, version = tail.tolist()
    return {n: p.view(t.shape) for (n, t), p in pairs}, [bool(f) for f in flags], int(version)
