"""Data parallelism with one flat gradient: reduce-scatter, then all-gather.

    gradients   views of one buffer, padded until the ranks divide it
    finish      reduce-scatter: each rank has the sum of its part
                all-gather: each rank has the sum of all parts

``STRATEGY`` is what ``shardproof`` asks of the strategy; ``flat_ddp_costs.py`` counts its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.comm import Mesh
from shardproof.contract import (
    Batch,
    Build,
    Capabilities,
    Implementation,
    Kind,
    Observe,
    OptimizerSpec,
    Options,
    Piece,
    StepResult,
)
from shardproof.strategies import Strategy

STRATEGY = Strategy(
    name="flat_ddp",
    cost_model="flat_ddp_costs:FlatDDPCosts",
    family="ddp",
    profile=frozenset({"clipping", "accumulation", "initial_broadcast", "frozen_parameters"}),
    axes=("replicate",),
)

_UNUSED = "each gradient is a view of the buffer, whether its parameter was used or not"
_WHEN = ("by_rank", "by_micro_batch", "last_micro_batch", "late_step", "early_step")


class FlatDDP(Implementation):
    """The strategy as a system under test, held to its own cost model byte for byte."""

    strategy = STRATEGY.name
    depth = "layout"

    @classmethod
    def capabilities(cls, options: Options) -> Capabilities:
        """The profile; what the buffer cannot do is declined."""
        declines = dict.fromkeys(("unused", *(f"conditional_{when}" for when in _WHEN)), _UNUSED)
        return Capabilities(
            axes=STRATEGY.axes,
            buffers="per_rank",
            features=STRATEGY.profile,
            declines=declines | {"loss_scale": "not written"},
        )

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Options,
    ) -> None:
        """Start from rank 0's values; gradients become views of one buffer."""
        self.loss, self.spec, self.comm = build.loss, optimizer, mesh.comm("replicate")
        self.module = build(mesh.device)
        if state is not None:  # on rank 0 only
            self.module.load_state_dict(dict(state), strict=False)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            whole = tensor.detach().contiguous()  # a transposed view is sent as a copy
            self.comm.broadcast(whole)
            tensor.detach().copy_(whole)
        self.named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.flat = self.make_buffer()
        self.optimizer = self.make_optimizer()

    def make_buffer(self) -> Tensor:
        """All gradients, one behind the other; zeros at the end until the ranks divide it."""
        trained = list(self.named.values())
        elements = sum(parameter.numel() for parameter in trained)
        flat = trained[0].new_zeros(elements + -elements % self.comm.size)
        start = 0
        for parameter in trained:
            stop = start + parameter.numel()
            parameter.grad = flat[start:stop].view(parameter.shape)
            start = stop
        return flat

    def make_optimizer(self) -> torch.optim.Optimizer:
        """That of the specification, with its groups."""
        groups = []
        for group, names in self.spec.assign(self.named):
            decay = self.spec.weight_decay if group.weight_decay is None else group.weight_decay
            parameters = [self.named[name] for name in names]
            groups.append({"params": parameters, "weight_decay": decay, "lr_scale": group.lr_scale})
        return self.spec.kind(groups, **self.spec.arguments)

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Accumulate over all micro-batches, then sum over the ranks once."""
        self.flat.zero_()
        total = self.flat.new_zeros(())
        for micro in batch.micro_batches:
            loss = self.loss(self.module(micro.inputs), micro)
            loss.backward()
            total = total + loss.detach()
        self.sum_over_ranks(self.flat)
        observe("gradients_final")
        norm = None
        if self.spec.clip_norm is not None:
            norm = self.flat.double().norm()
            self.flat.mul_((self.spec.clip_norm / (norm + 1e-6)).clamp(max=1.0))
            observe("after_clip")
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr_at(batch.step) * group["lr_scale"]
        self.optimizer.step()
        observe("after_update")
        return StepResult(loss=total, norm=norm)

    def sum_over_ranks(self, flat: Tensor) -> None:
        """Sum ``flat`` in place: (N-1)/N of it out and in for each of the two calls."""
        own = flat.chunk(self.comm.size)[self.comm.rank]
        self.comm.reduce_scatter(own, flat)
        self.comm.all_gather(flat, own)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Everything, on every rank."""
        held: dict[str, Tensor] = {}
        if kind == "parameters":
            held = dict(self.module.named_parameters())
        elif kind == "buffers":
            held = dict(self.module.named_buffers())
        elif kind == "gradients":
            held = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        else:
            state = self.optimizer.state
            held = {
                f"{n}.{slot}": value
                for n, p in self.named.items()
                for slot, value in state[p].items()
                if isinstance(value, Tensor)
            }
        return [Piece.whole(n, t.detach(), replica=self.comm.rank) for n, t in held.items()]


class SendsTwice(FlatDDP):
    """A fault on purpose: right sums for twice the bytes."""

    def sum_over_ranks(self, flat: Tensor) -> None:
        """Sum a copy first, and throw it away."""
        super().sum_over_ranks(flat.clone())
        super().sum_over_ranks(flat)
