"""picotron's pipeline (1F1B) with the suite's GPT, from the user's checkout.

Used: ``setup_process_group_manager``, ``PipelineParallel.distribute_layers`` and ``backward``,
``train_step_pipeline_1f1b`` with its messages and its loss: the mean over the tokens of each
micro-batch.  So all micro-batches must have equally many tokens, and none masked, for the mean over
them to be the loss of the contract.  The step reports that mean, but leaves *sums* over
micro-batches as gradients: they are as many times too large as there are micro-batches, while
picotron's own step without a pipeline divides.

The stages are the suite's (``Build.stage``); ``torch.cuda.synchronize``, which follows every
message, does nothing here.  Tried with picotron at commit 59714b1.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Capabilities,
    Kind,
    MicroBatch,
    Observe,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.ecosystem.shapes import shape_of
from shardproof.impls.ecosystem.whole import NoOptions, check_plain, process_capabilities
from shardproof.impls.pytorch.adapter import Adapter
from shardproof.impls.reference.engine.optimizer import set_learning_rate, slot_pieces
from shardproof.impls.reference.engine.options import parse_options

if importlib.util.find_spec("picotron") is not None:
    from picotron.pipeline_parallel.pipeline_parallel import (
        PipelineParallel,
        train_step_pipeline_1f1b,
    )
    from picotron.process_group_manager import setup_process_group_manager


@dataclass
class Loader:
    """The interface of picotron's data loader, over the micro-batches of one step."""

    left: Iterator[MicroBatch]
    grad_acc_steps: int

    def __next__(self) -> dict[str, Tensor]:
        micro = next(self.left)
        inputs = {"input_ids": micro.inputs, "position_ids": torch.arange(micro.inputs.shape[-1])}
        return inputs | {"target_ids": micro.targets}


@dataclass
class Stage:
    """The interface of picotron's model, for a stage of the suite."""

    part: nn.Module

    def forward(self, input_ids: Tensor, position_ids: Tensor, hidden_states: Any) -> Tensor:
        """Run the stage on the inputs, or on the previous stage's output."""
        return self.part(input_ids if hidden_states is None else hidden_states)

    def backward(self, *tensors: Tensor | None) -> Tensor | None:
        """Run picotron's backward."""
        return PipelineParallel.backward(None, *tensors)


class PicotronPipeline(Adapter):
    """The adapter."""

    strategy = "pipeline"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The axis ``pipe``; the state is loaded on every rank, because picotron does not broadcast
        it.
        """
        parse_options(NoOptions, options)
        given: dict[str, Any] = {"axes": ("pipe",), "initial_state": "everywhere"}
        return process_capabilities("picotron", "stages", **given)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options (there are none); the mesh is all ranks."""
        self.options = options

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: every rank has loaded the state."""
        check_plain(self.options, self.mesh, "pipe", self.spec)

    def shard(self, module: nn.Module) -> nn.Module:
        """Assign this rank's layers by picotron's rule, after creating its groups."""
        self.width = shape_of(module, "embed.position.weight", "the hidden width")[1]
        setup_process_group_manager(1, 1, self.mesh.world, 1)
        layers = PipelineParallel.distribute_layers(None, len(self.build.units))
        return self.build.stage(module, layers[0], layers[-1] + 1)

    def updated(self) -> dict[str, Tensor]:
        """The parameters of the stage."""
        return dict(self.module.named_parameters())

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Run picotron's step, then torch's optimizer."""
        shape = (*batch.micro_batches[0].inputs.shape, self.width)
        loader = Loader(iter(batch.micro_batches), len(batch.micro_batches))
        dtype = next(self.module.parameters()).dtype
        with patch.object(torch.cuda, "synchronize"):
            loss = train_step_pipeline_1f1b(Stage(self.module), loader, shape, "cpu", dtype)
        observe("gradients_final")
        set_learning_rate(self.optimizer, self.spec, batch.step)
        self.optimizer.step()
        observe("after_update")
        self.optimizer.zero_grad()
        knows = self.mesh.rank == self.mesh.world - 1
        return StepResult(torch.tensor(loss, dtype=dtype) if knows else None)

    def clip(self, limit: float) -> Tensor:
        """Do nothing: picotron trains without clipping."""
        raise Refused("picotron's pipeline does not clip gradients; leave 'clip' out")

    def evaluate(self, batch: Batch) -> Tensor:
        """Not supported: picotron only trains."""
        raise Refused("picotron cannot evaluate a model")

    def local_state(self, kind: Kind) -> list[Piece]:
        """The whole tensors of the stage."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, lambda n, s, t: Piece.whole(f"{n}.{s}", t))
        named: dict[str, Any] = self.updated() if kind != "buffers" else {}
        if kind == "gradients":
            named = {n: p.grad for n, p in named.items() if p.grad is not None}
        return [Piece.whole(name, tensor.detach()) for name, tensor in named.items()]


IMPLEMENTATION = PicotronPipeline
