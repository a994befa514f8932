"""Parts of an engine that are imported on first use.

Most runs neither save, nor compress, nor scale their loss.  What names such a part as ``late`` does
not load its module, and a reader of a strategy need not open it.  Ask for a part when a system is
set up or first saves, never in a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shardproof.comm import Mesh
from shardproof.contract import Implementation, Kind, OptimizerSpec, Piece
from shardproof.impls.reference.engine.choices import Followed
from shardproof.impls.reference.engine.optimizer import set_weight_decay

if TYPE_CHECKING:
    from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
    from shardproof.impls.reference.engine.averages import Averages
    from shardproof.impls.reference.engine.masters import Masters
    from shardproof.impls.reference.engine.offload import HostMemory
    from shardproof.impls.reference.engine.own_loop import OwnLoop
    from shardproof.impls.reference.engine.recompute import Call
    from shardproof.impls.reference.engine.scaler import LossScaler
    from shardproof.impls.reference.engine.summing import Summing
    from shardproof.impls.reference.engine.terms import Terms

T_co = TypeVar("T_co", covariant=True)


class late(Generic[T_co]):
    """A placeholder for the decorated method's result; a subclass may assign a plain value
    instead.
    """

    def __init__(self, find: Callable[[Any], T_co]) -> None:
        self.find = find
        self.__doc__ = find.__doc__

    def __get__(self, instance: object, owner: type) -> T_co:
        return self.find(owner)


class LateParts(Implementation):
    """The parts of an engine that options, the optimizer or a save may need."""

    @late
    def checkpointing_type(cls) -> type[Checkpointing]:
        """The part that saves and loads."""
        from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing

        return Checkpointing

    @late
    def summing_type(cls) -> type[Summing]:
        """The part that makes reducers other than the backend's own collectives."""
        from shardproof.impls.reference.engine.summing import Summing

        return Summing

    @late
    def call_type(cls) -> type[Call]:
        """The part that repeats the forward of units in backward."""
        from shardproof.impls.reference.engine.recompute import Call

        return Call

    @late
    def scaler_type(cls) -> type[LossScaler]:
        """The part that scales the loss."""
        from shardproof.impls.reference.engine.scaler import LossScaler

        return LossScaler

    @late
    def averages_type(cls) -> type[Averages]:
        """The part that averages the updated parameters."""
        from shardproof.impls.reference.engine.averages import Averages

        return Averages

    @late
    def terms_type(cls) -> type[Terms]:
        """The part that adds loss terms over several micro-batches."""
        from shardproof.impls.reference.engine.terms import Terms

        return Terms

    @late
    def masters_type(cls) -> type[Masters]:
        """The part that the optimizer updates in place of narrow tensors."""
        from shardproof.impls.reference.engine.masters import Masters

        return Masters

    @late
    def host_type(cls) -> type[HostMemory]:
        """The part that holds state outside the device."""
        from shardproof.impls.reference.engine.offload import HostMemory

        return HostMemory

    @late
    def own_loop_type(cls) -> type[OwnLoop]:
        """Lets a loop of the user's own drive the strategy."""
        from shardproof.impls.reference.engine.own_loop import OwnLoop

        return OwnLoop

    #: Whether a model on ``meta`` gets its values unit by unit.
    materializes = False

    def needs_own_step(self) -> str:
        """Why forward and backward cannot be called from outside; empty: they can."""
        return ""


class Following(LateParts):
    """State of an engine that follows training: averages, and a schedule of weight decay."""

    mesh: Mesh
    spec: OptimizerSpec
    optimizer: torch.optim.Optimizer
    steps_done: int

    def begin_following(self, options: object, groups: Sequence[Mapping[str, Any]]) -> None:
        """Start as ``options`` say, for the tensors that the optimizer updates."""
        self.followed = options if isinstance(options, Followed) else Followed()
        self.averages: Averages | None = None
        if self.followed.average:
            self.averages = self.averages_type(groups, self.followed.average)

    def set_decay(self, step: int) -> None:
        """Set the weight decay of ``step``, if it changes."""
        if self.followed.decay_rate != 1:
            set_weight_decay(self.optimizer, self.decay_at(step))

    def decay_at(self, step: int) -> float:
        """The weight decay of ``step`` for groups without their own."""
        return self.spec.weight_decay * self.followed.decay_rate**step

    def extra_state(self) -> list[Piece]:
        """Averages, and the weight decay of the last update."""
        pieces = self.held_pieces("extra")
        found = [replace(p, name=f"average.{p.name.rpartition('.')[0]}") for p in pieces]
        if self.followed.decay_rate != 1:
            last = max(0, self.steps_done - 1)
            decay = torch.tensor(self.decay_at(last), dtype=torch.float64)
            found.append(Piece.whole("optimizer.weight_decay", decay, replica=self.mesh.rank))
        return found

    def saved_pieces(self, kind: Kind) -> list[Piece]:
        """The pieces of ``kind`` in a checkpoint: averages are saved like the optimizer's slots."""
        more = self.held_pieces("extra") if kind == "optimizer" else []
        return self.held_pieces(kind) + more

    @abstractmethod
    def held_pieces(self, kind: Kind) -> list[Piece]:
        """The engine's pieces; of kind ``extra``, averages as slots of their parameters."""
