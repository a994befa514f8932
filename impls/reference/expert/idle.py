"""The rounds in which this rank has no micro-batch, but others have: its experts compute for them.

Ranks may have unequal numbers of micro-batches, or none.  A rank without one makes the calls of the
others all the same, in their order, with no rows from this rank:

    forward     exchange of layer 0, 1, ... with no rows
    backward    the gradients of layer ..., 1, 0; its experts get gradients of the others' tokens
    recomputed  before the backward of a group of units the exchanges of its layers once more; not
                those of layers that no unit has
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardproof.impls.reference.expert.exchange import Exchange


class IdleRounds:
    """Rounds over ``groups`` of exchanges in forward order; all of one group are repeated together
    in backward, or none is.
    """

    def __init__(self, groups: Sequence[Sequence[Exchange]]) -> None:
        self.groups = groups

    def forward(self) -> list[Tensor]:
        """Make the calls of a forward; what :meth:`backward` is to be given."""
        return [self.chained(group) for group in self.groups]

    def backward(self, ends: Sequence[Tensor]) -> None:
        """Make the calls of the backward of a forward."""
        for group, end in zip(reversed(self.groups), reversed(ends), strict=True):
            (self.chained(group, again=True) if group[0].repeats else end).sum().backward()

    def chained(self, exchanges: Sequence[Exchange], again: bool = False) -> Tensor:
        """One exchange after the other, each of what the one before gave: no rows.

        So backward goes through them in reverse order, as it does through a model.
        """
        rows = exchanges[0].nothing()
        for exchange in exchanges:
            numbers = torch.empty(0, dtype=torch.int64, device=rows.device)
            rows = exchange.forward(rows, numbers, again)
        return rows
