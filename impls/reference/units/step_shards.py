"""Parameters that are sharded between steps and whole during one: ZeRO-3's state with two calls per
unit.

A stage of a pipeline computes forwards and backwards of many micro-batches in turn.  Gathering its
parameters for each of them would cost more than the pipeline saves.  So all units are gathered when
a step begins and freed when it ends, and gradients are reduced once.

    what                            where
    parameters, gradients,          between steps one shard of each unit on every rank of the shard
      optimizer state               axis, the same on every replica
    whole parameters and gradients  during a step

    step     before_step    gather all units
             backwards      gradients add up in the flat tensor of their unit
             finish         unit by unit: free, reduce-scatter, all-reduce over replicas;
                            who used what (integers)

Cost: floating-point bytes sent a step, over F shards and R replicas, whatever the micro-batches:
R (F-1) (padded parameter bytes + padded gradient bytes) + 2 (R-1) padded gradient bytes.  Memory:
(P + G + O)/F between steps, whole parameters and gradients of all units besides during one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardproof.impls.reference.engine.choices import Training
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, T
from shardproof.impls.reference.units.model import ShardedModel
from shardproof.impls.reference.units.plan import UnitPlan
from shardproof.impls.reference.units.shard import FlatShard


def apply(
    module: nn.Module, comms: Comms, options: Training, context: Context = PLAIN
) -> StepShards:
    """Shard ``module`` over ``comms["shard"]`` as one unit that is gathered and freed once per
    step.
    """
    whole = UnitPlan("", tuple(name for name, _ in module.named_parameters()))
    return StepShards(module, comms, [whole], options.precision, context)


class StepShards(ShardedModel):
    """The handle. Ranks without micro-batches make the same calls as the others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        named = dict(self.module.named_parameters())
        self.hooks = [
            named[name].register_post_accumulate_grad_hook(partial(self.arrived, flat, name))
            for flat in self.trained
            for name in flat.layout.names
        ]

    def arrived(self, flat: FlatShard, name: str, parameter: Tensor) -> None:
        """Hook: move the gradient to its unit."""
        assert parameter.grad is not None
        flat.gradients.arrive(name, parameter.grad)
        parameter.grad = None
        # At once: kept as backward made them, those of the next micro-batch would be a second copy.
        flat.gradients.pack()

    def before_step(self, micro_batches: int) -> None:
        """Make every unit whole."""
        # All gathers start before any is waited for, so that they run side by side.
        for unit in self.units:
            unit.gather()
        for unit in self.units:
            unit.wait()

    def finish(self) -> None:
        """Reduce once and free all units."""
        for unit in self.units:
            unit.free()  # first: the sum takes less than the whole parameters did
            for flat in unit.trained:
                self.used |= flat.gradients.filled
            unit.reduce(self.reducer, self.step)
            for flat in unit.trained:
                # At once: whole gradients of one unit after the other go, not of all together.
                flat.gradients.wait_and_accumulate()
        self.publish_gradients()

    def evaluate(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Keep units whole during all ``passes``."""
        self.before_step(len(passes))
        try:
            return super().evaluate(passes)
        finally:
            for unit in self.units:
                unit.free()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
