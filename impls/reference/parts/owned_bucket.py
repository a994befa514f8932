"""A bucket of which each rank owns a shard: whole parameters, and gradients until they are reduced.

over 3 ranks    parameters   | s0 | s1 | s2 |   whole on every rank, for ever
                gradients    | g0 | g1 | g2 |   this rank's own, from ``add`` to ``release``
rank 1          gets the sum of g1 over ranks, updates s1, and gives s1 to all (``gather``)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.flat import FlatLayout, Part
from shardproof.impls.reference.parts.flat_parameters import FlatParameters
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work


class OwnedBucket:
    """Parameters ``named`` (of one dtype) and their gradients, each in a flat tensor.

    Both have ``layout.padded_numel`` elements, which ``layout`` cuts into a shard of
    ``shard_numel`` for each rank of ``comm``.  ``parts`` say which elements of which parameter this
    rank's shard holds.
    """

    def __init__(self, named: Mapping[str, Tensor], comm: Comm, precision: Precision) -> None:
        self.comm = comm
        self.layout = FlatLayout(named, comm.size)
        self.parameters = FlatParameters(named, self.layout, comm.rank, precision)
        self.parts: dict[str, Part] = {part.name: part for part in self.layout.parts(comm.rank)}
        self.full: Tensor | None = None  # whole gradients, while they have memory
        self.views: dict[str, Tensor] = {}  # of ``full``, by name
        self.filled: set[str] = set()  # names whose view holds a gradient
        self.start_round()

    def start_round(self) -> None:
        """Clear arrivals and calls before a backward."""
        self.missing = set(self.layout.names)
        self.sent = False
        # A work holds on to the tensors that it reads, so forgetting it also frees memory.
        self.work: Work | None = None

    # ---------------------------------------------------------------------------------- gradients

    def flat(self) -> Tensor:
        """Memory for this rank's gradients, uninitialized at first."""
        if self.full is None:
            self.full = self.layout.empty(self.parameters.device, self.parameters.gradient_dtype)
            self.views = self.layout.views(self.full)
        return self.full

    def add(self, name: str, gradient: Tensor) -> None:
        """Add ``gradient`` to the flat gradients of parameter ``name``."""
        self.flat()
        if name in self.filled:
            self.views[name].add_(gradient)
        else:
            self.views[name].copy_(gradient)  # what lies there is of an earlier round, or nothing
        self.filled.add(name)

    def complete(self) -> Tensor:
        """The flat gradients, zero where this rank has none."""
        flat = self.flat()
        for name, view in self.views.items():
            if name not in self.filled:
                view.zero_()
        return flat

    def outgoing(self, step: int) -> Bucket:
        """The bucket for a reducer in optimizer step number ``step``."""
        return Bucket(self.complete(), self.layout.whole, step)

    def own_gradients(self) -> Tensor:
        """This rank's shard of the flat gradients."""
        return self.layout.shard(self.flat(), self.comm.rank)

    def release(self) -> None:
        """Free the flat gradients."""
        self.full, self.views = None, {}
        self.filled.clear()

    # --------------------------------------------------------------------------------- parameters

    def gather(self, reducer: Reducer) -> Work | None:
        """Start to gather the shards of the parameters from all ranks, in place."""
        if not self.layout.padded_numel:
            return None
        return reducer.all_gather(self.parameters.flat, self.parameters.shard, self.comm)
