"""A model in sharded units that are gathered and freed: the common handle of ZeRO-3 and FSDP.

It makes the collective calls, and says how ranks without work take part in them.  *When* units are
gathered, freed and reduced is for the strategy to say, in ``before_forward``, ``after_forward``,
``before_backward`` and ``after_backward``.

    a round    a rank with a micro-batch              a rank without
               announce(GATHER, 1)   gather 1         hears it   gather 1, free 1
               announce(REDUCE, 1)   reduce 1         hears it   reduce zeros
               announce(END)                          hears it   next round
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from shardproof.comm import Comm
from shardproof.impls.reference.engine.handle import PLAIN, Context, T
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.engine.state import (
    SECOND_DERIVATIVE,
    refuse_second_derivatives,
)
from shardproof.impls.reference.units.events import Listener, UnitEvents
from shardproof.impls.reference.units.gradients import GradientState
from shardproof.impls.reference.units.model import ShardedModel
from shardproof.impls.reference.units.order import CallOrder
from shardproof.impls.reference.units.plan import UnitPlan
from shardproof.impls.reference.units.rounds import END
from shardproof.impls.reference.units.shard import FlatShard, ShardedUnit

#: What is announced: a kind of call times the number of units, plus the unit's number, plus 1.
GATHER, GATHER_CHUNKS, REDUCE = range(3)


#: What strategies that shard parameters decline, and why.
DECLINES = {
    SECOND_DERIVATIVE: "the parameters of a unit are gathered for one forward and one backward only"
}


class WrappedModel(ShardedModel, Listener):
    """Units that are gathered, freed and reduced during a forward or backward.

    ``chunks`` is a group of neighbours along the shard axis that parameters may stay sharded over
    between forward and backward; its size divides that of the axis.
    """

    events_type: type[UnitEvents] = UnitEvents

    def __init__(
        self,
        module: nn.Module,
        comms: Mapping[str, Comm],
        plan: Sequence[UnitPlan],
        precision: Precision,
        context: Context = PLAIN,
        chunks: Comm | None = None,
    ) -> None:
        refuse_second_derivatives(
            module,
            "sharded parameters",
            DECLINES[SECOND_DERIVATIVE],
            "use a strategy that keeps parameters whole (ddp, zero1, zero2)",
        )
        super().__init__(module, comms, plan, precision, context)
        self.chunks = chunks
        self.events = self.events_type(self.units, self)
        named = dict(module.named_parameters())
        for unit in self.units:
            for flat in unit.trained:
                for name in flat.layout.names:
                    self.events.watch(unit, flat, name, named[name])
        self.computing = False  # whether a round of this rank's own is under way
        #: Units whose reduction is under way, and whether its round is the last.
        self.in_flight: list[tuple[ShardedUnit, bool]] = []
        self.order = CallOrder()

    @property
    def root(self) -> ShardedUnit:
        """The unit of the whole module."""
        return self.units[0]

    # ------------------------------------------------------------------------------------- calls

    def gather(self, unit: ShardedUnit) -> None:
        """Start to gather ``unit`` unless it is whole; all ranks make the same calls in the same
        order.
        """
        if unit.is_whole:
            return
        chunks = self.chunks if unit.is_chunked else None
        self.announce(GATHER if chunks is None else GATHER_CHUNKS, unit)
        unit.gather(chunks)

    def reduce(self, unit: ShardedUnit) -> None:
        """Start to reduce the gradients of ``unit``."""
        if unit.trained:
            self.announce(REDUCE, unit)
            self.start_reduction(unit)

    def announce(self, call: int, unit: ShardedUnit) -> None:
        """Announce the next call to idle ranks."""
        self.settle()
        self.rounds.announce(1 + call * len(self.units) + unit.number)

    def settle(self) -> None:
        """In a round with idle ranks, wait for pending calls before each announcement.

        Over send and recv it moves only while all ranks wait for it, and ranks that compute also
        wait where the others have nothing to wait for, but listen (before the root's backward).
        """
        if not self.rounds.all_compute:
            flats = [flat for unit in self.units for flat in unit.flats]
            works = [work for f in flats for work in (f.parameters.work, f.gradients.work)]
            self.reducer.settle([work for work in works if work is not None])

    def start_reduction(self, unit: ShardedUnit) -> None:
        """Start a reduction; only one is in flight, in addition to the root's, the last of a
        round.
        """
        to_replicas = self.rounds.is_last and self.replicas is not None
        is_under_way = any(unit is other for other, _ in self.in_flight)
        # Waiting here, not at once, lets the reduction before run beside the backward of this unit;
        # not later, for its whole gradients would pile up.  The root comes right after another
        # unit, so it goes beside it, unless the shards are to go on to the replicas by now.
        if to_replicas or unit is not self.root or is_under_way:
            self.wait_and_accumulate()
        unit.pack()
        for flat in unit.trained:
            self.used |= flat.gradients.filled
        unit.reduce(self.reducer, self.step)
        self.in_flight.append((unit, self.rounds.is_last))
        sends = any(flat.gradients.work is not None for flat in unit.trained)
        if to_replicas and (unit is self.root or not sends):
            # No later reduction of this backward would do it, or nothing was sent to wait for: so
            # that the sum over the replicas begins in backward, too.
            self.wait_and_accumulate()

    def wait_and_accumulate(self) -> None:
        """Wait for pending reductions; in the last round, send their shards to the replicas."""
        for unit, is_last in self.in_flight:
            for flat in unit.trained:
                flat.gradients.wait_and_accumulate()
                # Not before: sums of a single round would go over the replicas once per round.
                if is_last:
                    self.reduce_over_replicas(flat)
        self.in_flight.clear()

    def gradient_arrived(self, flat: FlatShard, name: str, gradient: Tensor) -> None:
        """Keep the gradient; a pending reduction of the last round must be complete before."""
        if flat.gradients.state is GradientState.REDUCING:
            # A loss that takes the parameter itself, before its backward reaches the root.
            self.wait_and_accumulate()
        flat.gradients.arrive(name, gradient)

    # ------------------------------------------------------------------------------------- a step

    def before_step(self, micro_batches: int) -> None:
        """Agree on the rounds."""
        self.rounds.begin(micro_batches)

    def accumulate(self, is_last: bool) -> None:
        """Start a round for the micro-batch."""
        self.end_round()
        self.rounds.next()
        self.order.start_round()
        self.computing = True

    def end_round(self) -> None:
        """End the current round, if any."""
        if self.computing:
            self.events.end_round()
            self.leave_round()
            self.free_all()
            # Last: a rank that hears it goes on to the next round, and would miss what came later.
            self.settle()
            self.rounds.announce(END)
            self.computing = False

    def leave_round(self) -> None:
        """Make the last calls of a round in which this rank computes."""

    def free_all(self) -> None:
        """After a round, free all whole units and chunks."""
        for unit in self.units:
            unit.free()

    def hear(self) -> int:
        """The announcements of the working ranks."""
        self.settle()
        return self.rounds.hear()

    def idle_rounds(self) -> None:
        """Follow the others through the rounds in which this rank has no micro-batch."""
        self.end_round()
        while self.rounds.next():
            while call := self.hear():
                kind, number = divmod(call - 1, len(self.units))
                unit = self.units[number]
                if kind == REDUCE:
                    self.start_reduction(unit)
                else:
                    # It computes nothing with it, but the others cannot gather without its shard.
                    # As theirs, its chunk stays from forward to backward.
                    chunks = self.chunks if kind == GATHER_CHUNKS else None
                    unit.gather(chunks)
                    unit.free(None if chunks else self.chunks)
            self.free_all()

    def finish(self) -> None:
        """Join the remaining rounds of the others; agree on which ranks used what."""
        self.idle_rounds()
        self.wait_and_accumulate()
        self.publish_gradients()

    def evaluate(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run forwards only; their number may differ between ranks."""
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
    def after_backward(self, unit: ShardedUnit) -> None:
        """Parameters are no longer needed, and gradients are complete."""
