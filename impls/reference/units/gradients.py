"""Gradients of a unit: whole during its backward, then a shard of their sum over the ranks.

    state           this rank holds                                         left by
    absent          nothing: no backward of this step has reached the unit  arrive, or reduce
    arriving        gradients as backward made them, one by one             pack
    packed          one flat tensor of its own gradients; the others freed  reduce, or arrive
    reducing        that tensor, which a reduce-scatter reads; its result   accumulate
    accumulated     total [ t_r ]: one shard, summed over ranks and rounds  arrive or reduce (next
                                                                            round), or the last two
    over replicas   total, which an all-reduce over the replicas changes    finalize
    final           total, which the optimizer reads                        clear

A rank without a micro-batch reduces zeros: it goes from *absent* to *reducing* at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work
from shardproof.impls.reference.units.states import Stateful


class GradientState(Enum):
    """The progress of a unit's gradients in this step."""

    #: Nothing has arrived since the last step ended.
    ABSENT = "absent"
    #: Some lie as backward made them, one tensor a parameter.
    ARRIVING = "arriving"
    #: All that arrived lie in one flat tensor, not yet sent.
    PACKED = "packed"
    #: A reduce-scatter reads the flat tensor: nothing may be added to it.
    REDUCING = "reducing"
    #: The result was added to this rank's shard of the total; whole gradients are gone.
    ACCUMULATED = "accumulated"
    #: An all-reduce sums the total over the replicas: nothing may be added to it any more.
    OVER_REPLICAS = "summed over replicas"
    #: The total is the step's gradient; the optimizer reads it.
    FINAL = "final"


class Gradients(Stateful[GradientState]):
    """Gradients of one dtype, laid out by ``layout``, summed over ``comm`` (``None``: one rank).

    They are reduced in ``reduced_in``, and added up over the rounds in the dtype as built.  The
    final total rests in ``rest``, a tensor in host memory, where one is given.
    """

    what = "gradients"
    following: ClassVar[Mapping[Enum, tuple[Enum, ...]]] = {
        GradientState.ABSENT: (
            GradientState.ARRIVING,
            GradientState.REDUCING,
            GradientState.FINAL,  # no rank has called the unit
            GradientState.ABSENT,
        ),
        GradientState.ARRIVING: (GradientState.ARRIVING, GradientState.PACKED),
        GradientState.PACKED: (GradientState.ARRIVING, GradientState.REDUCING),
        GradientState.REDUCING: (GradientState.ACCUMULATED,),
        GradientState.ACCUMULATED: (
            GradientState.ARRIVING,
            GradientState.REDUCING,
            GradientState.OVER_REPLICAS,
            GradientState.FINAL,  # there are no replicas
        ),
        GradientState.OVER_REPLICAS: (GradientState.FINAL,),
        GradientState.FINAL: (GradientState.ABSENT,),
    }

    def __init__(
        self,
        layout: FlatLayout,
        comm: Comm | None,
        reduced_in: torch.dtype,
        device: torch.device,
        rest: Tensor | None = None,
    ) -> None:
        self.layout, self.comm = layout, comm
        self.reduced_in, self.device, self.rest = reduced_in, device, rest
        self.arrived: dict[str, Tensor] = {}  # as backward made them
        self.packed: Tensor | None = None  # this rank's own, (layout.padded_numel,)
        self.filled: set[str] = set()  # what of it is set
        self.sending: Tensor | None = None  # what the reduce-scatter reads
        self.sum: Tensor | None = None  # what it writes, (layout.shard_numel,)
        self.total: Tensor | None = None  # the sum over ranks and rounds, (layout.shard_numel,)
        self.work: Work | None = None  # the collective under way
        self.state = GradientState.ABSENT

    def arrive(self, name: str, gradient: Tensor) -> None:
        """Keep ``gradient`` in the form that backward made until it is packed."""
        if name in self.arrived:
            self.pack()  # a later micro-batch: two gradients of one parameter need one place
        self.enter(GradientState.ARRIVING)
        self.arrived[name] = gradient

    @torch.no_grad()
    def pack(self) -> None:
        """Add arrived gradients to this rank's flat gradients and free them."""
        if not self.arrived:
            return
        self.enter(GradientState.PACKED)
        if self.packed is None:
            self.packed = self.layout.empty(self.device, self.reduced_in)
        while self.arrived:
            # One by one, each freed before the next is copied: never two copies of all.
            name, gradient = self.arrived.popitem()
            view = self.layout.view(self.packed, name)
            view.add_(gradient) if name in self.filled else view.copy_(gradient)
            self.filled.add(name)

    @torch.no_grad()
    def reduce(self, reducer: Reducer, step: int) -> None:
        """Start to sum the packed gradients (zero if there are none) into this rank's shard."""
        self.enter(GradientState.REDUCING)
        whole = self.packed
        if whole is None:
            whole = self.layout.empty(self.device, self.reduced_in)
        for name, view in self.layout.views(whole).items():
            if name not in self.filled:
                view.zero_()
        self.sending, self.packed = whole, None
        self.filled.clear()
        if self.comm is None or not self.layout.padded_numel:
            self.sum = whole
        else:
            self.sum = whole.new_empty(self.layout.shard_numel)
            bucket = Bucket(whole, self.layout.whole, step)
            self.work = reducer.reduce_scatter(bucket, self.comm, self.sum)

    @torch.no_grad()
    def wait_and_accumulate(self) -> None:
        """Wait for the reduction, add its result to the total, and free the whole gradients."""
        self.enter(GradientState.ACCUMULATED)
        if self.work is not None:
            self.work.wait()
        assert self.sum is not None
        if self.total is None:
            self.total = self.sum.to(self.layout.dtype)
        else:
            self.total += self.sum
        self.sum = self.sending = self.work = None

    @torch.no_grad()
    def reduce_over_replicas(self, replicas: Comm, reducer: Reducer, step: int) -> None:
        """Start to sum the total over ranks with the same shard; it is complete."""
        self.enter(GradientState.OVER_REPLICAS)
        assert self.total is not None
        self.total = self.total.to(self.reduced_in)
        if self.layout.padded_numel:
            rank = self.comm.rank if self.comm else 0
            bucket = Bucket(self.total, tuple(self.layout.parts(rank)), step)
            self.work = reducer.all_reduce(bucket, replicas)

    def finalize(self) -> None:
        """Make the total the step's gradient, in its resting place."""
        self.enter(GradientState.FINAL)
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.total is not None:
            self.total = self.total.to(self.layout.dtype)
            if self.rest is not None:
                self.total = self.rest.copy_(self.total)

    def clear(self) -> None:
        """Drop the total at the end of a step."""
        self.enter(GradientState.ABSENT)
        self.total = None
