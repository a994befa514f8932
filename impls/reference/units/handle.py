"""A model in sharded units: the handle that ZeRO-3 and FSDP have in common.

It knows which calls are made and how ranks without work take part.  *When* units are gathered,
freed and reduced is the strategy's business.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from shardproof.comm import Comm
from shardproof.impls.reference.engine.handle import T
from shardproof.impls.reference.engine.offload import HostTier
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.parts.reducers import Work
from shardproof.impls.reference.units.events import Listener, UnitEvents
from shardproof.impls.reference.units.plan import UnitPlan
from shardproof.impls.reference.units.rounds import END
from shardproof.impls.reference.units.shard import Unit
from shardproof.impls.reference.units.sharded import ShardedUnits

#: What is announced: a kind of call times the number of units, plus the unit's number, plus 1.
GATHER, GATHER_CHUNKS, REDUCE = range(3)


class WrappedHandle(ShardedUnits, Listener):
    """Units that are gathered, freed and reduced while a forward or backward runs.

    ``chunks`` is a group of neighbours along the shard axis that parameters may stay sharded over
    between forward and backward; its size divides that of the axis.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Mapping[str, Comm],
        plan: Sequence[UnitPlan],
        precision: Precision,
        tier: HostTier | None = None,
        chunks: Comm | None = None,
    ) -> None:
        super().__init__(module, comms, plan, precision, tier)
        self.chunks = chunks
        self.events = UnitEvents(self.units, self)
        named = dict(module.named_parameters())
        for unit in self.units:
            for flat in unit.trained:
                for name in flat.layout.names:
                    self.events.watch(unit, flat, name, named[name])
        self.computing = False  # whether a round of this rank's own is under way
        #: Reductions under way, and whether their round is the last.
        self.flying: list[tuple[Unit, list[Work], bool]] = []

    @property
    def root(self) -> Unit:
        """The unit that is the whole module."""
        return self.units[0]

    # ------------------------------------------------------------------------------------- calls

    def gather(self, unit: Unit) -> None:
        """Start to make ``unit`` whole, unless it is; all ranks call alike and in one order."""
        if unit.is_whole:
            return
        chunks = self.chunks if unit.is_chunked else None
        self.announce(GATHER if chunks is None else GATHER_CHUNKS, unit)
        unit.gather(chunks)

    def reduce(self, unit: Unit) -> None:
        """Start to reduce the gradients of ``unit``."""
        if unit.trained:
            self.announce(REDUCE, unit)
            self.start_reduction(unit)

    def announce(self, call: int, unit: Unit) -> None:
        """Tell idle ranks."""
        self.rounds.announce(1 + call * len(self.units) + unit.number)

    def start_reduction(self, unit: Unit) -> None:
        """One reduction at a time is under way, and the root's, which is the last of a round."""
        crosses = self.rounds.is_last and self.replicas is not None
        if crosses or unit is not self.root or any(unit is other for other, *_ in self.flying):
            self.land()
        unit.pack()
        for flat in unit.trained:
            self.used |= flat.filled
        works = unit.reduce()
        self.flying.append((unit, works, self.rounds.is_last))
        if crosses and (unit is self.root or not works):
            self.land()  # so that its way over the replicas begins in backward, too

    def land(self) -> None:
        """Wait for reductions under way; in the last round their shards go to the replicas."""
        for unit, works, last in self.flying:
            for work in works:
                work.wait()
            for flat in unit.trained:
                flat.land()
                if last:
                    self.cross(flat)
        self.flying.clear()

    # ------------------------------------------------------------------------------------- a step

    def before_step(self, micro_batches: int) -> None:
        """Agree on the rounds."""
        self.rounds.begin(micro_batches)

    def accumulate(self, is_last: bool) -> None:
        """Every micro-batch is a round."""
        self.end_round()
        self.rounds.next()
        self.computing = True

    def end_round(self) -> None:
        """End the round under way, if there is one."""
        if self.computing:
            self.events.end_round()
            self.leave_round()
            self.rest()
            self.rounds.announce(END)
            self.computing = False

    def leave_round(self) -> None:
        """The last calls of a round of this rank's own."""

    def rest(self) -> None:
        """After a round: free whatever is whole."""
        for unit in self.units:
            unit.free()

    def idle_rounds(self) -> None:
        """Follow the others through the rounds in which this rank has no micro-batch."""
        self.end_round()
        while self.rounds.next():
            while call := self.rounds.hear():
                kind, number = divmod(call - 1, len(self.units))
                unit = self.units[number]
                if kind == REDUCE:
                    self.start_reduction(unit)
                else:
                    unit.gather(self.chunks if kind == GATHER_CHUNKS else None)
                    unit.free(self.chunks)
            self.rest()

    def finish(self) -> None:
        """Take part in what the others still have; agree on who used what."""
        self.idle_rounds()
        self.land()
        self.hand_over()

    def evaluate(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Forwards only; their number may differ between ranks here as well."""
        self.before_step(len(passes))
        losses = []
        for compute in passes:
            self.accumulate(is_last=False)
            losses.append(compute())
        self.idle_rounds()
        return losses

    def close(self) -> None:
        """Remove the hooks."""
        self.events.close()

    # ------------------------------------------------------------------------------- the schedule

    @abstractmethod
    def after_backward(self, unit: Unit) -> None:
        """Parameters are no longer needed; gradients are complete."""
