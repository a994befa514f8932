"""Positions of samples on the ranks of an axis, for adapters of systems that replace attention.

Such a system brings an attention over positions of all ranks, and leaves to its user what else
knows positions.  Here that is this object: the model computes the positions that the system gives
a rank (``span.rows``), its attention is the system's, and the loss takes the targets of these
positions.  Targets are those of whole samples, shifted before anything is cut.

Not a strategy by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardproof.contract import MicroBatch, Refused, Role
from shardproof.impls.reference.context.span import find_span

#: The attention of a module of the role ``core``, over its queries, keys and values.
Attention = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]

WHOLE = "a context rank has some positions only, but the module"
#: Traits of modules that need all positions of a sample, and of lengths that vary.
DECLINES: Mapping[str, str] = {
    "rebound_buffer": f"{WHOLE} takes a mean over all",
    "dropout_stateful": f"{WHOLE} draws for all",
    "variable_lengths": "the ranks must divide the positions of every micro-batch",
}


class Positions:
    """The positions of this rank, in the model and in its targets."""

    def __init__(
        self, module: nn.Module, roles: Mapping[str, Role], attention: Attention, ranks: int
    ) -> None:
        self.span: Any = find_span(module, ranks)
        self.cores = [module.get_submodule(n) for n, role in roles.items() if role == "core"]
        for core in self.cores:
            core.forward = partial(attention, core)

    def take(self, micro: MicroBatch, rows: Tensor) -> MicroBatch:
        """``micro`` with whole inputs, and the targets and weights of the positions ``rows``, which
        the next forward computes.
        """
        self.span.rows = rows
        targets, weights = (whole[:, rows] for whole in (micro.targets, micro.weights))
        return replace(micro, targets=targets, weights=weights)

    def close(self) -> None:
        """Give the model its own attention back."""
        self.span.rows = None
        while self.cores:
            del self.cores.pop().forward


def check_length(micro: MicroBatch, parts: int, why: str) -> int:
    """The number of positions of ``micro``; :class:`Refused` where ``parts`` do not divide it."""
    length = micro.targets.shape[1]
    if length % parts:
        raise Refused(
            f"{length} positions cannot be cut into {parts} equal parts: {why}; use a length that "
            f"is a multiple of {parts}"
        )
    return length
