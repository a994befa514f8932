"""Faults of the pipeline: scales, messages, labels, ties, schedules, and state after evaluation.

Two to four stages; the schedule is the one that shows the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import Batch, MicroBatch, OptimizerSpec, ScalerSpec
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, gpts, overflows_here, own_parts
from shardproof.impls.reference.engine.handle import Handle
from shardproof.impls.reference.engine.norm import NormPart
from shardproof.impls.reference.engine.scaler import LossScaler
from shardproof.impls.reference.pipeline import ReferencePipeline
from shardproof.impls.reference.pipeline.executor import Executor, Held
from shardproof.impls.reference.pipeline.messages import Key, Messages
from shardproof.impls.reference.pipeline.split_backward import SplitBackward
from shardproof.impls.reference.pipeline.stages import Stages, Tied
from shardproof.schedules import Action, Schedule, with_messages

LOOPED: Mapping[str, Any] = {"schedule": {"name": "interleaved", "chunks": 2}}
SPLIT: Mapping[str, Any] = {"schedule": "zb_h1"}
SCALED = OptimizerSpec(scaler=ScalerSpec(initial=1024, interval=2))
#: Four units, four micro-batches of six samples.
gpt = gpts(layers=4, width=16, heads=2, seq=8, micro_batches=4)

WINDOWS = gpt(windows=2, micro_batches=3)
TIED = gpt("tied_over_units")
mutant = declare.family(ReferencePipeline, workload=gpt(), mesh={"pipe": 2})


# ----------------------------------------------------------------------------------------- scales


@mutant(
    "pipeline_rescales_accumulated_gradients",
    says="micro-batch 0 counts 0.3333",
    zoo=("P01",),
    killed_by=("equivalence",),
    workload=WINDOWS,
)
class RescalesAccumulatedGradients(Executor):
    """Every schedule call divides all gradients accumulated so far, not only what it added."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        is_last, scale = rest or (True, 1.0)
        losses = super().run(schedule, window, is_last, scale * len(window))
        for stage in self.stages.values():
            for parameter in stage.module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= len(window)
        return losses


@mutant(
    "pipeline_divides_the_metric_only",
    says="4 times too large .*micro-batches",
    zoo=("P02",),
    killed_by=("equivalence",),
)
class DividesTheMetricOnly(Executor):
    """Losses are divided by the number of micro-batches after backward."""

    def output_gradient(self, action: Action, held: Held) -> Tensor:
        gradient = super().output_gradient(action, held)
        return gradient * len(self.window) if action.stage == self.last else gradient


@mutant(
    "pipeline_scales_inputs_gradients_only",
    says="4 times too small .*micro-batches",
    zoo=("P04",),
    killed_by=("equivalence",),
    options=SPLIT,
)
class ScalesInputsGradientsOnly(Executor):
    """A split backward scales the gradients of weights once more."""

    def weights(self, action: Action) -> None:
        deferred: Any = self.held[action.stage, action.micro]
        deferred.gradients = [gradient / len(self.window) for gradient in deferred.gradients]
        super().weights(action)


@mutant(
    "pipeline_loses_last_split_weights",
    says="micro-batch 3 is missing",
    killed_by=("equivalence",),
    options=SPLIT,
)
class LosesLastSplitWeights(Executor):
    """The weight gradients of the last split backward of a step are missing."""

    def weights(self, action: Action) -> None:
        if action in self.final:
            self.held[action.stage, action.micro].outputs.clear()  # type: ignore[union-attr]
        super().weights(action)


# --------------------------------------------------------------------------------------- messages


@mutant(
    "pipeline_one_receive_buffer",
    says="one buffer|overwritten|every later one is right",
    zoo=("P07",),
    killed_by=("equivalence",),
    options={"schedule": "gpipe"},
)
class OneReceiveBuffer(Messages):
    """All micro-batches are received into one buffer, although earlier ones are still needed."""

    def buffer(self, key: Key) -> Tensor:
        self.kept: dict[Key, Tensor] = getattr(self, "kept", {})
        return self.kept.setdefault(key, super().buffer(key)).data


@mutant(
    "pipeline_uses_activations_early",
    says="nan|not finite",
    zoo=("P16",),
    killed_by=("equivalence",),
    workload=gpt("poisoned_buffers"),
)
class UsesActivationsEarly(Messages):
    """A stage computes with a receive buffer before it is filled."""

    def take(self, receive: Action, peer: int) -> Tensor:
        if receive.op == "RB" or receive.micro == 0:
            return super().take(receive, peer)
        _, buffer = self.posted[receive]
        early = buffer.clone()
        super().take(receive, peer)
        return early


@mutant(
    "pipeline_one_form_for_all_lengths",
    says="send.*recv",
    killed_by=("crash",),
    crash_says="but rank 1 calls recv(from 0",
    workload=gpt("variable_lengths", "unequal_tokens"),
)
class OneFormForAllLengths(Executor):
    """The shape of the first activation is used for all activations."""

    def key(self, message: Action) -> Key:
        return super().key(message)[0], ()


@mutant(
    "pipeline_gradient_of_another_micro_batch",
    says="another micro-batch|every later one is right",
    killed_by=("equivalence",),
    options={"schedule": "gpipe"},
)
class GradientOfAnotherMicroBatch(Executor):
    """With two gradients in flight, a stage takes the earlier one."""

    def output_gradient(self, action: Action, held: Held) -> Tensor:
        gradient = super().output_gradient(action, held)
        self.before, own = getattr(self, "before", gradient), gradient
        gradient, self.before = self.before, own
        return gradient


@mutant(
    "pipeline_activations_carry_an_offset",
    says="'loss' at step 0, forward",
    killed_by=("equivalence",),
    workload=gpt(norm="rms"),
)
class ActivationsCarryAnOffset(Messages):
    """Activations arrive with an offset that is never subtracted; only a layer norm removes it."""

    def take(self, receive: Action, peer: int) -> Tensor:
        tensor = super().take(receive, peer)
        return tensor + 1 if receive.op == "RF" else tensor


@mutant(
    "pipeline_split_backward_of_one_input",
    says="up to 'blocks.3.recurrence.cell.bias' .* every later one is right",
    killed_by=("equivalence",),
    workload=WorkloadSpec(
        "charnames_rnn", micro_batches=4, params={"layers": 4, "width": 16, "seq": 8}
    ),
    options=SPLIT,
)
class SplitBackwardOfOneInput(SplitBackward):
    """A module with two inputs gets a gradient for the first one only: a cell's state is
    detached.
    """

    def forward(self, kind: str, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first, *rest = args
        return super().forward(kind, compute, first, *(v.detach() for v in rest), **kwargs)


# ----------------------------------------------------------------------------- labels and the loss


@mutant(
    "pipeline_labels_of_another_micro_batch",
    says="targets of the next micro-batch",
    zoo=("P08",),
    killed_by=("equivalence",),
)
class LabelsOfAnotherMicroBatch(Executor):
    """The last stage takes the labels of the next micro-batch."""

    def forward(self, action: Action) -> None:
        window = self.window
        if action.stage == self.last:
            self.window = [*window[1:], window[0]]
        super().forward(action)
        self.window = window


@mutant(
    "pipeline_tells_last_window_only",
    says="only the last window",
    killed_by=("equivalence",),
    workload=WINDOWS,
)
class TellsLastWindowOnly(ReferencePipeline):
    """The reported loss covers the last schedule call only."""

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        return super().total(losses[len(losses) // 2 :])


@mutant(
    "pipeline_zero_loss_where_none_is_known",
    says="report different losses for data coordinate 0: 0.0",
    zoo=("P20",),
    killed_by=("equivalence",),
)
class ZeroLossWhereNoneIsKnown(ReferencePipeline):
    """Stages without a loss report zero, and the zero counts."""

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        total = super().total(losses)
        return torch.zeros(()) if total is None else total


# ------------------------------------------------------------------------------------------- ties


@mutant(
    "pipeline_tied_gradient_stays_local",
    says="embed.token.weight.*not summed",
    zoo=("K24",),
    killed_by=("equivalence", "replicas"),
    workload=TIED,
)
class TiedGradientStaysLocal(Stages):
    """Each copy of a tied weight is updated with its own stage's gradient."""

    def sum_tied(self, tied: Tied) -> None:
        tied.ranks = [self.comm.rank]
        super().sum_tied(tied)


@mutant(
    "pipeline_tied_gradient_lost_on_one_rank",
    says="several modules share.*embed.token.weight",
    zoo=("P11",),
    killed_by=("equivalence",),
    workload=TIED,
    options={"schedule": "zb_v"},
)
class TiedGradientLostOnOneRank(Stages):
    """If both uses of a tied weight are on one rank, the second one's gradient is lost."""

    def _hide(self, part: nn.Module, stand_ins: dict[int, nn.Parameter]) -> None:
        copies = {key: nn.Parameter(p.data) for key, p in stand_ins.items()} if self.hidden else {}
        super()._hide(part, copies or stand_ins)


@mutant(
    "pipeline_tied_gradient_added_twice",
    says="several modules share.*embed.token.weight",
    killed_by=("equivalence", "replicas"),
    workload=TIED,
)
class TiedGradientAddedTwice(Stages):
    """A tied weight's own part is added to a sum that already includes it."""

    def sum_tied(self, tied: Tied) -> None:
        own = tied.stand_in.grad
        super().sum_tied(tied)
        if own is not None and tied.tensor.grad is not None:
            tied.tensor.grad += own


@mutant(
    "pipeline_norm_counts_ties_twice",
    says="every copy",
    zoo=("O04",),
    killed_by=("norm", "equivalence"),
    workload=TIED,
    optimizer=CLIP,
)
class NormCountsTiesTwice(Stages):
    """The norm counts a tied weight on every rank that holds it."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        numbers = [tied.copies.number for tied in self.tied]
        for tied in self.tied:
            tied.copies.number = 0
        parts = super().norm_parts(order)
        for tied, number in zip(self.tied, numbers, strict=True):
            tied.copies.number = number
        return parts


@mutant(
    "pipeline_ties_start_apart",
    says="rank 1 starts 'embed.token.weight'",
    zoo=("K24",),
    killed_by=("equivalence", "replicas"),
    workload=TIED,
)
class TiesStartApart(Stages):
    """The last stage's copy of a tied weight starts from its own values."""

    def __init__(self, whole: nn.Module, *rest: Any) -> None:
        super().__init__(whole, *rest)
        for tied in self.tied:
            if tied.copies.number:
                tied.tensor.data.mul_(1.01)


# -------------------------------------------------------------------------------- norm and set-up


@mutant(
    "pipeline_norm_of_one_stage",
    says="holds itself",
    zoo=("O02", "H11"),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class NormOfOneStage(Stages):
    """Every rank clips by the norm of its own stages."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        return own_parts(super().norm_parts(order))


@mutant("pipeline_stages_start_from_their_own", says="rank 1 starts", killed_by=("equivalence",))
class StagesStartFromTheirOwn(Stages):
    """Only the first rank's stages start from the given initial values."""

    def __init__(self, whole: nn.Module, *rest: Any) -> None:
        super().__init__(whole, *rest)
        if self.comm.rank:
            for parameter in self.module.parameters():
                parameter.data.add_(0.01)


# -------------------------------------------------------------------------- schedules, as data


@mutant(
    "pipeline_crosses_messages",
    says="message 0 .* is for .* turn is",
    zoo=("P14",),
    killed_by=("schedule",),
    options=LOOPED,
)
class CrossesMessages(ReferencePipeline):
    """With two chunks, the first two messages of a rank are sent in swapped order."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        good = super().schedule(options, ranks, micro_batches)
        first = list(good.orders[0])
        one, other = (n for n, action in enumerate(first) if action.op == "SF" and n < 4)
        first.insert(other, first.pop(one))
        return replace(good, orders=(tuple(first), *good.orders[1:]))


@mutant(
    "pipeline_puts_all_weights_off",
    says="where zb_h1 has W",
    killed_by=("schedule",),
    options=SPLIT,
)
class PutsAllWeightsOff(Executor):
    """All weight gradients run after everything else, which needs as much memory as GPipe."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        orders = tuple(tuple(sorted(o, key=lambda a: a.op == "W")) for o in schedule.orders)
        return super().run(replace(schedule, orders=orders), window, *rest)


@mutant(
    "pipeline_leaves_out_a_unit",
    says="no rank holds 'blocks.2",
    killed_by=("equivalence", "active"),
    workload=gpt(layers=5),
)
class LeavesOutAUnit(ReferencePipeline):
    """A unit between two stages is assigned to neither."""

    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        (start, stop), *others = self.bounds
        self.bounds = [(start, stop - 1), *others]
        return super().transform(module, mesh, options)


# ----------------------------------------------------------------------------- order and memory


@mutant(
    "pipeline_accumulates_in_descending_order",
    says="reordered summation",
    killed_by=("equivalence",),
    options={"schedule": "gpipe"},
    lane="bitwise",
)
class AccumulatesInDescendingOrder(ReferencePipeline):
    """Backwards run from the last micro-batch to the first."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        return with_messages(
            Schedule(
                "gpipe",
                micro_batches,
                tuple(range(ranks)),
                tuple(
                    tuple(
                        Action(op, rank, micro)
                        for op, step in (("F", 1), ("BW", -1))
                        for micro in range(micro_batches)[::step]
                    )
                    for rank in range(ranks)
                ),
            )
        )


@mutant(
    "pipeline_weights_move_during_the_flush",
    says="other parameters",
    zoo=("P22",),
    killed_by=("equivalence",),
)
class WeightsMoveDuringTheFlush(Executor):
    """After its first backward, a stage uses different weights."""

    def backward(self, action: Action) -> None:
        super().backward(action)
        if action.micro == 0:
            for parameter in self.stages[action.stage].module.parameters():
                parameter.data.mul_(1.01)


@mutant(
    "pipeline_window_with_old_weights",
    says="parameters before",
    zoo=("P22",),
    killed_by=("equivalence",),
    workload=WINDOWS,
)
class WindowWithOldWeights(Executor):
    """A window computes with the weights of the previous window."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        named = [p for stage in self.stages.values() for p in stage.module.parameters()]
        now = [p.detach().clone() for p in named]
        before = getattr(self, "before", now)
        self.before = now
        for parameter, value in zip(named, before, strict=True):
            parameter.data.copy_(value)
        losses = super().run(schedule, window, *rest)
        for parameter, value in zip(named, now, strict=True):
            parameter.data.copy_(value)
        return losses


@mutant(
    "pipeline_keeps_all_losses",
    says="activations and temporaries: .* held",
    zoo=("P19",),
    killed_by=("memory",),
    steps=8,
)
class KeepsAllLosses(ReferencePipeline):
    """The losses of all steps are kept."""

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        self.kept: list[Tensor] = [*getattr(self, "kept", ()), *losses]
        return super().total(losses)


@mutant(
    "pipeline_keeps_graphs_for_a_window",
    says="activations at the peak",
    killed_by=("schedule",),
    workload=gpt(micro_batches=8),
)
class KeepsGraphsForAWindow(Executor):
    """The graphs of micro-batches are freed only at the end of the window."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            return super().run(schedule, window, *rest)


# ----------------------------------------------------------------------------------- loss scaling


@mutant(
    "pipeline_overflow_of_own_stage",
    says="rank 1: it made the update, the oracle did not",
    zoo=("O11",),
    killed_by=("loss_scale",),
    workload=gpt("overflow_on_one_rank"),
    optimizer=SCALED,
    steps=5,
)
class OverflowOfOwnStage(LossScaler):
    """A stage skips the update if its own gradients overflow."""

    def overflowed(self, gradients: Iterable[Tensor | None]) -> bool:
        return overflows_here(gradients)


@mutant(
    "pipeline_scales_first_window_only",
    says="micro-batch 3 counts 0.00097",
    killed_by=("equivalence",),
    workload=WINDOWS,
    optimizer=SCALED,
)
class ScalesFirstWindowOnly(Executor):
    """Losses of later windows are not scaled, but divided by the scale."""

    def run(self, schedule: Schedule, window: Sequence[MicroBatch], *rest: Any) -> list[Tensor]:
        is_last, scale = rest or (True, 1.0)
        return super().run(schedule, window, is_last, 1.0 if is_last else scale)


# ------------------------------------------------------------------------------------- evaluation


@mutant(
    "pipeline_evaluation_leaves_a_chunk",
    says="evaluation mode",
    zoo=("P17",),
    killed_by=("equivalence",),
    workload=gpt("dropout_stateful"),
    options=LOOPED,
)
class EvaluationLeavesAChunk(ReferencePipeline):
    """After an evaluation the first chunk trains again; the others stay in evaluation mode."""

    def evaluate(self, batch: Batch) -> Tensor | None:
        loss = super().evaluate(batch)
        _, *rest = self.module.children()
        for part in rest:
            part.eval()
        return loss


@mutant(
    "pipeline_evaluates_in_training_mode",
    says="training mode|dropout",
    zoo=("O23",),
    killed_by=("equivalence",),
    workload=gpt("dropout_stateful"),
)
class EvaluatesInTrainingMode(Executor):
    """Evaluation draws dropout masks."""

    def forward(self, action: Action) -> None:
        self.stages[action.stage].module.train()
        super().forward(action)


@mutant(
    "pipeline_counts_copies_on_three_stages",
    says="norm",
    zoo=("P10",),
    killed_by=("norm", "equivalence"),
    mesh={"pipe": 3},
    workload=gpt("tied_over_units"),
    optimizer=CLIP,
)
class CountsCopiesOnThreeStages(Stages):
    """With more than two stages, each copy of a tied tensor counts in the norm."""

    def norm_parts(self, order: float = 2.0) -> list[NormPart]:
        numbers = [tied.copies.number for tied in self.tied]
        for tied in self.tied if self.comm.size > 2 else ():
            tied.copies.number = 0  # as if it were the first
        parts = super().norm_parts(order)
        for tied, number in zip(self.tied, numbers, strict=True):
            tied.copies.number = number
        return parts
