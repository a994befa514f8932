"""Faults in the use of ``torch.distributed.pipelining``: what is handed in, kept, and summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.case import WorkloadSpec
from shardproof.contract import Batch, Observe, OptimizerSpec, StepResult
from shardproof.impls.mutants import declare
from shardproof.impls.pytorch.pipelining import Pipelining, Stage
from shardproof.schedules import Schedule

SIZES = {"layers": 4, "width": 16, "heads": 2, "seq": 8, "vocab": 96}
CLIPPED = OptimizerSpec(clip_norm=0.05)


def gpt(*traits: str, micro_batches: int = 4, windows: int = 1) -> WorkloadSpec:
    """Four units of width 16."""
    return WorkloadSpec(
        "charnames_gpt",
        traits=traits,
        global_batch=8,
        micro_batches=micro_batches,
        windows=windows,
        params=SIZES,
    )


mutant = partial(
    declare.mutant,
    parent=Pipelining,
    parent_name="pytorch/pipelining",
    mesh={"pipe": 2},
    workload=gpt(),
)


@mutant(
    "torch_pipeline_scales_gradients",
    zoo=("P01",),
    summary="scale_grads stays on, torch's default: gradients are divided by the micro-batches",
    killed_by=("equivalence",),
)
class ScalesGradients(Pipelining):
    def make_schedule(self, window: Any) -> Any:
        made = super().make_schedule(window)
        made.scale_grads = True
        return made


@mutant(
    "torch_pipeline_rescales_windows",
    zoo=("P01",),
    summary="scale_grads on, the losses multiplied: right for one window, not for the first of two",
    killed_by=("equivalence",),
    workload=gpt(micro_batches=2, windows=2),
)
class RescalesWindows(ScalesGradients):
    def loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        return super().loss(outputs, number) * len(self.window)

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        found = super().total(losses)
        return None if found is None else found / len(self.window)


@mutant(
    "torch_pipeline_labels_of_next",
    zoo=("P08",),
    summary="the loss takes the targets of the next micro-batch",
    killed_by=("equivalence",),
)
class LabelsOfNext(Pipelining):
    def loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        return super().loss(outputs, (number + 1) % len(self.window))


@mutant(
    "torch_pipeline_backwards",
    summary="micro-batches are handed over in descending order: sums in another one",
    killed_by=("equivalence",),
    lane="bitwise",
)
class Backwards(Pipelining):
    def run(self, window: Any, call: Any) -> list[Tensor]:
        return super().run(window[::-1], call)


@mutant(
    "torch_pipeline_keeps_gradients",
    summary="gradients are not cleared after a step",
    killed_by=("equivalence",),
)
class KeepsGradients(Pipelining):
    def setup(self, *args: Any) -> None:
        super().setup(*args)
        self.optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]


@mutant(
    "torch_pipeline_clears_between_windows",
    summary="gradients of all windows but the last are cleared",
    killed_by=("equivalence",),
    workload=gpt(micro_batches=2, windows=2),
)
class ClearsBetweenWindows(Pipelining):
    def run(self, window: Any, call: Any) -> list[Tensor]:
        self.optimizer.zero_grad()
        return super().run(window, call)


@mutant(
    "torch_pipeline_norm_of_own_stages",
    zoo=("O02", "H11"),
    summary="the norm is that of this rank's stages: every rank clips by another factor",
    killed_by=("norm", "equivalence", "traffic"),
    optimizer=CLIPPED,
)
class NormOfOwnStages(Pipelining):
    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(list(gradients), foreach=False)


@mutant(
    "torch_pipeline_sums_norms",
    zoo=("O07",),
    summary="norms of the stages are summed instead of their squares",
    killed_by=("norm", "equivalence"),
    optimizer=CLIPPED,
)
class SumsNorms(Pipelining):
    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        own = torch.nn.utils.get_total_norm(list(gradients), foreach=False)
        self.comm.all_reduce(own)
        return own


@mutant(
    "torch_pipeline_stays_in_evaluation",
    zoo=("P17",),
    summary="evaluation leaves the first stage in evaluation mode: no more dropout",
    killed_by=("equivalence",),
    workload=gpt("dropout_counter"),
)
class StaysInEvaluation(Pipelining):
    def evaluate(self, batch: Batch) -> Tensor | None:
        found = super().evaluate(batch)
        if 0 in self.parts:
            self.parts[0].eval()
        return found


@mutant(
    "torch_pipeline_shapes_in_training",
    summary="the forward for shapes runs in training mode: a stateful dropout has drawn once more",
    killed_by=("equivalence",),
    options={"shapes": "given"},
    workload=gpt("dropout_stateful"),
)
class ShapesInTraining(Pipelining):
    def shapes(self, inputs: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        found = super().shapes(inputs)
        with torch.no_grad():
            for number, part in self.parts.items():
                given = found[number][0]
                part(torch.zeros_like(given, device=inputs.device) if number else inputs)
        return found


@mutant(
    "torch_pipeline_tells_last_window",
    summary="the loss of a step is that of its last window",
    killed_by=("equivalence",),
    workload=gpt(micro_batches=2, windows=2),
)
class TellsLastWindow(Pipelining):
    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        return super().total(losses[-len(self.window) :])


@mutant(
    "torch_pipeline_one_rate",
    summary="the last stage's rank keeps the learning rate that it was built with",
    killed_by=("equivalence",),
    optimizer=OptimizerSpec(warmup_steps=4),
)
class OneRate(Pipelining):
    def step(self, batch: Batch, observe: Observe) -> StepResult:
        if self.tells_loss:
            self.spec = OptimizerSpec(lr=self.spec.lr, momentum=self.spec.momentum)
        return super().step(batch, observe)


class OneBuffer(Stage):
    """Its micro-batches are received into one tensor."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self.args_recv_info = dict.fromkeys(range(num_microbatches), self.args_recv_info[0])


@mutant(
    "torch_pipeline_one_buffer",
    zoo=("P07",),
    summary="all micro-batches are received into one buffer: backward finds the last one there",
    killed_by=("equivalence",),
    backend="gloo",
    options={"schedule": "gpipe"},
)
class SharesBuffer(Pipelining):
    stage_type = OneBuffer


class SkipsLastWeights(Stage):
    """It leaves out a part of the split backward."""

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.chunks is not None and bwd_chunk_id < self.chunks - 1:
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


@mutant(
    "torch_pipeline_skips_last_weights",
    summary="split backward: the weight gradients of the last micro-batch are never added",
    killed_by=("equivalence",),
    options={"schedule": "zb_v"},
)
class ForgetsLastWeights(Pipelining):
    stage_type = SkipsLastWeights


@mutant(
    "torch_pipeline_tells_what_torch_exports",
    summary="the schedule told is torch's _get_pipeline_order: the last stage counts from 1",
    killed_by=("schedule",),
)
class TellsWhatTorchExports(Pipelining):
    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        told = super().schedule(options, ranks, micro_batches)
        last = [a._replace(micro=a.micro + (a.op == "F")) for a in told.orders[-1]]
        return replace(told, orders=(*told.orders[:-1], tuple(last)))


@mutant(
    "torch_pipeline_tells_another",
    summary="what is told is GPipe whatever the options say",
    killed_by=("schedule",),
)
class TellsAnother(Pipelining):
    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        return super().schedule({"schedule": "gpipe"}, ranks, micro_batches)


@mutant(
    "torch_pipeline_ignores_schedule",
    summary="GPipe is told and run whatever the options say",
    killed_by=("schedule",),
)
class IgnoresSchedule(TellsAnother):
    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, {**options, "schedule": "gpipe"})


@mutant(
    "torch_pipeline_ignores_split",
    summary="units are cut evenly whatever the option split says",
    killed_by=("active", "memory", "schedule"),
    options={"split": [3, 1]},
)
class IgnoresSplit(Pipelining):
    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, {**options, "split": []})


@mutant(
    "torch_pipeline_evaluates_in_training",
    summary="evaluation runs in training mode: a running mean moves on",
    killed_by=("equivalence",),
    options={"shapes": "given"},
    workload=gpt("rebound_buffer"),
)
class EvaluatesInTraining(Pipelining):
    def run(self, window: Any, call: Any) -> list[Tensor]:
        for part in self.parts.values():
            part.train()
        return super().run(window, call)


@mutant(
    "torch_pipeline_keeps_outputs",
    summary="the schedule returns its outputs, torch's default: they stay until the next window",
    killed_by=("memory",),
)
class KeepsOutputs(Pipelining):
    def run(self, window: Any, call: Any) -> list[Tensor]:
        return super().run(window, lambda *a, **told: call(*a, **told | {"return_outputs": True}))


class KeepsGiven(Stage):
    """It has a copy of what it gave, a hidden activation for every micro-batch."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        given = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.given = getattr(self, "given", {}) | {fwd_chunk_id: given.detach().clone()}
        return given


@mutant(
    "torch_pipeline_keeps_given",
    summary="a stage keeps what it gave to the next one, as many bytes as it has buffers for",
    killed_by=("memory",),
)
class HoldsGiven(Pipelining):
    stage_type = KeepsGiven
