"""Gradient buckets: several parameters' gradients in one flat tensor, reduced in one call.

A small bucket costs latency, a large one waits long for its last gradient: hence a size limit.  The
first bucket is smaller, so that communication starts early in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.reducers import Bucket, Work


class GradientBucket:
    """The gradients of ``members`` (indices into ``parameters``) in one flat tensor.

    ``names`` are those of all ``parameters``, in the same order.
    """

    def __init__(
        self, members: Sequence[int], names: Sequence[str], parameters: Sequence[Tensor]
    ) -> None:
        self.members = tuple(members)
        # One shard, hence no padding: every rank holds all of it.
        layout = FlatLayout({names[index]: parameters[index] for index in members}, 1)
        self.parts = layout.whole
        first = parameters[self.members[0]]
        # For good, not for a step: gradients are views of it, so it must stay where it is.
        self.flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        #: Per member: its part of ``flat``, shaped like the parameter.
        self.views = dict(zip(self.members, layout.views(self.flat).values(), strict=True))
        self.reset()

    def reset(self) -> None:
        """Before a step: nothing has arrived, nothing is in flight."""
        self.missing = set(self.members)
        self.work: Work | None = None

    def pack(self, gradients: Iterable[Tensor | None]) -> None:
        """Pack the members' ``gradients`` that lie elsewhere; ``None`` is zero."""
        for view, gradient in zip(self.views.values(), gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient)

    def outgoing(self, step: int) -> Bucket:
        """The bucket for a reducer in optimizer step number ``step``."""
        return Bucket(self.flat, self.parts, step)


def plan_buckets(
    order: Sequence[int], parameters: Sequence[Tensor], first: int | None, limit: int | None
) -> list[list[int]]:
    """Cut ``order`` into buckets of one dtype and at most ``limit`` bytes (``None``: no limit).

    ``first`` is the limit of the first bucket of each dtype.  A parameter over the limit has a
    bucket of its own.  Buckets are listed by the moment at which their last member arrives.
    """
    filling: dict[torch.dtype, list[int]] = {}
    full: list[list[int]] = []
    limits: dict[torch.dtype, int | None] = {}
    for index in order:
        dtype = parameters[index].dtype
        most = limits.setdefault(dtype, first)
        now = filling.setdefault(dtype, [])
        size = sum(parameters[i].nbytes for i in now) + parameters[index].nbytes
        if now and most is not None and size > most:
            full.append(now)
            now = filling[dtype] = []
            limits[dtype] = limit
        now.append(index)
    # A bucket leaves with its last member, so this is the order in which buckets become full.
    position = {index: place for place, index in enumerate(order)}
    return sorted(full + list(filling.values()), key=lambda bucket: position[bucket[-1]])
