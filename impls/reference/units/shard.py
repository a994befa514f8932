"""A flat sharded unit: parameters that exist whole only while they are used.

A unit's parameters of one dtype lie end to end in one flat tensor.  Each rank keeps a shard of it;
the whole is gathered before use and freed after it.  Parameters are views of the whole, and freeing
takes the memory away under them (``storage.resize_(0)``): whatever autograd saved for backward is a
view as well, and sees the values again once they are gathered again.  (FSDP, arXiv 2304.11277,
section 4.2.)

    resting     shard [ s_r ]                      whole: no memory
    gather      shard [ s_r ]   all-gather ->      whole [ s_0 | s_1 | ... | padding ]
    free        shard [ s_r ]                      whole: no memory
    backward    gradients as they arrive           full gradients: no memory yet
    pack        gradients, each freed ->           full gradients [ ... ]
    reduce      total [ t_r ]   <- reduce-scatter  full gradients: no memory

Frozen parameters have a flat tensor of their own: no gradient memory, no reduction.  Over one
rank the shard is the whole, and nothing is gathered, freed or scattered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.impls.reference.engine.offload import HostTier
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.flat import FlatLayout, Part
from shardproof.impls.reference.parts.reducers import Work


class FlatShard:
    """Parameters ``named`` of one dtype, all trained or all frozen, sharded over ``comm``.

    ``shard`` (``layout.shard_numel`` elements, as built) is what this rank owns; ``whole``
    (``layout.padded``, in the policy's dtype) has memory only between :meth:`gather` and
    :meth:`free`.  ``comm`` of ``None``: one rank owns all.  With ``tier`` the shard rests there.
    """

    @torch.no_grad()
    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        comm: Comm | None,
        precision: Precision,
        tier: HostTier | None = None,
    ) -> None:
        self.comm = comm if comm is not None and comm.size > 1 else None
        self.rank = self.comm.rank if self.comm else 0
        self.layout = FlatLayout(named, self.comm.size if self.comm else 1)
        first = next(iter(named.values()))
        self.trained, self.device = first.requires_grad, first.device
        self.reduced_in = precision.reduction(self.layout.dtype)
        built = self.layout.empty(self.device)
        self.layout.pack(built, named)
        self.whole = built.to(precision.compute(built.dtype))
        self.is_resident = self.comm is None and self.whole is built and tier is None
        own = self.layout.shard(built, self.rank)
        self.is_offloaded = tier is not None
        self.shard = built if self.is_resident else tier.place(own) if tier else own.clone()
        self.parts: dict[str, Part] = {part.name: part for part in self.layout.parts(self.rank)}
        #: This rank's parts of trained parameters: leaves for the optimizer, views of the shard.
        self.targets: dict[str, Tensor] = {}
        if self.trained:
            views = {name: part.of_shard(self.shard) for name, part in self.parts.items()}
            self.targets = {name: v.detach().requires_grad_() for name, v in views.items()}
        for name, view in self.layout.views(self.whole).items():
            named[name].data = view
        self.is_whole = True
        self.gathering: Work | None = None
        self.sent: Tensor | None = None  # what the gather in flight reads
        self.kept: Tensor | None = None  # this rank's chunk of a sharding over fewer ranks
        self.fresh: dict[str, Tensor] = {}  # this rank's gradients as they have arrived
        self.full: Tensor | None = None  # those that are packed
        self.filled: set[str] = set()
        self.sending: Tensor | None = None  # those that the reduction in flight reads
        self.reduced: Tensor | None = None  # receives the reduction in flight
        self.total: Tensor | None = None  # the shard of the sum over ranks and micro-batches
        self.crossing: Work | None = None  # its all-reduce over replicas, in flight
        self.landed: Tensor | None = None  # on the tier: the total once it is final
        if tier and self.trained:
            self.landed = tier.zeros(self.shard.shape, self.layout.dtype)
        self.free()

    # --------------------------------------------------------------------------------- parameters

    @torch.no_grad()
    def gather(self, within: Comm | None = None) -> None:
        """Start making the parameters whole; from chunks kept over ``within``, if it is given."""
        if self.is_whole:
            return
        self.is_whole = True
        itemsize = self.whole.element_size()
        self.whole.untyped_storage().resize_(self.layout.padded * itemsize)
        if not self.layout.padded:
            return
        source = self.shard if within is None else self.kept
        assert source is not None
        comm = self.comm if within is None else within
        if comm is None:
            self.whole.copy_(source)
        else:
            self.sent = source.to(self.device, self.whole.dtype, copy=self.is_offloaded)
            self.gathering = comm.all_gather(self.whole, self.sent, async_op=True)
        self.kept = None

    def wait(self) -> None:
        """The parameters are whole on return."""
        if self.gathering is not None:
            self.gathering.wait()
        self.gathering = self.sent = None

    def free(self, within: Comm | None = None) -> None:
        """Drop the whole parameters; keep a chunk of 1/``within.size``, if it is given."""
        if self.is_whole and not self.is_resident:
            self.wait()
            chunks = None if within is None else self.whole.view(within.size, -1)
            self.kept = None if within is None or chunks is None else chunks[within.rank].clone()
            self.whole.untyped_storage().resize_(0)
            self.is_whole = False
        elif within is None:
            self.kept = None

    # ---------------------------------------------------------------------------------- gradients

    def take(self, name: str, gradient: Tensor) -> None:
        """Keep ``gradient`` until it is packed."""
        if name in self.fresh:
            self.pack()
        self.fresh[name] = gradient

    @torch.no_grad()
    def pack(self) -> None:
        """Add what has arrived to this rank's full gradients, and let it go."""
        if not self.fresh:
            return
        if self.full is None:
            self.full = self.layout.empty(self.device, self.reduced_in)
        views = self.layout.views(self.full)
        while self.fresh:
            name, gradient = self.fresh.popitem()
            views[name].add_(gradient) if name in self.filled else views[name].copy_(gradient)
            self.filled.add(name)

    @torch.no_grad()
    def reduce(self) -> Work | None:
        """Start to sum the packed gradients into this rank's shard (zero where there are none)."""
        full = (
            self.full if self.full is not None else self.layout.empty(self.device, self.reduced_in)
        )
        for name, view in self.layout.views(full).items():
            if name not in self.filled:
                view.zero_()
        self.sending, self.full = full, None
        self.filled.clear()
        if self.comm is None or not self.layout.padded:
            self.reduced = full
            return None
        self.reduced = full.new_empty(self.layout.shard_numel)
        work: Work = self.comm.reduce_scatter(self.reduced, full, async_op=True)
        return work

    @torch.no_grad()
    def land(self) -> None:
        """The reduction is complete: add its result to the total, free the full gradients."""
        assert self.reduced is not None
        if self.total is None:
            self.total = self.reduced.to(self.layout.dtype)
        else:
            self.total += self.reduced
        self.reduced = self.sending = None

    @torch.no_grad()
    def cross(self, replicas: Comm) -> None:
        """Start to sum the total over ranks that hold the same shard."""
        assert self.total is not None
        self.total = self.total.to(self.reduced_in)
        if self.layout.padded:
            self.crossing = replicas.all_reduce(self.total, async_op=True)

    def settle(self) -> None:
        """The total is final on return, and where its shard rests."""
        if self.crossing is not None:
            self.crossing.wait()
            self.crossing = None
        if self.total is not None:
            self.total = self.total.to(self.layout.dtype)
            if self.landed is not None:
                self.total = self.landed.copy_(self.total)

    def hand_over(self, used: Mapping[str, bool]) -> None:
        """Give the optimizer's targets their gradients, none to what no rank used."""
        for name, target in self.targets.items():
            target.grad = None
            if used[name]:
                assert self.total is not None
                target.grad = self.parts[name].of_shard(self.total).to(target.device)

    def clear(self) -> None:
        """Drop all gradients."""
        self.total = self.full = None
        self.fresh.clear()
        self.filled.clear()
        for target in self.targets.values():
            target.grad = None


class Unit:
    """A module and its flat shards; ``number`` is its place in the list of units."""

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        named: Mapping[str, nn.Parameter],
        comm: Comm | None,
        precision: Precision,
        tier: HostTier | None = None,
    ) -> None:
        self.number, self.name, self.module = number, name, module
        kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for key, parameter in named.items():
            kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[key] = parameter
        self.flats = [FlatShard(same, comm, precision, tier) for same in kinds.values()]
        self.trained = [flat for flat in self.flats if flat.trained]
        self.forget()

    def forget(self) -> None:
        """A new round: the unit has not been called."""
        self.pending = 0  # calls whose backward has not passed the unit's inputs
        self.open_ended = False  # whether some call had no input that needs a gradient
        self.missing = {name for flat in self.trained for name in flat.layout.names}

    @property
    def is_whole(self) -> bool:
        """Whether all of its parameters are gathered, or being gathered."""
        return all(flat.is_whole for flat in self.flats)

    @property
    def is_chunked(self) -> bool:
        """Whether it keeps chunks of a sharding over fewer ranks."""
        return any(flat.kept is not None for flat in self.flats)

    def gather(self, within: Comm | None = None) -> None:
        """Start to gather all parameters."""
        for flat in self.flats:
            flat.gather(within)

    def wait(self) -> None:
        """Wait for the gather in flight."""
        for flat in self.flats:
            flat.wait()

    def free(self, within: Comm | None = None) -> None:
        """Free all parameters."""
        for flat in self.flats:
            flat.free(within)

    def pack(self) -> None:
        """Bring together the gradients that have arrived."""
        for flat in self.trained:
            flat.pack()

    def reduce(self) -> list[Work]:
        """Start to reduce what is trained and packed."""
        works = [flat.reduce() for flat in self.trained]
        return [work for work in works if work is not None]


def tensors_in(value: object) -> Iterable[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
