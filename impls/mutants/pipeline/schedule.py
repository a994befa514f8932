"""Faults of schedules: orders that cannot run, that do not match their name, or that are not
executed.

The first are found as data, before any rank is started.  Those of the run leave every number right,
or nearly so: only what was logged, and what was held, shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardproof.contract import Batch, MicroBatch, Observe, Point, StepResult
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.pipeline.pipeline import LOOPED, SPLIT, gpt
from shardproof.impls.reference.pipeline import ReferencePipeline
from shardproof.impls.reference.pipeline.executor import Executor, Held
from shardproof.impls.reference.pipeline.schedules import SCHEDULES
from shardproof.schedules import Action, Schedule, with_messages

GPIPE: Mapping[str, Any] = {"schedule": "gpipe"}
mutant = declare.family(
    ReferencePipeline, workload=gpt(), mesh={"pipe": 2}, killed_by=("schedule",)
)

#: Changes an order in place.
Change = Callable[[list[Action]], None]


class Spoilt(ReferencePipeline):
    """The parent's schedule after ``spoil`` has changed the order of one rank in place."""

    rank: ClassVar[int] = 0
    spoil: ClassVar[Change]

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        """The changed schedule."""
        schedule = super().schedule(options, ranks, micro_batches)
        order = list(schedule.orders[cls.rank])
        cls.spoil(order)
        orders = (*schedule.orders[: cls.rank], tuple(order), *schedule.orders[cls.rank + 1 :])
        return replace(schedule, orders=orders)


def exchange(one: str, other: str) -> Change:
    """Swap two actions."""

    def change(order: list[Action]) -> None:
        i, j = order.index(Action.parse(one)), order.index(Action.parse(other))
        order[i], order[j] = order[j], order[i]

    return change


def move(one: str, behind: str = "") -> Change:
    """Move an action right behind another, or to the front."""

    def change(order: list[Action]) -> None:
        action = Action.parse(one)
        order.remove(action)
        order.insert(order.index(Action.parse(behind)) + 1 if behind else 0, action)

    return change


def drop(one: str) -> Change:
    """Remove an action."""
    return lambda order: order.remove(Action.parse(one))


def repeat(one: str) -> Change:
    """Append a second copy of an action."""
    return lambda order: order.append(Action.parse(one))


# ---------------------------------------------------------------------------- orders without a run


@mutant("schedule_swaps_two_sends", says="message 0 .*receiver's turn", zoo=("P14",))
class SwapsTwoSends(Spoilt):
    """The first two activations are sent in the wrong order."""

    spoil = move("SF0@0", "SF1@0")


@mutant(
    "schedule_posts_receives_in_another_order",
    says="message 0 .*receiver's turn",
    zoo=("P14",),
    options=GPIPE,
)
class PostsReceivesInAnotherOrder(Spoilt):
    """The second activation is received first."""

    rank = 1
    spoil = move("RF1@1")


@mutant("schedule_forgets_a_gradient", says="never does RB")
class ForgetsAGradient(Spoilt):
    """One gradient is neither sent nor received."""

    spoil = drop("RB2@0")


@mutant(
    "schedule_forgets_receive_after_warm_up", says="never does RF", zoo=("P16",), mesh={"pipe": 3}
)
class ForgetsReceiveAfterWarmUp(Spoilt):
    """A middle stage leaves its warm-up without receiving an input."""

    rank = 1
    spoil = drop("RF1@1")


@mutant("schedule_drops_last_weights", says="never does W3", options=SPLIT)
class DropsLastWeights(Spoilt):
    """The weight-gradient action of a stage's last backward is missing from the schedule."""

    rank = 1
    spoil = drop("W3@1")


@mutant("schedule_weights_before_their_gradient", says="W2@0 before B2@0", options=SPLIT)
class WeightsBeforeTheirGradient(Spoilt):
    """The weight-gradient action of a backward comes before its input-gradient action."""

    spoil = exchange("B2@0", "W2@0")


@mutant("schedule_repeats_a_backward", says="BW3@1 2 times")
class RepeatsABackward(Spoilt):
    """One micro-batch runs backward twice."""

    rank = 1
    spoil = repeat("BW3@1")


@mutant("schedule_waits_in_a_circle", says="deadlock", zoo=("P14",))
class WaitsInACircle(ReferencePipeline):
    """The last stage starts with a micro-batch that the first stage holds back."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        schedule = super().schedule(options, ranks, micro_batches)
        orders = [list(schedule.computed(rank)) for rank in range(ranks)]
        move("F1@0", "BW0@0")(orders[0])
        for op in ("F", "BW"):
            exchange(f"{op}0@1", f"{op}1@1")(orders[1])
        return with_messages(replace(schedule, orders=tuple(map(tuple, orders))))


def in_turn(rank: int, micro_batches: int, warm_up: int) -> list[Action]:
    """``warm_up`` forwards, then forwards and backwards alternately, then the remaining
    backwards.
    """
    order = [Action("F", rank, micro) for micro in range(warm_up)]
    for micro in range(micro_batches):
        order += [Action("F", rank, warm_up + micro)] * (warm_up + micro < micro_batches)
        order.append(Action("BW", rank, micro))
    return order


class OtherWarmUp(ReferencePipeline):
    """1F1B with a wrong number of warm-up forwards."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        """The alternating forwards and backwards of every rank."""
        orders = tuple(
            tuple(in_turn(rank, micro_batches, cls.warm_up(ranks, rank, micro_batches)))
            for rank in range(ranks)
        )
        return with_messages(Schedule("1f1b", micro_batches, tuple(range(ranks)), orders))

    @classmethod
    def warm_up(cls, ranks: int, rank: int, micro_batches: int) -> int:
        """The number of warm-up forwards."""
        raise NotImplementedError


@mutant(
    "schedule_warm_up_is_not_clamped",
    says="F1@0, but there are .* 1 micro-batch",
    zoo=("P13",),
    workload=gpt(micro_batches=1),
    mesh={"pipe": 3},
)
class WarmUpIsNotClamped(OtherWarmUp):
    """With fewer micro-batches than stages, a rank's warm-up includes micro-batches that do not
    exist.
    """

    @classmethod
    def warm_up(cls, ranks: int, rank: int, micro_batches: int) -> int:
        return ranks - 1 - rank


# ------------------------------------------------------------------------ not what the name says


@mutant("schedule_warms_up_once_too_often", says="holds up to 3 micro-batches")
class WarmsUpOnceTooOften(OtherWarmUp):
    """1F1B with one more warm-up forward: every rank holds one micro-batch more."""

    @classmethod
    def warm_up(cls, ranks: int, rank: int, micro_batches: int) -> int:
        return min(micro_batches, ranks - rank)


@mutant("schedule_does_not_warm_up", says="bubble")
class DoesNotWarmUp(OtherWarmUp):
    """Every micro-batch goes through all stages and back before the next one starts."""

    @classmethod
    def warm_up(cls, ranks: int, rank: int, micro_batches: int) -> int:
        return 0


@mutant("schedule_interleaves_nothing", says="places stages on ranks", options=LOOPED)
class InterleavesNothing(ReferencePipeline):
    """Every rank has one chunk although two are requested: the bubble of 1F1B."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        return SCHEDULES["interleaved"](ranks, micro_batches, chunks=1)


@mutant("schedule_puts_weights_last", says="bubble", options=SPLIT)
class PutsWeightsLast(ReferencePipeline):
    """Zero bubble with all weight gradients at the end: they fill no bubble and hold all memory."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        schedule = super().schedule(options, ranks, micro_batches)
        orders = (sorted(schedule.computed(r), key=lambda a: a.op == "W") for r in range(ranks))
        return with_messages(replace(schedule, orders=tuple(map(tuple, orders))))


# ------------------------------------------------------------------------------ not what is run


@mutant("schedule_runs_another_one", says="does F2@0 .* where 1f1b has BW0@0")
class RunsAnotherOne(Executor):
    """1F1B is announced, but GPipe runs."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        if schedule.name == "1f1b":
            schedule = SCHEDULES["gpipe"](schedule.ranks, len(window))
        return super().run(schedule, window, *rest)


@mutant(
    "schedule_forgets_itself_in_second_window",
    says="window 1: .* where 1f1b",
    workload=gpt(windows=2, micro_batches=3),
)
class ForgetsItselfInSecondWindow(ReferencePipeline):
    """From the second schedule call of a step, all forwards come first."""

    def backward(self, batch: Batch) -> Tensor | None:
        first, *others = batch.windows
        loss = super().backward(replace(batch, windows=(first,)))
        self.given = {"schedule": "gpipe"}
        rest = super().backward(replace(batch, windows=tuple(others)))
        self.given = self.case_options
        return None if loss is None or rest is None else loss + rest

    def setup(self, *given: Any) -> None:
        super().setup(*given)
        self.case_options = self.given


@mutant("schedule_swaps_backwards_of_first_stage", says="BW1@0 .* has BW0@0", options=GPIPE)
class SwapsBackwardsOfFirstStage(Executor):
    """The first stage, whose gradients no other stage needs, runs two backwards in swapped
    order.
    """

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        order = list(schedule.orders[0])
        if schedule.name == "gpipe":
            exchange("BW0@0", "BW1@0")(order)
            for message in ("RB0@0", "RB1@0"):
                order.remove(Action.parse(message))
                order.insert(order.index(Action("BW", 0, 1)), Action.parse(message))
        return super().run(
            replace(schedule, orders=(tuple(order), *schedule.orders[1:])), window, *rest
        )


@mutant(
    "schedule_weights_after_final_gradients",
    says="not over when gradients are reported as final",
    killed_by=("schedule", "equivalence"),
    options=SPLIT,
)
class WeightsAfterFinalGradients(ReferencePipeline):
    """The last weight gradients of every stage are computed after the gradients were observed."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        executor, late = self.executor, list[tuple[Action, Any]]()
        at_once = executor.do["W"]

        def put_off(action: Action) -> None:
            if action in executor.final:
                late.append((action, executor.held.pop(action[1:])))
            else:
                at_once(action)

        def look(point: Point) -> None:
            observe(point)
            for action, held in late:
                executor.held[action[1:]] = held
                at_once(action)
            late.clear()

        executor.do["W"] = put_off
        try:
            return super().step(batch, look)
        finally:
            executor.do["W"] = at_once


@mutant("schedule_splits_nothing", says="activations at the peak", options=SPLIT, mesh={"pipe": 3})
class SplitsNothing(Executor):
    """B also computes the gradients of weights; W does nothing."""

    def backward(self, action: Action) -> None:
        super().backward(action)
        self.held[action.stage, action.micro].backward()  # type: ignore[union-attr]


@mutant("schedule_keeps_activations", says="activations at the peak")
class KeepsActivations(Executor):
    """Saved activations of a micro-batch are kept until its window ends."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        self.kept: list[Held] = []
        losses = super().run(schedule, window, *rest)
        self.kept.clear()
        return losses

    def output_gradient(self, action: Action, held: Held) -> Tensor:
        gradient = super().output_gradient(action, held)
        with torch.enable_grad():
            self.kept.append(replace(held, output=self.stages[action.stage].module(held.entered)))
        return gradient


@mutant("schedule_keeps_inputs_only", says="activations at the peak")
class KeepsInputsOnly(Executor):
    """A forward discards its activations, and backward recomputes them."""

    def forward(self, action: Action) -> None:
        super().forward(action)
        held = self.held.get((action.stage, action.micro))
        if isinstance(held, Held):
            held.output = held.output.detach()

    def output_gradient(self, action: Action, held: Held) -> Tensor:
        _, stage, micro = action
        held.output = self.stages[stage].module(held.entered)
        if stage == self.last:
            held.output = self.loss(held.output, self.window[micro])
        return super().output_gradient(action, held)


@mutant("schedule_computes_forwards_twice", says="runs forward of .* 2 times")
class ComputesForwardsTwice(Executor):
    """Every forward runs once more to find the shape of its output."""

    def forward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        module = stage.module
        stage.module = lambda given: (module(given), module(given))[1]  # type: ignore[assignment]
        super().forward(action)
        stage.module = module


# ------------------------------------------------------------------------- messages between stages


@mutant(
    "schedule_keeps_an_input_too_long",
    says="boundary tensors alive when .*the activation of micro-batch",
)
class KeepsAnInputTooLong(Executor):
    """A stage frees a received activation only in the backward of the next micro-batch."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        self.kept: Tensor | None = None
        losses = super().run(schedule, window, *rest)
        self.kept = None
        return losses

    def backward(self, action: Action) -> None:
        held: Any = self.held[action[1:]]
        entered = held.entered
        del held
        super().backward(action)
        self.kept = entered


@mutant("schedule_waits_before_forwards", says="bubble is .* rank 0 waits for RB0@0 before F1@0")
class WaitsBeforeForwards(Executor):
    """A stage waits for the next gradient before a forward that is scheduled earlier."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        orders = [list(order) for order in schedule.orders]
        for order in orders:
            for at in [n for n, action in enumerate(order) if action.op == "RB"]:
                if [action.op for action in order[at - 2 : at]] == ["F", "SF"]:
                    order.insert(at - 2, order.pop(at))
        return super().run(replace(schedule, orders=tuple(map(tuple, orders))), window, *rest)

    def receive(self, action: Action) -> None:
        super().receive(action)
        if action.op == "RB" and action in self.messages.posted:
            self.messages.posted[action][0].wait()
