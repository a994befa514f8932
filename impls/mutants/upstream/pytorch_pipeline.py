"""Faults in the use of ``torch.distributed.pipelining``: its inputs, kept state, and sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Batch, Observe, OptimizerSpec, StepResult
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import CLIP, NORM, gpts
from shardproof.impls.pytorch.pipelining import Pipelining, Stage
from shardproof.schedules import Schedule

#: Four units.
gpt = gpts(layers=4, width=16, heads=2, seq=8, vocab=96, global_batch=8, micro_batches=4)
mutant = declare.family(Pipelining, mesh={"pipe": 2}, workload=gpt())


@mutant(
    "torch_pipeline_scales_gradients",
    says="4 times too small .*micro-batches",
    zoo=("P01",),
    killed_by=("equivalence",),
)
class ScalesGradients(Pipelining):
    """scale_grads keeps torch's default, so gradients are divided by the micro-batches."""

    def make_schedule(self, window: Any) -> Any:
        made = super().make_schedule(window)
        made.scale_grads = True
        return made


@mutant(
    "torch_pipeline_rescales_windows",
    says="micro-batch 0 counts 0.5 times",
    zoo=("P01",),
    killed_by=("equivalence",),
    workload=gpt(micro_batches=2, windows=2),
)
class RescalesWindows(ScalesGradients):
    """scale_grads is on and losses are multiplied: right for one window, wrong for the first of
    two."""

    def loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        return super().loss(outputs, number) * len(self.window)

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        total = super().total(losses)
        return None if total is None else total / len(self.window)


@mutant(
    "torch_pipeline_labels_of_next",
    says="targets of the next micro-batch",
    zoo=("P08",),
    killed_by=("equivalence",),
)
class LabelsOfNext(Pipelining):
    """The loss takes the targets of the next micro-batch."""

    def loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        return super().loss(outputs, (number + 1) % len(self.window))


@mutant(
    "torch_pipeline_backwards",
    says="reordered summation",
    killed_by=("equivalence",),
    lane="bitwise",
)
class Backwards(Pipelining):
    """Micro-batches are passed in descending order, which changes the order of sums."""

    def run(self, window: Any, call: Any) -> list[Tensor]:
        return super().run(window[::-1], call)


@mutant("torch_pipeline_keeps_gradients", says="step before", killed_by=("equivalence",))
class KeepsGradients(Pipelining):
    """Gradients are not cleared after a step."""

    def setup(self, *args: Any) -> None:
        super().setup(*args)
        self.optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]


@mutant(
    "torch_pipeline_clears_between_windows",
    says="micro-batch 0 is missing",
    killed_by=("equivalence",),
    workload=gpt(micro_batches=2, windows=2),
)
class ClearsBetweenWindows(Pipelining):
    """Gradients of all windows but the last are cleared."""

    def run(self, window: Any, call: Any) -> list[Tensor]:
        self.optimizer.zero_grad()
        return super().run(window, call)


@mutant("torch_pipeline_norm_of_own_stages", says="holds itself", zoo=("O02", "H11"), **NORM)
class NormOfOwnStages(Pipelining):
    """The norm is that of this rank's stages, so every rank clips by a different factor."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(list(gradients), foreach=False)


@mutant(
    "torch_pipeline_sums_norms",
    says="added.* not their squares",
    zoo=("O07",),
    killed_by=("norm", "equivalence"),
    optimizer=CLIP,
)
class SumsNorms(Pipelining):
    """The norms of the stages are summed instead of their squares."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        own = torch.nn.utils.get_total_norm(list(gradients), foreach=False)
        self.comm.all_reduce(own)
        return own


@mutant(
    "torch_pipeline_stays_in_evaluation",
    says="evaluation mode",
    zoo=("P17",),
    killed_by=("equivalence",),
    workload=gpt("dropout_counter"),
)
class StaysInEvaluation(Pipelining):
    """Evaluation leaves the first stage in evaluation mode, without dropout."""

    def evaluate(self, batch: Batch) -> Tensor | None:
        loss = super().evaluate(batch)
        if 0 in self.parts:
            self.parts[0].eval()
        return loss


@mutant(
    "torch_pipeline_shapes_in_training",
    says="mask|dropout|generator",
    killed_by=("equivalence",),
    options={"shapes": "given"},
    workload=gpt("dropout_stateful"),
)
class ShapesInTraining(Pipelining):
    """Shape inference runs in training mode, so a stateful dropout draws once more."""

    def shapes(self, inputs: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        shapes = super().shapes(inputs)
        with torch.no_grad():
            for number, part in self.parts.items():
                given = shapes[number][0]
                part(torch.zeros_like(given, device=inputs.device) if number else inputs)
        return shapes


@mutant(
    "torch_pipeline_tells_last_window",
    says="only the last window",
    killed_by=("equivalence",),
    workload=gpt(micro_batches=2, windows=2),
)
class TellsLastWindow(Pipelining):
    """The reported loss of a step is that of its last window."""

    def total(self, losses: Sequence[Tensor]) -> Tensor | None:
        return super().total(losses[-len(self.window) :])


@mutant(
    "torch_pipeline_one_rate",
    says="rank 1, every update is 5 times",
    killed_by=("equivalence",),
    optimizer=OptimizerSpec(warmup_steps=4),
)
class OneRate(Pipelining):
    """The rank of the last stage keeps its initial learning rate."""

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        if self.tells_loss:
            self.spec = OptimizerSpec(lr=self.spec.lr, momentum=self.spec.momentum)
        return super().step(batch, observe)


@mutant(
    "torch_pipeline_one_buffer",
    says="one buffer|overwritten|every later one is right",
    zoo=("P07",),
    killed_by=("equivalence",),
    backend="gloo",
    options={"schedule": "gpipe"},
)
class SharesBuffer(Stage):
    """All micro-batches are received into one buffer, so backward sees only the last."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self.args_recv_info = dict.fromkeys(range(num_microbatches), self.args_recv_info[0])


@mutant(
    "torch_pipeline_skips_last_weights",
    says="micro-batch 3 is missing",
    killed_by=("equivalence",),
    options={"schedule": "zb_v"},
)
class ForgetsLastWeights(Stage):
    """The weight gradients of the last micro-batch are never added (split backward)."""

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.chunks is not None and bwd_chunk_id < self.chunks - 1:
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


@mutant(
    "torch_pipeline_tells_what_torch_exports",
    says="rank 1 never does F0@1",
    killed_by=("schedule",),
)
class TellsWhatTorchExports(Pipelining):
    """The announced schedule is torch's _get_pipeline_order, whose last stage counts from 1."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        announced = super().schedule(options, ranks, micro_batches)
        last = [a._replace(micro=a.micro + (a.op == "F")) for a in announced.orders[-1]]
        return replace(announced, orders=(*announced.orders[:-1], tuple(last)))


@mutant(
    "torch_pipeline_tells_another", says="claims 'gpipe', asked for '1f1b'", killed_by=("schedule",)
)
class TellsAnother(Pipelining):
    """GPipe is announced, whatever the options say."""

    @classmethod
    def schedule(cls, options: Mapping[str, Any], ranks: int, micro_batches: int) -> Schedule:
        return super().schedule({"schedule": "gpipe"}, ranks, micro_batches)


@mutant(
    "torch_pipeline_ignores_schedule",
    says="claims 'gpipe', asked for '1f1b'",
    killed_by=("schedule",),
)
class IgnoresSchedule(TellsAnother):
    """GPipe is announced and run, whatever the options say."""

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, {**options, "schedule": "gpipe"})


@mutant(
    "torch_pipeline_ignores_split",
    says="elements of the parameters of 'blocks.2",
    killed_by=("active", "memory", "schedule"),
    options={"split": [3, 1]},
)
class IgnoresSplit(Pipelining):
    """Units are cut evenly, whatever the option split says."""

    def setup(self, build: Any, state: Any, optimizer: Any, mesh: Any, options: Any) -> None:
        super().setup(build, state, optimizer, mesh, {**options, "split": []})


@mutant(
    "torch_pipeline_evaluates_in_training",
    says="evaluation .*moved",
    killed_by=("equivalence",),
    options={"shapes": "given"},
    workload=gpt("rebound_buffer"),
)
class EvaluatesInTraining(Pipelining):
    """Evaluation runs in training mode, so a running mean moves on."""

    def run(self, window: Any, call: Any) -> list[Tensor]:
        for part in self.parts.values():
            part.train()
        return super().run(window, call)


@mutant(
    "torch_pipeline_keeps_outputs",
    says="activations and temporaries: .* held",
    killed_by=("memory",),
)
class KeepsOutputs(Pipelining):
    """The schedule returns its outputs (torch's default), which stay until the next window."""

    def run(self, window: Any, call: Any) -> list[Tensor]:
        return super().run(
            window, lambda *a, **options: call(*a, **options | {"return_outputs": True})
        )


@mutant(
    "torch_pipeline_keeps_given", says="activations and temporaries: .* held", killed_by=("memory",)
)
class HoldsGiven(Stage):
    """A stage keeps its outputs to the next one, up to the size of its buffers."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        given = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.given = getattr(self, "given", {}) | {fwd_chunk_id: given.detach().clone()}
        return given
