"""Choices of a router whose tokens lie on several ranks: counted, and given places, as one batch.

A mixture of experts routes token by token, so its ranks need no message for that.  Two things look
at all tokens of a micro-batch: who gets a place with an expert of limited capacity, and the load of
each expert.  A rank that looked at its own positions would share out other places, and count less.

    rank 0   choices of 0 1 \\  all-gather   choices of 0 1 2 3 -> places, counts; keeps 0 1
    rank 1   choices of 2 3 /  (integers)   choices of 0 1 2 3 -> places, counts; keeps 2 3

So every context rank has the counts of whole samples, equal to those of its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from shardproof.comm import Comm


class WholeChoices:
    """Stands in for ``places`` and ``count`` of the mixture ``layer``, whose tokens are the
    positions that ``span`` names.
    """

    def __init__(self, layer: Any, comm: Comm, span: Any) -> None:
        self.layer, self.comm, self.span = layer, comm, span
        self.places_of, self.count_of = layer.places, layer.count
        #: Choices of the forward under way, and which of them have a place; of all ranks' tokens.
        self.chosen: tuple[Tensor, Tensor] | None = None
        layer.places, layer.count = self.places, self.count

    def places(self, experts: Tensor, samples: int) -> Tensor:
        """Which choices of this rank's tokens ``(tokens, top_k)`` get a place."""
        # A rank may have no position of a short sample.
        whole = self.gathered(experts.view(samples, len(self.span.rows), experts.shape[1]))
        placed = self.places_of(whole.flatten(0, 1), samples)
        self.chosen = whole.flatten(0, 1), placed
        return placed.view(whole.shape)[:, self.span.rows].reshape(experts.shape)

    def count(self, routing: Any) -> None:
        """Add all ranks' choices to the statistics."""
        assert self.chosen is not None
        (experts, placed), self.chosen = self.chosen, None
        self.count_of(replace(routing, experts=experts, placed=placed))

    def gathered(self, own: Tensor) -> Tensor:
        """``(samples, positions, top_k)`` of all positions, from this rank's."""
        parts = self.span.parts
        # Ranks send equal parts: where one has a position fewer, padding travels, and is cut off.
        share = max(len(part) for part in parts)
        padded = F.pad(own, (0, 0, 0, share - own.shape[1])).contiguous()
        came = padded.new_empty(self.comm.size, *padded.shape)
        self.comm.all_gather(came.view(-1), padded.view(-1))
        whole = own.new_empty(len(own), sum(len(part) for part in parts), own.shape[2])
        for positions, choices in zip(parts, came, strict=True):
            whole[:, positions] = choices[:, : len(positions)]
        return whole

    def close(self) -> None:
        """Give the layer its own methods back."""
        del self.layer.places, self.layer.count
