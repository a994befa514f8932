"""Parts of an engine that are imported when they are first asked for.

Most runs neither save, nor compress, nor scale their loss.  What names such a part as ``late`` does
not load its module, and a reader of a strategy need not open it.  Ask for a part when a system is
set up or first saves, never in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardproof.contract import Implementation

if TYPE_CHECKING:
    from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
    from shardproof.impls.reference.engine.averages import Averages
    from shardproof.impls.reference.engine.masters import Masters
    from shardproof.impls.reference.engine.offload import HostMemory
    from shardproof.impls.reference.engine.recompute import Call
    from shardproof.impls.reference.engine.scaler import LossScaler
    from shardproof.impls.reference.engine.summing import Summing
    from shardproof.impls.reference.engine.terms import Terms

T_co = TypeVar("T_co", covariant=True)


class late(Generic[T_co]):
    """Stands for what the decorated method returns; a subclass may assign a plain value instead."""

    def __init__(self, find: Callable[[Any], T_co]) -> None:
        self.find = find
        self.__doc__ = find.__doc__

    def __get__(self, instance: object, owner: type) -> T_co:
        return self.find(owner)


class LateParts(Implementation):
    """What an engine is built of where options, the optimizer or a save ask for it."""

    @late
    def checkpointing_type(cls) -> type[Checkpointing]:
        """Saves and loads."""
        from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing

        return Checkpointing

    @late
    def summing_type(cls) -> type[Summing]:
        """Makes reducers other than the backend's own collectives."""
        from shardproof.impls.reference.engine.summing import Summing

        return Summing

    @late
    def call_type(cls) -> type[Call]:
        """Repeats the forward of units, in backward."""
        from shardproof.impls.reference.engine.recompute import Call

        return Call

    @late
    def scaler_type(cls) -> type[LossScaler]:
        """Scales the loss."""
        from shardproof.impls.reference.engine.scaler import LossScaler

        return LossScaler

    @late
    def averages_type(cls) -> type[Averages]:
        """Averages what the optimizer updates."""
        from shardproof.impls.reference.engine.averages import Averages

        return Averages

    @late
    def terms_type(cls) -> type[Terms]:
        """Adds loss terms that span micro-batches."""
        from shardproof.impls.reference.engine.terms import Terms

        return Terms

    @late
    def masters_type(cls) -> type[Masters]:
        """Is updated by the optimizer in place of narrow tensors."""
        from shardproof.impls.reference.engine.masters import Masters

        return Masters

    @late
    def host_type(cls) -> type[HostMemory]:
        """Holds state that does not rest on the device."""
        from shardproof.impls.reference.engine.offload import HostMemory

        return HostMemory
