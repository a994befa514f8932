"""The control: ordinary training on one device, without any shared part.

If the judge fails this one, the judge is wrong.

    what        where
    everything  rank 0, the only rank

    step:  for each micro-batch: forward -> loss -> backward (gradients add up in ``.grad``)
           -> clip_grad_norm_ -> optimizer.step -> gradients cleared

Cost: no communication.  Numbers: equal to the oracle's, bit for bit.  Left out: everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Implementation,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)


class Plain(Implementation):
    """One process, one device."""

    strategy = "single"
    depth = "layout"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """A world of one; no options."""
        if options:
            raise Refused(f"unknown option {next(iter(options))!r}; 'plain' has no options")
        return Capabilities(
            dtypes=("float64", "float32", "bfloat16"),
            max_world=1,
            exactness="bitwise",
            features=frozenset({"clipping", "accumulation"}),
            declines={"loss_scale": "'plain' has no loss scaler"},
        )

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Build the model and its optimizer."""
        self.capabilities(options)
        if mesh.world != 1:
            raise Refused(f"'plain' trains on 1 rank, but this mesh has {mesh.world}")
        if state is None:
            raise ValueError("global rank 0 must be given the initial state, not None")
        self.module: nn.Module = build(mesh.device)
        with torch.no_grad():
            for name, tensor in self._named("parameters", "buffers").items():
                tensor.copy_(state[name])
        self.build, self.spec = build, optimizer
        self.named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        groups = [
            {
                "params": [self.named[name] for name in names],
                "lr_scale": group.lr_scale,
                "weight_decay": (
                    optimizer.weight_decay if group.weight_decay is None else group.weight_decay
                ),
            }
            for group, names in optimizer.assign(self.named)
        ]
        self.optimizer: torch.optim.Optimizer
        if optimizer.name == "sgd":
            self.optimizer = torch.optim.SGD(
                groups, lr=optimizer.lr, momentum=optimizer.momentum, foreach=False
            )
        else:
            self.optimizer = torch.optim.AdamW(
                groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, foreach=False
            )

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Textbook gradient accumulation."""
        total = torch.zeros((), dtype=next(self.module.parameters()).dtype)
        for micro in batch.micro_batches:
            loss = self.build.loss(self.module(micro.inputs), micro)
            loss.backward()
            total = total + loss.detach()
        observe("gradients_final")
        norm = None
        if self.spec.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(
                list(self.named.values()), self.spec.clip_norm, foreach=False
            )
            observe("after_clip")
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr_at(batch.step) * group["lr_scale"]
        self.optimizer.step()
        observe("after_update")
        self.optimizer.zero_grad()
        return StepResult(loss=total, norm=norm)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Everything, as whole tensors."""
        return [Piece.whole(name, t.detach()) for name, t in self._named(kind).items()]

    def full_state(self, kind: Kind) -> dict[str, Tensor]:
        """Copies of everything."""
        return {name: t.detach().clone() for name, t in self._named(kind).items()}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The loss in evaluation mode."""
        self.module.eval()
        try:
            losses = [self.build.loss(self.module(m.inputs), m) for m in batch.micro_batches]
        finally:
            self.module.train()
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def _named(self, *kinds: Kind) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for kind in kinds:
            if kind == "parameters":
                named.update(self.module.named_parameters())
            elif kind == "buffers":
                named.update(self.module.named_buffers())
            elif kind == "gradients":
                named.update({n: p.grad for n, p in self.named.items() if p.grad is not None})
            else:
                for name, parameter in self.named.items():
                    slots = self.optimizer.state.get(parameter, {})
                    named.update(
                        {f"{name}.{s}": v for s, v in slots.items() if isinstance(v, Tensor)}
                    )
        return named


IMPLEMENTATION = Plain
