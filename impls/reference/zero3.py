"""ZeRO-3: parameters are sharded too; a unit is whole only while it computes.

Problem.  Under ZeRO-2 every rank still holds all parameters, though at any moment it computes with
those of one layer.  So each rank keeps 1/N of every unit; the unit is gathered right before its
forward and freed after it, gathered again before its backward and freed after that.  To keep the
network busy while a unit computes, the next one is gathered meanwhile.

    what                        where
    parameters, gradients,      one shard of each unit on every rank
      optimizer state
    whole parameters            the root unit, the unit that computes and the next one
    whole gradients             the unit whose backward runs and the one that is being reduced
    buffers                     every rank its own

    step     before_step         how many rounds? the most micro-batches of any rank
             forward             [1] gather 0 [2] gather 1 | compute 0, [3] free 0 | ...
             backward            [4] gather 2 [5] gather 1 | compute 2, [6] free 2, [7] reduce 2 |
                                 gather 0 | compute 1, free 1, wait 2, add to its shard,
                                 reduce 1 ...
             finish              rounds that other ranks still have, with zeros; who used what
             clip, update        own shards only; the norm is a sum over ranks

Units (units/plan.py) are the model's blocks unless ``wrap`` says otherwise; the root unit holds the
rest.  It runs while the others do: it is gathered first and freed last, once in forward and once in
backward.  Forward is expected to go as the forward before, which is why the first one prefetches
nothing; backward goes through the units of its own forward in reverse (units/order.py).

This is FSDP's FULL_SHARD with a prefetch of one unit, written out, but for the root, which FSDP
keeps from forward to backward.  Read next: units/wrapped.py, which makes the calls;
units/parameters.py and units/gradients.py, what becomes of a unit.

Cost: floating-point bytes sent a step, over all N ranks, with m micro-batches on the busiest rank:
m (N-1) (2 padded parameter bytes + padded gradient bytes), summed over all units, root and frozen
parameters included (frozen ones have no gradient): ZeRO, arXiv 1910.02054, section VII-B.  A layout
is a unit's parameters of one dtype, trained or frozen, padded to a multiple of N elements; it is
gathered in ``precision.parameters`` and reduced in ``precision.reduce``.  Calls a rank: 2 m
all-gathers of each layout, m reduce-scatters of each trained one; none if N = 1.  With clipping one
float64 is all-reduced.  A module called c times in a forward is gathered c + 1 times.
Memory: (P + G + O)/N with padding, and what the table names.
Numbers: summed over ranks first, over micro-batches then; equal to one device's up to that order.
Parameters with strides of their own become contiguous: their products may be rounded otherwise.
Models that do not fit on one rank are built on ``meta`` (units/meta.py).
Left out: units that only some ranks call, optimizers that are not element-wise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Kind
from shardproof.impls.reference.engine.choices import (
    FORMATS,
    Compressing,
    Followed,
    OfShards,
    Reduction,
    Saved,
    Training,
    declared,
    lossy,
)
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import PLAIN, Comms, Context, Handle
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.state import gather_pieces
from shardproof.impls.reference.units.plan import Wrap, plan_units
from shardproof.impls.reference.units.shard import ShardedUnit
from shardproof.impls.reference.units.wrapped import DECLINES, WrappedModel


@dataclass(frozen=True)
class Options(OfShards, Training, Compressing, Followed, Saved):
    """``wrap`` says which modules are units."""

    wrap: Wrap = field(default_factory=Wrap)

    @property
    def reduction(self) -> Reduction:
        """Into shards, in every round."""
        return Reduction(scattered=True, each_round=True)


def apply(module: nn.Module, comms: Comms, options: Options, context: Context = PLAIN) -> Zero3:
    """Shard ``module`` over ``comms["shard"]``, from rank 0's values."""
    plan = plan_units(module, options.wrap, context.blocks)
    return Zero3(module, comms, plan, options.precision, context)


class Zero3(WrappedModel):
    """The handle: when units are gathered, freed and reduced."""

    def before_forward(self, unit: ShardedUnit, again: bool) -> None:
        """Gather the unit, wait for it, and prefetch the unit that followed it last time."""
        self.gather(unit)  # [1]
        unit.wait()
        if again:
            return  # backward is under way, and gathers ahead by its own order
        for following in self.order.forward_begins(unit, ahead=1):
            self.gather(following)  # [2]

    def after_forward(self, unit: ShardedUnit, again: bool) -> None:
        """Free the unit, unless its backward follows at once."""
        if not again:
            unit.free()  # [3]
            self.order.forward_ends(unit)

    def before_backward(self, unit: ShardedUnit) -> None:
        """Gather the unit, wait for it, and prefetch the unit before it."""
        if unit is self.root:
            # What the round before left under way: its whole gradients go before new ones come.
            self.wait_and_accumulate()
        self.gather(unit)  # [4]
        unit.wait()
        for preceding in self.order.backward_begins(unit, ahead=1):
            self.gather(preceding)  # [5]

    def after_backward(self, unit: ShardedUnit) -> None:
        """Free the parameters and send the gradients."""
        # First, so that whole parameters and packed gradients never lie side by side.
        unit.free()  # [6]
        self.reduce(unit)  # [7]


class ReferenceZero3(Engine):
    """The strategy as a system under test."""

    strategy = "zero3"
    depth = "layout"
    options_type = Options
    handle_type: type[Zero3] = Zero3
    materializes = True

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities that the ``zero3`` profile requires."""
        chosen = parse_options(Options, options)
        sharded = ("sharded_optimizer", "sharded_gradients", "sharded_parameters")
        declines = chosen.wrap.declines | DECLINES
        exact = declared(
            "overlap", *sharded, axes=("shard",), declines=declines, checkpoints=FORMATS
        )
        return lossy(exact, chosen)

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the handle along the shard axis."""
        chosen = parse_options(Options, options)
        plan = plan_units(module, chosen.wrap, self.build.units)
        comms = {"shard": mesh.comm("shard")}
        return self.handle_type(module, comms, plan, chosen.precision, self.context(chosen))

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Whole tensors, gathered from all ranks."""
        return gather_pieces(self.local_state(kind), self.mesh.comm("shard"))


IMPLEMENTATION = ReferenceZero3
