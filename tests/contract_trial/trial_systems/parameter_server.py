"""An asynchronous parameter server: one rank serves, the others work, nobody waits for all.

What is new for the contract: ranks without data, ranks without parameters of their own, no time at
which gradients are final, gradients of old versions, work in flight at the end of a step, and an
oracle that can only repeat what the server says it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Event,
    Implementation,
    Kind,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.reference.engine.optimizer import (
    build_optimizer,
    param_groups,
    set_learning_rate,
    slot_pieces,
)
from shardproof.impls.reference.engine.state import load_state

SERVER = 0


class ParameterServer(Implementation):
    """Rank 0 serves; every worker pushes its gradient and fetches new parameters."""

    strategy = "parameter_server"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Stale by design: judged by a replay."""
        if options:
            raise Refused(f"unknown option {next(iter(options))!r}")
        return Capabilities(
            exactness="stale",
            oracle="replay",
            buffers="per_rank",
            points=("after_update",),
            features=frozenset({"initial_broadcast", "roles", "events"}),
        )

    @classmethod
    def role(cls, rank: int, world: int, options: Mapping[str, Any]) -> str:
        """One server."""
        if world < 2:
            raise Refused("a server and at least one worker make a world of 2")
        return "server" if rank == SERVER else "worker"

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """The server has the state; workers fetch theirs."""
        if optimizer.clip_norm is not None:
            raise Refused("clip_norm: no global gradient exists")
        self.build, self.spec, self.comm = build, optimizer, mesh.comm("replicate")
        self.serves = mesh.rank == SERVER
        self.module = build(mesh.device)
        if state is not None:
            load_state(self.module, state)
        self.named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        for parameter in self.module.parameters():
            self.comm.broadcast(parameter.detach(), SERVER)
        self.optimizer = build_optimizer(optimizer, param_groups(optimizer, self.named))
        self.log: list[Event] = []
        self.version = 0
        self.flight: list[Any] = []
        self.pushed = self._flat()
        self.fetched = self._flat()

    def _flat(self) -> Tensor:
        """All parameters, one after the other, and a place for the version."""
        values = [p.detach().reshape(-1) for p in self.parameters]
        return torch.cat([*values, torch.zeros(1, dtype=values[0].dtype)])

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """A worker's push and fetch, or a server's round over all workers."""
        if self.serves:
            self.serve(batch.step)
            observe("after_update")
            return StepResult(loss=None)
        loss = self.work(batch)
        observe("after_update")
        return StepResult(loss=loss)

    @torch.no_grad()
    def serve(self, step: int) -> None:
        """Take pushes in an order that changes from step to step; answer each at once."""
        workers = [r for r in range(self.comm.size) if r != SERVER]
        turn = step % len(workers)
        for worker in workers[turn:] + workers[:turn]:
            self.comm.recv(self.pushed, worker)
            self.unpack(self.pushed, gradients=True)
            set_learning_rate(self.optimizer, self.spec, step)
            self.optimizer.step()
            seen = int(self.pushed[-1])
            self.log.append(Event(self.version, worker - 1, step, seen))
            self.version += 1
            answer = self._flat()
            answer[-1] = self.version
            self.comm.send(answer, worker)

    def work(self, batch: Batch) -> Tensor:
        """Compute on what was fetched last; leave push and fetch in flight."""
        self.drain()
        self.module.zero_grad()
        total = torch.zeros((), dtype=self.pushed.dtype)
        for micro in batch.micro_batches:
            loss = self.build.loss(self.module(micro.inputs), micro)
            loss.backward()
            total = total + loss.detach()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        values = [gradient.reshape(-1) for gradient in gradients]
        self.pushed = torch.cat([*values, torch.tensor([float(self.version)], dtype=total.dtype)])
        self.flight = [
            self.comm.send(self.pushed, SERVER, async_op=True),
            self.comm.recv(self.fetched, SERVER, async_op=True),
        ]
        return total

    @torch.no_grad()
    def unpack(self, flat: Tensor, gradients: bool = False) -> None:
        """Into parameters or gradients."""
        sizes = [p.numel() for p in self.parameters]
        for parameter, part in zip(self.parameters, flat[:-1].split(sizes), strict=True):
            if gradients:
                parameter.grad = part.view_as(parameter).clone()
            else:
                parameter.copy_(part.view_as(parameter))

    def drain(self) -> None:
        """A worker takes what is still under way."""
        if self.flight:
            for handle in self.flight:
                handle.wait()
            self.flight = []
            self.unpack(self.fetched)
            self.version = int(self.fetched[-1])

    def events(self) -> list[Event]:
        """What the server did."""
        return list(self.log)

    def local_state(self, kind: Kind) -> list[Piece]:
        """The server's: a worker's copy is nobody's truth."""
        if not self.serves or kind == "gradients":
            return []
        if kind == "optimizer":
            return slot_pieces(self.optimizer, lambda n, s, t: Piece.whole(f"{n}.{s}", t))
        found = self.module.named_parameters() if kind == "parameters" else []
        return [Piece.whole(name, tensor.detach()) for name, tensor in found]
