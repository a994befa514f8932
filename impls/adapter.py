"""The common part of adapters around one module: optimizer, rates, a step, evaluation and pieces.

A subclass says what the system under test does, in :meth:`Adapter.wrap`, and overrides what the
system does by itself (docs/add-an-implementation.md, "With a base class").  Whole tensors are a
copy on every rank; a ``DTensor`` tells its own part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Implementation,
    Kind,
    Observe,
    OptimizerSpec,
    Options,
    Piece,
    StepResult,
)


class Adapter(Implementation):
    """A system that wraps one module and leaves the update to an optimizer of torch's form.

    It has ``mesh``, ``options``, ``spec`` (the optimizer as data), ``model`` (as built), ``module``
    (what :meth:`wrap` gave), ``named`` (the parameters of ``model`` by then) and ``optimizer``.
    """

    #: What the system divides gradients by: losses are multiplied by it before their backward.
    divided_by: float = 1.0

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Put ``model`` under the system; return the callable for training."""

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Options,
    ) -> None:
        """Build, load a given state, wrap, and make the optimizer."""
        self.build, self.spec, self.mesh, self.options = build, optimizer, mesh, options
        self.model = build(mesh.device)
        if state is not None:
            held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            with torch.no_grad():
                for name, value in state.items():
                    held[name].copy_(value)
        self.module = self.wrap(self.model)
        # Once: between forward and backward a sharded module has other tensors in their place.
        self.named = dict(self.model.named_parameters())
        self.optimizer = self.make_optimizer()

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates: name to tensor."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer, with a group for each of the case's; :meth:`set_rates` needs
        ``lr_scale``.
        """
        named, decay = self.trained(), self.spec.weight_decay
        groups = [
            {
                "params": [named[name] for name in names],
                "weight_decay": decay if group.weight_decay is None else group.weight_decay,
                "lr_scale": group.lr_scale,
            }
            for group, names in self.spec.assign(named)
        ]
        kind: Any = self.spec.kind
        made: torch.optim.Optimizer = kind(groups, foreach=False, **self.spec.arguments)
        return made

    def set_rates(self, step: int) -> None:
        """The learning rate of ``step`` in every group."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr_at(step) * group["lr_scale"]

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Accumulate, reduce, clip, update."""
        losses, norm = [torch.zeros(())], None
        for number, micro in enumerate(batch.micro_batches, 1):
            with self.accumulating(is_last=number == len(batch.micro_batches)):
                loss = self.build.loss(self.module(micro.inputs), micro)
                self.backward(loss * self.divided_by)
            losses.append(loss.detach())
        self.reduce()
        observe("gradients_final")
        if self.spec.clip_norm is not None:
            norm = self.clip(self.spec.clip_norm)
            observe("after_clip")
        self.set_rates(batch.step)
        self.optimizer.step()
        observe("after_update")
        self.optimizer.zero_grad()
        return StepResult(loss=sum(losses[1:], losses[0].to(losses[-1].dtype)), norm=norm)

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of the forward and backward of a micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward of one micro-batch."""
        loss.backward()

    def reduce(self) -> None:
        """Reduce after the last backward; nothing to do if the system reduces during it."""

    def clip(self, limit: float) -> Tensor:
        """Clip with torch; return the norm before."""
        norm = nn.utils.clip_grad_norm_(self.trained().values(), limit, foreach=False)
        whole = getattr(norm, "full_tensor", None)
        return norm if whole is None else whole()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The loss of the original module in evaluation mode."""
        self.model.eval()
        try:
            micro_batches = batch.micro_batches
            losses = [self.build.loss(self.model(m.inputs), m) for m in micro_batches]
        finally:
            self.model.train()
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def local_state(self, kind: Kind) -> list[Piece]:
        """The pieces that this rank holds."""
        return [self.piece(name, tensor.detach()) for name, tensor in self.held(kind)]

    def held(self, kind: Kind) -> Iterable[tuple[str, Tensor]]:
        """Name and tensor, or ``DTensor``, of all state of ``kind``."""
        if kind == "parameters":
            return self.named.items()
        if kind == "buffers":
            return self.model.named_buffers()
        named = self.trained().items()
        if kind == "gradients":
            return [(name, p.grad) for name, p in named if p.grad is not None]
        state = self.optimizer.state
        slots = ((f"{n}.{slot}", value) for n, p in named for slot, value in state[p].items())
        return [(name, torch.as_tensor(value)) for name, value in slots if value is not None]

    def piece(self, name: str, tensor: Tensor) -> Piece:
        """A rank's own copy, or its part of a ``DTensor``."""
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return Piece.of_dtensor(name, tensor)
        return Piece.whole(name, tensor, replica=self.mesh.rank)
