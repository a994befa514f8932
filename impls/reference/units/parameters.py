"""Parameters of a unit: a shard on every rank, whole only while the unit computes.

All parameters of one dtype lie end to end in one flat tensor.  Each rank keeps a shard of it.  The
parameters are views of the whole, and freeing takes the memory away under them
(``storage.resize_(0)``).  Whatever autograd saved for backward is a view too, and sees the values
again after the next gather.  (FSDP, arXiv 2304.11277, section 4.2.)

    state       this rank holds                          left by
    sharded     shard [ s_r ]                            gather: all-gather of the shards
    gathering   shard, and memory for the whole          wait
    whole       shard, whole [ s_0 | s_1 | ... | pad ]   free, or free to chunks of k neighbours
    chunked     shard, and 1/k of the whole              gather: from the k chunks, or the shards

Over one rank the shard is the whole: it stays whole, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.reducers import Reducer, Work
from shardproof.impls.reference.units.states import Stateful

if TYPE_CHECKING:
    from shardproof.impls.reference.engine.offload import HostMemory


class ParameterState(Enum):
    """The location of a unit's parameters."""

    #: This rank has its shard; the whole has no memory.
    SHARDED = "sharded"
    #: The whole has memory, which an all-gather is filling: nobody may read it yet.
    GATHERING = "gathering"
    #: Forward and backward may read the whole.
    WHOLE = "whole"
    #: Freed, but for this rank's part of a sharding over fewer ranks.
    CHUNKED = "chunked"


class Parameters(Stateful[ParameterState]):
    """Parameters ``named`` of one dtype, laid out by ``layout``, sharded over ``comm``.

    ``shard`` (``layout.shard_numel`` elements, in the dtype as built) is what this rank owns.
    ``whole`` (``layout.padded_numel`` elements, in the policy's dtype) has memory only between
    :meth:`gather` and :meth:`free`.  ``comm`` of ``None``: one rank owns all.  With ``host`` the
    shard rests there.  ``reducer`` gathers.
    """

    what = "parameters"
    following: ClassVar[Mapping[Enum, tuple[Enum, ...]]] = {
        ParameterState.SHARDED: (ParameterState.GATHERING,),
        ParameterState.GATHERING: (ParameterState.WHOLE,),
        ParameterState.WHOLE: (ParameterState.SHARDED, ParameterState.CHUNKED),
        ParameterState.CHUNKED: (ParameterState.GATHERING, ParameterState.SHARDED),
    }

    @torch.no_grad()
    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        layout: FlatLayout,
        comm: Comm | None,
        precision: Precision,
        host: HostMemory | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self.layout, self.comm, self.reducer = layout, comm, reducer or Reducer()
        self.device = next(iter(named.values())).device
        built = layout.empty(self.device)
        layout.pack(built, named)
        self.whole = built.to(precision.compute(built.dtype))
        # Never freed: the only copy of the values, which no other rank could send.
        self.is_resident = comm is None and self.whole is built and host is None
        self.is_offloaded = host is not None
        own = layout.shard(built, comm.rank if comm else 0)
        self.shard = built if self.is_resident else host.place(own) if host else own.clone()
        for name, view in layout.views(self.whole).items():
            named[name].data = view
        self.work: Work | None = None  # the all-gather
        self.sending: Tensor | None = None  # what it reads
        self.chunk: Tensor | None = None  # this rank's part of a sharding over fewer ranks
        self.state = ParameterState.WHOLE
        self.free()

    @property
    def is_whole(self) -> bool:
        """Whether the whole parameters have memory, filled or being filled."""
        return self.state in (ParameterState.WHOLE, ParameterState.GATHERING)

    @torch.no_grad()
    def gather(self, within: Comm | None = None) -> None:
        """Start to gather the parameters from all shards, unless they are whole.

        ``within`` are the neighbours over which they were freed: then from their chunks.
        """
        if self.is_whole:
            return
        if within is not None:
            self.require(ParameterState.CHUNKED, "a gather from chunks")
        source = self.shard if within is None else self.chunk
        assert source is not None
        self.enter(ParameterState.GATHERING)
        # The storage that all views share gets its memory back; they need not be made anew.
        self.whole.untyped_storage().resize_(self.layout.padded_numel * self.whole.element_size())
        comm = self.comm if within is None else within
        if comm is None:
            self.whole.copy_(source)
        elif self.layout.padded_numel:
            # Kept until the wait: the collective reads it, and the cast may have made a copy.
            self.sending = source.to(self.device, self.whole.dtype, copy=self.is_offloaded)
            self.work = self.reducer.all_gather(self.whole, self.sending, comm)
        self.chunk = None

    def wait(self) -> None:
        """Wait for the gather, after which forward and backward may read the parameters."""
        if self.state is not ParameterState.WHOLE:
            self.enter(ParameterState.WHOLE)
        if self.work is not None:
            self.work.wait()
        self.work = self.sending = None

    def free(self, within: Comm | None = None) -> None:
        """Free the whole parameters, if any; keep a chunk of 1/``within.size`` if given."""
        if self.is_resident:
            return
        if self.is_whole:
            # Memory must not go while a collective still writes into it.
            self.wait()
            if within is not None:
                chunks = self.whole.view(within.size, self.layout.padded_numel // within.size)
                self.chunk = chunks[within.rank].clone()
            self.whole.untyped_storage().resize_(0)
            self.enter(ParameterState.SHARDED if within is None else ParameterState.CHUNKED)
        elif self.state is ParameterState.CHUNKED and within is None:
            # Values of before the update: the next step must not take them for its own.
            self.chunk = None
            self.enter(ParameterState.SHARDED)
