"""The schedule of FSDP's gathers, frees and reductions, and the options that control it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from shardproof.comm import Comm
from shardproof.contract import Refused
from shardproof.impls.reference.engine.choices import (
    Compressing,
    Followed,
    OfShards,
    OfWholes,
    Reduction,
    Saved,
    Training,
)
from shardproof.impls.reference.engine.handle import PLAIN, Context
from shardproof.impls.reference.engine.options import at_least
from shardproof.impls.reference.units.plan import UnitPlan, Wrap
from shardproof.impls.reference.units.shard import ShardedUnit
from shardproof.impls.reference.units.wrapped import WrappedModel


@dataclass(frozen=True)
class Options(OfShards, OfWholes, Training, Compressing, Followed, Saved):
    """``reshard_after_forward``: the layout of parameters between forward and backward.

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
        refusal = f"option 'reshard_after_forward' = {reshard} contradicts sharding_strategy"
        if strategy == "NO_SHARD" and self.offload != "none":
            raise Refused(
                f"option 'offload' = {self.offload!r} contradicts sharding_strategy NO_SHARD: "
                "every rank would keep a whole copy on the host; set offload to 'none'"
            )
        if strategy == "NO_SHARD" and reshard is not None:
            raise Refused(
                f"{refusal} NO_SHARD, which has nothing to reshard; set reshard_after_forward "
                "to null"
            )
        if strategy == "SHARD_GRAD_OP" and reshard not in (None, False):
            raise Refused(
                f"{refusal} SHARD_GRAD_OP, which keeps whole parameters after forward; set "
                "reshard_after_forward to false or null"
            )
        if strategy == "FULL_SHARD" and reshard is False:
            raise Refused(
                f"{refusal} FULL_SHARD, which frees whole parameters after forward; to keep whole "
                "parameters, use SHARD_GRAD_OP"
            )
        if self.chunk_ranks is not None:
            at_least("reshard_after_forward", self.chunk_ranks, 2)

    @property
    def reduction(self) -> Reduction:
        """Into shards in every round, or in the last round if configured; whole for NO_SHARD."""
        scattered = self.sharding_strategy != "NO_SHARD"
        return Reduction(scattered, scattered and not self.accumulate_without_communication)

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


class FSDP(WrappedModel):
    """The handle: the schedule of calls."""

    def __init__(
        self,
        module: nn.Module,
        comms: Mapping[str, Comm],
        plan: Sequence[UnitPlan],
        options: Options,
        context: Context = PLAIN,
        chunks: Comm | None = None,
    ) -> None:
        super().__init__(module, comms, plan, options.precision, context, chunks)
        self.options = options
        self.unreduced: set[ShardedUnit] = set()  # their gradients wait for the last round

    def before_step(self, micro_batches: int) -> None:
        """Agree on the rounds; clear the record of a rank that was idle in the last round."""
        super().before_step(micro_batches)
        self.unreduced.clear()

    @property
    def is_silent(self) -> bool:
        """Whether gradients stay local in this round."""
        return self.options.accumulate_without_communication and not self.rounds.is_last

    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        """Gather the unit, wait for it, and prefetch the units that followed it last time."""
        self.gather(unit)
        unit.wait()
        if again:
            return  # backward is under way, and gathers ahead by its own order
        for following in self.order.forward_begins(unit, self.options.prefetch_forward):
            self.gather(following)

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        """Free the unit, unless its backward follows at once or the options keep it."""
        if again:
            return
        if not torch.is_grad_enabled():
            unit.free()  # no backward will come that could use what is kept
            return
        # The root ends last in forward and begins first in backward: freed, it would be gathered
        # again at once.
        if unit is not self.root and not self.options.keeps_parameters:
            unit.free(self.chunks)
        self.order.forward_ends(unit)

    def before_backward(self, unit: ShardedUnit) -> None:
        """Gather the unit, wait for it, and prefetch the units whose backwards come next."""
        if unit is self.root:
            # What the round before left under way: its whole gradients go before new ones come.
            self.wait_and_accumulate()
        self.gather(unit)
        unit.wait()
        for preceding in self.order.backward_begins(unit, self.options.prefetch_backward):
            self.gather(preceding)

    def after_backward(self, unit: ShardedUnit) -> None:
        """Free the parameters; send the gradients or keep them."""
        if not (self.is_silent and self.options.keeps_parameters):
            unit.free()
        if self.is_silent:
            unit.pack()  # or the gradients of every round would lie side by side
            self.unreduced.add(unit)
        else:
            self.unreduced.discard(unit)
            self.reduce(unit)

    def leave_round(self) -> None:
        """In the last round, reduce units that this round did not call but whose gradients were
        kept.
        """
        if self.rounds.is_last:
            # In the order of the list, which is the same on all ranks; that of a set is not.
            for unit in self.units:
                if unit in self.unreduced:
                    self.reduce(unit)

    def free_all(self) -> None:
        """After a round, free all whole units, unless the next round needs them."""
        keeps = self.is_silent and self.options.keeps_parameters and torch.is_grad_enabled()
        if not keeps:
            super().free_all()
