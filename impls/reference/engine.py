"""Runs an inner transform as an outer implementation.

The loop that every reference strategy shares: accumulate, finish, observe, norm, clip, update.

    step:  before_step
           for each micro-batch: accumulate(is_last) -> forward -> loss -> backward
           finish                      observe("gradients_final")
           norm -> clip                observe("after_clip")
           learning rate -> update -> after_update     observe("after_update")
           after_step
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from impls.reference.parts.handle import Handle
from impls.reference.parts.norm import clip_factor, total_norm
from impls.reference.parts.optimizer import build_optimizer, set_learning_rate, slot_pieces
from impls.reference.parts.recompute import recompute_units
from impls.reference.parts.state import load_state
from suite.comm import Mesh
from suite.contract import (
    Batch,
    Build,
    Implementation,
    Kind,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Piece,
    StepResult,
)


class Engine(Implementation):
    """An implementation around one :class:`~impls.reference.parts.handle.Handle`."""

    @abstractmethod
    def transform(self, module: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> Handle:
        """Apply the strategy to ``module``, whose values are right on global rank 0 only."""

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Build, load what was given, apply the strategy, make the optimizer."""
        module = build(mesh.device)
        if state is not None:
            load_state(module, state)
        recompute_units(module, build.units, options.get("recompute_every", 0))
        self.build, self.spec, self.mesh = build, optimizer, mesh
        self.handle = self.transform(module, mesh, options)
        self.module = self.handle.module
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over what this rank updates."""
        return build_optimizer(self.spec, self.handle.param_groups(self.spec))

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """One optimizer step over all micro-batches of all windows."""
        self.handle.before_step(len(batch.micro_batches))
        loss = self.backward(batch)
        self.handle.finish()
        observe("gradients_final")
        norm = None
        if self.spec.clip_norm is not None:
            norm = total_norm(self.handle.norm_parts(), self.mesh.comm)
            self.clip(norm, self.spec.clip_norm)
            observe("after_clip")
        set_learning_rate(self.optimizer, self.spec, batch.step)
        self.optimizer.step()
        self.handle.after_update()
        observe("after_update")
        self.handle.after_step()
        return StepResult(loss=loss, norm=norm)

    def backward(self, batch: Batch) -> Tensor:
        """Forward and backward of every micro-batch; the sum of their detached losses."""
        total = torch.zeros((), dtype=next(self.module.parameters()).dtype)
        micro_batches = batch.micro_batches
        for number, micro in enumerate(micro_batches):
            self.handle.accumulate(is_last=number == len(micro_batches) - 1)
            loss = self.loss(micro)
            loss.backward()
            total = total + loss.detach()
        return total

    def loss(self, micro: MicroBatch) -> Tensor:
        """Weighted loss of one micro-batch; weights sum to 1 over the global batch."""
        return self.build.loss(self.module(micro.inputs), micro)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale gradients down to ``max_norm``."""
        self.handle.scale_gradients(clip_factor(norm, max_norm))

    def local_state(self, kind: Kind) -> list[Piece]:
        """What this rank holds."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, self.handle.place)
        return self.handle.pieces(kind)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's share of the loss in evaluation mode."""
        self.module.eval()
        try:
            shares = [self.loss(micro) for micro in batch.micro_batches]
        finally:
            self.module.train()
        return torch.stack(shares).sum() if shares else torch.zeros(())

    def drain(self) -> None:
        """Finish work in flight."""
        self.handle.drain()

    def close(self) -> None:
        """Remove hooks."""
        self.handle.close()
