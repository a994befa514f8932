"""Hugging Face accelerate on CPUs: ``Accelerator(cpu=True)``, unmodified.

Used: ``prepare`` of model and optimizer (torch's DDP over the default group), ``accumulate`` with
``gradient_accumulation_steps``, ``backward``, ``clip_grad_norm_``, the wrapped optimizer.

Two compensations: DDP divides by the ranks and ``backward`` by the micro-batches, so the loss is
multiplied by both.  Cost: as ``pytorch/ddp``.  Tried with accelerate 1.15.0.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.contract import Batch, Observe, StepResult
from shardproof.impls.ecosystem.whole import DDP_FEATURES, Whole
from shardproof.impls.pytorch.adapter import Adapter

if importlib.util.find_spec("accelerate") is not None:
    import accelerate


class Accelerated(Adapter):
    """The common use of accelerate, for any plugin."""

    def accelerator_arguments(self) -> dict[str, Any]:
        """Arguments in addition to ``cpu=True``."""
        return {}

    def shard(self, module: nn.Module) -> nn.Module:
        """The model after ``Accelerator.prepare``."""
        with self.mesh.environment(OMP_NUM_THREADS="1"):
            self.accelerator = accelerate.Accelerator(cpu=True, **self.accelerator_arguments())
        return self.accelerator.prepare(module)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer after ``Accelerator.prepare``."""
        return self.accelerator.prepare(super().make_optimizer())

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Accumulate over the micro-batches of this step."""
        rounds = max(1, len(batch.micro_batches))
        self.accelerator.gradient_accumulation_steps = rounds
        self.loss_factor = float(self.mesh.world * rounds)
        return super().step(batch, observe)

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of accelerate, which counts micro-batches itself."""
        return self.accelerator.accumulate(self.module)

    def backward(self, loss: Tensor) -> None:
        """Backward of accelerate, which divides by the number of micro-batches."""
        self.accelerator.backward(loss)

    def clip(self, limit: float) -> Tensor:
        """Clip with accelerate."""
        return self.accelerator.clip_grad_norm_(self.module.parameters(), limit)


class AccelerateDDP(Accelerated, Whole):
    """The adapter."""

    package = "accelerate"
    features = DDP_FEATURES


IMPLEMENTATION = AccelerateDDP
