"""Faults around upstream checkpoints: what torch was given, or gave back, is not passed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from shardproof.case import CheckpointPlan
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import ADAMW
from shardproof.impls.pytorch.checkpoint.full import Full
from shardproof.impls.pytorch.checkpoint.state import State, Training
from shardproof.impls.pytorch.ddp import PyTorchDDP

mutant = declare.family(
    PyTorchDDP,
    killed_by=("checkpoint",),
    backend="gloo",
    checkpoint=CheckpointPlan(save_at=2),
    optimizer=ADAMW,
    steps=3,
)
FULL: Mapping[str, Any] = {"checkpoint": {"format": "full"}}


@mutant(
    "torch_saves_no_optimizer", says="optimizer state was not loaded", zoo=("K16",), options=FULL
)
class NoOptimizer(Full):
    """Only the model's state is given to torch."""

    def put(self, training: Training, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        set_model_state_dict(training.modules[0], model)


@mutant("torch_loads_no_generators", says=r"the RNG of rank 0 \(torch\) was not loaded")
class NoGenerators(State):
    """Generators are saved and not set."""

    def put(self) -> Mapping[str, Any]:
        self.tree["rng"] = {}
        return super().put()


@mutant("torch_saves_rounded", says="parameters were not loaded: .* elements of .* are others")
class Rounded(State):
    """Tensors are given to torch in float32, and cast without a word on loading."""

    def _as_saved(self, name: str, value: Any) -> Any:
        kept = super()._as_saved(name, value)
        if isinstance(kept, torch.Tensor) and kept.dtype == torch.float64:
            return kept.float()
        return kept
