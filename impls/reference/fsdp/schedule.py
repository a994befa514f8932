"""When FSDP gathers, frees and reduces a unit; and the options that decide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from shardproof.comm import Comm
from shardproof.contract import Refused
from shardproof.impls.reference.engine.offload import HostTier
from shardproof.impls.reference.engine.options import Training, at_least
from shardproof.impls.reference.units.handle import WrappedHandle
from shardproof.impls.reference.units.plan import UnitPlan, Wrap
from shardproof.impls.reference.units.shard import Unit


@dataclass(frozen=True)
class Options(Training):
    """``reshard_after_forward``: what happens to parameters between forward and backward.

    ``true``: freed; ``false``: kept; an integer k: sharded over k neighbours; ``null``: as the
    strategy says.  The others: see the package's docstring.
    """

    wrap: Wrap = field(default_factory=Wrap)
    sharding_strategy: Literal["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"] = (
        "FULL_SHARD"
    )
    reshard_after_forward: bool | int | None = None
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    accumulate_without_communication: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("prefetch_forward", self.prefetch_forward, 0)
        at_least("prefetch_backward", self.prefetch_backward, 0)
        strategy, reshard = self.sharding_strategy, self.reshard_after_forward
        told = f"option 'reshard_after_forward' = {reshard} contradicts sharding_strategy"
        if strategy == "NO_SHARD" and self.offload != "none":
            raise Refused(
                f"option 'offload' = {self.offload!r} contradicts sharding_strategy NO_SHARD: "
                "every rank would keep a whole copy on the host; valid here: none"
            )
        if strategy == "NO_SHARD" and reshard is not None:
            raise Refused(f"{told} NO_SHARD, which has nothing to reshard; valid here: null")
        if strategy == "SHARD_GRAD_OP" and reshard not in (None, False):
            raise Refused(f"{told} SHARD_GRAD_OP, which keeps parameters; valid here: false, null")
        if strategy == "FULL_SHARD" and reshard is False:
            raise Refused(f"{told} FULL_SHARD: SHARD_GRAD_OP is the strategy that keeps parameters")
        if self.chunk_ranks is not None:
            at_least("reshard_after_forward", self.chunk_ranks, 2)

    @property
    def chunk_ranks(self) -> int | None:
        """The k of an integer ``reshard_after_forward``."""
        reshard = self.reshard_after_forward
        return None if reshard is None or isinstance(reshard, bool) else reshard

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay whole between forward and backward."""
        if self.reshard_after_forward is None:
            return self.sharding_strategy in ("NO_SHARD", "SHARD_GRAD_OP")
        return self.reshard_after_forward is False


class FSDP(WrappedHandle):
    """The handle: the schedule of calls."""

    def __init__(
        self,
        module: nn.Module,
        comms: Mapping[str, Comm],
        plan: Sequence[UnitPlan],
        options: Options,
        tier: HostTier | None = None,
        chunks: Comm | None = None,
    ) -> None:
        super().__init__(module, comms, plan, options.precision, tier, chunks)
        self.options = options
        self.order: list[Unit] = []  # that of the forward under way
        self.last_order: list[Unit] = []  # that of the forward before
        self.way_back: list[Unit] = []  # units in the order in which their forwards ended
        self.owed: set[Unit] = set()  # units whose gradients wait for the last round

    def accumulate(self, is_last: bool) -> None:
        """A new forward begins."""
        super().accumulate(is_last)
        self.last_order, self.order, self.way_back = self.order, [], []

    @property
    def is_silent(self) -> bool:
        """Whether gradients stay where they are in this round."""
        return self.options.accumulate_without_communication and not self.rounds.is_last

    def before_forward(self, unit: Unit, again: bool) -> None:
        """Gather the unit, wait for it, start to gather those that came next last time."""
        self.gather(unit)
        unit.wait()
        if again:
            return
        self.order.append(unit)
        count = len(self.order)
        if self.order == self.last_order[:count]:
            for following in self.last_order[count : count + self.options.prefetch_forward]:
                self.gather(following)

    def after_forward(self, unit: Unit, again: bool) -> None:
        """Free the unit, unless its backward follows at once or it is to be kept."""
        if again:
            return
        if not torch.is_grad_enabled():
            unit.free()
            return
        if unit is not self.root and not self.options.keeps_parameters:
            unit.free(self.chunks)
        if unit in self.way_back:
            self.way_back.remove(unit)
        self.way_back.append(unit)

    def before_backward(self, unit: Unit) -> None:
        """Gather the unit, wait for it, start to gather those whose backwards come next."""
        if unit is self.root:
            self.land()  # what the round before left under way
        self.gather(unit)
        unit.wait()
        if unit in self.way_back:
            del self.way_back[self.way_back.index(unit) :]
        for preceding in self.way_back[: -1 - self.options.prefetch_backward : -1]:
            self.gather(preceding)

    def after_backward(self, unit: Unit) -> None:
        """Free the parameters, send the gradients or keep them."""
        if not (self.is_silent and self.options.keeps_parameters):
            unit.free()
        if self.is_silent:
            unit.pack()
            self.owed.add(unit)
        else:
            self.owed.discard(unit)
            self.reduce(unit)

    def leave_round(self) -> None:
        """In the last round: send what units that it did not call had kept."""
        if self.rounds.is_last:
            for unit in self.units:
                if unit in self.owed:
                    self.reduce(unit)
            self.owed.clear()

    def rest(self) -> None:
        """After a round: free whatever is whole, unless the next round needs it."""
        keeps = self.is_silent and self.options.keeps_parameters and torch.is_grad_enabled()
        if not keeps:
            super().rest()
