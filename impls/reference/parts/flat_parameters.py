"""Whole parameters as views of one flat tensor, with their dtypes and strides.

    flat       | a         | b   | c       | pad |   in the dtype that is computed with
    a, c       views of ``flat``: an update of ``flat`` is an update of them
    b          transposed, say: keeps a tensor with its own strides beside ``flat``, because a
               product with other strides is rounded otherwise
    targets    this rank's parts, one-dimensional views: what the optimizer updates

An update changes ``flat`` only, so it must be copied to what lies beside it (``copy_out``); what is
loaded into that must be copied back (``copy_in``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.flat import FlatLayout


class FlatParameters:
    """Parameters ``named``, laid out by ``layout``, of which this rank owns shard number ``rank``.

    ``flat`` has ``layout.padded_numel`` elements, ``shard`` is this rank's view of it.  Gradients
    have ``gradient_dtype``, the dtype that they are summed in.
    """

    @torch.no_grad()
    def __init__(
        self, named: Mapping[str, Tensor], layout: FlatLayout, rank: int, precision: Precision
    ) -> None:
        self.device = next(iter(named.values())).device
        self.flat = layout.empty(self.device, precision.compute(layout.dtype))
        layout.pack(self.flat, named)
        #: Parameters with strides of their own, each with its place in ``flat``.
        self.beside: list[tuple[Tensor, Tensor]] = []
        for name, view in layout.views(self.flat).items():
            if named[name].is_contiguous():
                named[name].data = view
            else:
                named[name].data = named[name].data.to(view.dtype)
                self.beside.append((named[name].data, view))
        self.shard = layout.shard(self.flat, rank)
        self.targets = {part.name: part.of_shard(self.shard) for part in layout.parts(rank)}
        self.gradient_dtype = precision.reduction(layout.dtype)
        for target in self.targets.values():
            if target.dtype != self.gradient_dtype:
                # Torch refuses a gradient of another dtype than its tensor's unless told so.
                target.grad_dtype = self.gradient_dtype

    def copy_in(self) -> None:
        """Copy values from separate memory into ``flat``."""
        for parameter, view in self.beside:
            view.copy_(parameter)

    def copy_out(self) -> None:
        """Copy values from ``flat`` into separate memory."""
        for parameter, view in self.beside:
            parameter.copy_(view)
