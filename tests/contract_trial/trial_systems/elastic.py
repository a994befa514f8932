"""Data parallelism whose members come and go between steps.

What is new for the contract: a mesh over some of the ranks, a member that starts without state and
alone, survivors that bring it up to date, shares of the batch that are cut anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    StepResult,
)
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    param_groups,
    set_learning_rate,
    slot_pieces,
)
from shardproof.impls.reference.engine.state import load_state


class Elastic(Implementation):
    """Option ``heal`` (default true): survivors bring a joiner up to date."""

    strategy = "elastic_ddp"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Plain sums, whoever computes them."""
        return Capabilities(
            buffers="per_rank",
            features=frozenset({"clipping", "accumulation", "initial_broadcast", "elastic"}),
        )

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """On a mesh of itself the broadcast is one with nobody: a joiner does the same as all."""
        self.build, self.spec, self.comm = build, optimizer, mesh.comm("replicate")
        self.mesh, self.options = mesh, options
        self.module = build(mesh.device)
        if state is not None:
            load_state(self.module, state)
        self.named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(optimizer, param_groups(optimizer, self.named))
        self.share(0)

    @torch.no_grad()
    def share(self, root: int) -> None:
        """Every member takes ``root``'s parameters."""
        for parameter in self.module.parameters():
            self.comm.broadcast(parameter.detach(), root)

    @torch.no_grad()
    def reconfigure(self, mesh: Mesh, joined: Sequence[int], left: Sequence[int]) -> None:
        """The first survivor's parameters and optimizer state go to everybody."""
        self.mesh, self.comm = mesh, mesh.comm("replicate")
        if not joined or not self.options.get("heal", True):
            return
        root = next(i for i, rank in enumerate(mesh.ranks) if rank not in joined)
        self.share(root)
        state = self.optimizer.state_dict() if self.comm.rank == root else None
        self.optimizer.load_state_dict(self.comm.broadcast_object(state, root))

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Local sums, then one all-reduce a parameter."""
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch.micro_batches:
            loss = self.build.loss(self.module(micro.inputs), micro)
            loss.backward()
            total = total + loss.detach()
        for parameter in self.named.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.comm.all_reduce(gradient)
            parameter.grad = gradient
        observe("gradients_final")
        norm = None
        if self.spec.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.named.values(), self.spec.clip_norm)
            observe("after_clip")
        set_learning_rate(self.optimizer, self.spec, batch.step)
        self.optimizer.step()
        observe("after_update")
        self.optimizer.zero_grad()
        return StepResult(loss=total, norm=norm)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Whole; replicas are numbered by rank, which stays when others go."""
        rank = self.mesh.rank
        if kind == "optimizer":
            return slot_pieces(
                self.optimizer, lambda n, s, t: Piece.whole(f"{n}.{s}", t, replica=rank)
            )
        found: dict[str, Tensor] = dict(self.module.named_buffers())
        if kind == "parameters":
            found = dict(self.module.named_parameters())
        elif kind == "gradients":
            found = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        return [Piece.whole(n, t.detach(), replica=rank) for n, t in found.items()]
