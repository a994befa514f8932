"""Runs any schedule of a pipeline over this rank's stages.

Problem.  GPipe, 1F1B, interleaving and zero bubble differ in the order in which a rank computes,
and in nothing else.  So an order is data (``schedules.py``), and one loop carries it out:
:meth:`Executor.run`, where the picture of it is.

    what                    lives
    input, output, graph    from F to its BW, or B
    small graphs of owners  from F to W (split_backward.py)
    what was sent           until a message that depends on it comes back

Only F, B and BW wait, each for its own message; sends are waited for at the end of the window.
``accumulate`` of a stage's handle is called right before the action that makes gradients of its
weights, so that a strategy of the data axes can reduce during the last of them, and
``backward_ended`` right after it, so that no rank of a data axis waits for the next message.

Cost: an activation and a gradient for each micro-batch and boundary between ranks: 2 m b s h bytes
of values (Narayanan et al., arXiv 2104.04473, section 2.2.2: interleaving sends as often as there
are chunks).
Numbers: in the order of the schedule; all generators take a stage's micro-batches in ascending
order, which is the order in which one process accumulates.
Left out: a collective for batches of messages; buffers that are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.contract import MicroBatch, Refused
from shardproof.impls.reference.pipeline.messages import Key, Messages
from shardproof.impls.reference.pipeline.schedules import proofs
from shardproof.impls.reference.pipeline.split_backward import Deferred
from shardproof.impls.reference.pipeline.stages import Stage
from shardproof.schedules import Action, Schedule, with_messages

Trace = Callable[[Action], AbstractContextManager[Any]]


@dataclass
class Held:
    """State of a micro-batch that a stage keeps for its backward; ``entered`` is its input."""

    entered: Tensor
    output: Tensor
    deferred: Deferred | None


class Executor:
    """Execute windows of micro-batches, forward and backward, on one rank.

    ``enter`` makes the first stage's input of a micro-batch's, ``loss`` a scalar of the last
    stage's output; ``trace`` is entered around every computation.
    """

    messages_type: type[Messages] = Messages

    def __init__(
        self,
        comm: Comm,
        stages: Mapping[int, Stage],
        place: Sequence[int],
        enter: Callable[[Tensor], Tensor],
        loss: Callable[[Tensor, MicroBatch], Tensor],
        trace: Trace,
    ) -> None:
        self.comm, self.stages, self.place = comm, stages, place
        self.enter, self.loss, self.trace = enter, loss, trace
        self.last = len(place) - 1
        self.messages = self.messages_type(comm)
        parts = [part for stage in stages.values() for part in stage.module.modules()]
        spans = (vars(part).get("span") for part in parts)
        self.spans = [*{id(span): span for span in spans if span is not None}.values()]
        self.do: dict[str, Callable[[Action], None]] = {
            **dict.fromkeys(("SF", "SB"), self.send),
            **dict.fromkeys(("RF", "RB"), self.receive),
            **dict.fromkeys(("B", "BW"), self.backward),
            "F": self.forward,
            "W": self.weights,
        }

    def run(
        self,
        schedule: Schedule,
        window: Sequence[MicroBatch],
        is_last: bool = True,
        scale: float = 1.0,
    ) -> list[Tensor]:
        """Run this rank's part of ``schedule`` over ``window``; the window may be the step's last.

        Losses are multiplied by ``scale`` for backward.  Returns them as they are, by micro-batch,
        where the last stage lies; nothing on the other ranks.
        """
        # 1F1B on two ranks, three micro-batches (F2: forward of micro-batch 2), "." being idle:
        #
        #     time     0    1    2    3    4    5    6    7
        #     rank 0   F0   F1   .    BW0  F2   BW1  .    BW2
        #     rank 1   .    F0   BW0  F1   BW1  F2   BW2  .
        #
        # Rank 0's list, with its messages: F0 SF0 F1 SF1 RB0 BW0 F2 SF2 RB1 BW1 RB2 BW2.
        #
        #     action   waits for                    does                         leaves
        #     F        the stage's input            forward; last stage: loss    output, for SF
        #     BW       the gradient of its output   backward                     gradient of the
        #                                                                        input, for SB
        #     B        as BW                        as BW, but for the weights   as BW; W's part
        #     W        nothing                      gradients of the weights
        #     SF, SB   nothing                      starts to send
        #     RF, RB   nothing                      posts into a fresh buffer    what F or BW awaits
        #
        # Between two stages of one rank nothing is sent: the second takes what the first leaves.
        self.window: Sequence[MicroBatch] = window
        self.scale = scale
        self.held: dict[tuple[int, int], Held | Deferred] = {}
        self.ready: dict[Action, Tensor] = {}  # by the receive that is waiting for it
        self.losses: dict[int, Tensor] = {}
        order = schedule.orders[self.comm.rank]
        self.messages.proved = proofs(schedule, self.comm.rank)
        self.apart = {(stage, micro) for op, stage, micro in order if op == "W"}
        # The last action that makes gradients of a stage's weights: a dictionary keeps the last.
        final = {action.stage: action for action in order if action.op in ("W", "BW")}
        self.final = set(final.values()) if is_last else set()
        for action in order:
            self.do[action.op](action)
        # Only now: ranks that each wait for their own send to arrive could wait in a circle.
        self.messages.finish()
        self.window = ()
        losses, self.losses = self.losses, {}
        return [losses[micro] for micro in sorted(losses)]

    @torch.no_grad()
    def evaluate(self, window: Sequence[MicroBatch]) -> list[Tensor]:
        """Run only forwards, one micro-batch after another; losses as in :meth:`run`."""
        return self.run(forwards(self.place, self.comm.size, len(window)), window)

    # --------------------------------------------------------------------------------- computations

    def begin(self, micro: MicroBatch) -> None:
        """Note where documents begin, for stages that do not see the inputs.

        A strategy that cuts positions assigns its own.
        """
        for span in self.spans:
            span.read(micro.inputs)

    def forward(self, action: Action) -> None:
        """F: compute, and keep the state for backward."""
        _, stage, micro = action
        self.begin(self.window[micro])
        own, entered = self.stages[stage], self.stage_input(action)
        with self.trace(action), self.deferring(action) as deferred:
            output = own.module(entered)
            if stage == self.last:
                output = self.loss(output, self.window[micro])
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise Refused(
                f"axis 'pipe': stage {stage} returned a {kind}, but a stage must return one tensor"
            )
        if stage == self.last:
            self.losses[micro] = output.detach()
        else:
            # Detached: the graph must die with what backward holds, not with the message.
            self.ready[Action("RF", stage + 1, micro)] = output.detach()
        if torch.is_grad_enabled():
            self.held[stage, micro] = Held(entered, output, deferred)

    def deferring(self, action: Action) -> AbstractContextManager[Deferred | None]:
        """Detach weights from the graph if their gradients are computed separately."""
        split = self.stages[action.stage].split
        if split is None or action[1:] not in self.apart:
            return nullcontext()
        return split.deferring()

    def stage_input(self, action: Action) -> Tensor:
        """The input of a forward: the micro-batch's, or the output of the previous stage."""
        _, stage, micro = action
        if stage == 0:
            return self.enter(self.window[micro].inputs)
        activation = self.from_stage(Action("RF", stage, micro), stage - 1)
        # A leaf: backward ends here, and what it leaves in `grad` goes to the stage before.
        return activation.requires_grad_(torch.is_grad_enabled())

    def from_stage(self, message: Action, source: int) -> Tensor:
        """The output of stage ``source``, or the gradient of its input, from any rank."""
        if self.place[source] == self.comm.rank:
            return self.ready.pop(message)
        return self.messages.take(message, self.place[source])

    def backward(self, action: Action) -> None:
        """B or BW: gradients of the input, without or with those of the weights."""
        op, stage, micro = action
        held = self.held.pop((stage, micro))
        assert isinstance(held, Held)
        gradient = self.output_gradient(action, held)
        if op == "BW":
            # Before the backward, whose hooks may then send gradients.
            self.stages[stage].handle.accumulate(action in self.final)
        with self.trace(action):
            if held.output.requires_grad:
                torch.autograd.backward(held.output, gradient)
        if stage:
            # The stage before expects a message even where the stage made no use of its input.
            entered = held.entered.grad
            entered = torch.zeros_like(held.entered) if entered is None else entered
            self.ready[Action("RB", stage - 1, micro)] = entered.detach()
        if op == "BW":
            self.stages[stage].handle.backward_ended()
        if op == "B":
            assert held.deferred is not None
            self.held[stage, micro] = held.deferred

    def output_gradient(self, action: Action, held: Held) -> Tensor:
        """The gradient of a stage's output: from the loss, or from the next stage."""
        _, stage, micro = action
        if stage == self.last:
            return torch.full_like(held.output, self.scale)
        return self.from_stage(Action("RB", stage, micro), stage + 1)

    def weights(self, action: Action) -> None:
        """W: gradients of the weights; afterwards no state of the micro-batch remains."""
        _, stage, micro = action
        deferred = self.held.pop((stage, micro))
        assert isinstance(deferred, Deferred)
        self.stages[stage].handle.accumulate(action in self.final)
        with self.trace(action):
            deferred.backward()
        self.stages[stage].handle.backward_ended()

    # ------------------------------------------------------------------------------------- messages

    def send(self, action: Action) -> None:
        """SF, SB: send the result to the neighbour's rank."""
        op, stage, micro = action
        goal = stage + 1 if op == "SF" else stage - 1
        message = Action("R" + op[1], goal, micro)
        tensor = self.ready.pop(message)
        self.messages.send(message, self.key(message), tensor, self.place[goal])

    def receive(self, action: Action) -> None:
        """RF, RB: post the receive."""
        op, stage, _ = action
        source = self.place[stage - 1 if op == "RF" else stage + 1]
        self.messages.post(action, self.key(action), source)

    def key(self, message: Action) -> Key:
        """The boundary that ``message`` crosses, and the shape of its micro-batch's inputs."""
        op, stage, micro = message
        return stage - 1 if op == "RF" else stage, tuple(self.window[micro].inputs.shape)


def forwards(place: Sequence[int], ranks: int, micro_batches: int) -> Schedule:
    """Every stage's forward of one micro-batch after the other."""
    orders = tuple(
        tuple(
            Action("F", stage, micro)
            for micro in range(micro_batches)
            for stage, own in enumerate(place)
            if own == rank
        )
        for rank in range(ranks)
    )
    return with_messages(Schedule("forwards", micro_batches, tuple(place), orders))
