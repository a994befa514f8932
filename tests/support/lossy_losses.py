"""Data parallelism that leaves a sample, or a position of all samples, out of the loss it tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardproof.contract import MicroBatch, StepResult
from shardproof.impls.reference.naive_ddp import ReferenceNaiveDDP


class Leaves(ReferenceNaiveDDP):
    """The gradients are right; the loss is told without what :meth:`less` leaves out."""

    def less(self, micro: MicroBatch) -> torch.Tensor:
        raise NotImplementedError

    def step(self, batch: Any, observe: Any) -> StepResult:
        lost = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for micro in batch.micro_batches:
                less = replace(micro, weights=self.less(micro))
                lost = lost + self.build.loss(self.module(less.inputs), less)
        result = super().step(batch, observe)
        return replace(result, loss=None if result.loss is None else result.loss - lost)


class LeavesSample(Leaves):
    """Sample 3 is not in it."""

    def less(self, micro: MicroBatch) -> torch.Tensor:
        return micro.weights * (micro.sample_ids == 3).to(micro.weights.dtype)[:, None]


class LeavesPosition(Leaves):
    """The last position is not in it."""

    def less(self, micro: MicroBatch) -> torch.Tensor:
        kept = torch.zeros_like(micro.weights)
        kept[:, -1] = micro.weights[:, -1]
        return kept
