"""FSDP2 over tensor parallelism on a 2-D mesh: axes ``shard`` (data) and ``tensor``.

What is new for the contract: a parameter's local part is a block of a DTensor, in *strided* layouts
where both axes cut the same dimension; names differ in their number of copies (a norm has one per
tensor rank, a split weight one in all); ranks of one data coordinate compute the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from impls.reference.parts.norm import clip_factor, power_sum
from impls.reference.parts.optimizer import (
    build_optimizer,
    param_groups,
    set_learning_rate,
    slot_pieces,
)
from impls.reference.parts.state import load_state
from suite.comm import Mesh
from suite.contract import (
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


class FsdpTensor(Implementation):
    """The MLPs are split over ``tensor``; everything is sharded over ``shard``."""

    strategy = "fsdp_tensor"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Both axes; no options."""
        if options:
            raise Refused(f"unknown option {next(iter(options))!r}")
        return Capabilities(
            axes=("shard", "tensor"),
            initial_state="everywhere",
            buffers="per_rank",
            features=frozenset(
                {"clipping", "accumulation", "sharded_parameters", "sharded_optimizer", "tensor"}
            ),
        )

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Tensor parallelism first, then sharding: unit by unit, the rest in the root."""
        assert state is not None
        self.build, self.spec, self.mesh = build, optimizer, mesh
        self.module = build(mesh.device)
        load_state(self.module, state)
        plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        for name in build.units:
            unit = self.module.get_submodule(name)
            parallelize_module(unit, mesh.device_mesh["tensor"], plan)
            fully_shard(unit, mesh=mesh.device_mesh["shard"])
        fully_shard(self.module, mesh=mesh.device_mesh["shard"])
        self.trainable = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(optimizer, param_groups(optimizer, self.trainable))

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Accumulate without communication, reduce in the last backward."""
        total = torch.zeros((), dtype=torch.float64)
        micro_batches = batch.micro_batches
        for number, micro in enumerate(micro_batches):
            self.module.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = self.build.loss(self.module(micro.inputs), micro)
            (loss * self.mesh.size("shard")).backward()  # FSDP2 divides by it
            total = total + loss.detach()
        observe("gradients_final")
        norm = None
        if self.spec.clip_norm is not None:
            norm = self.clip(self.spec.clip_norm)
            observe("after_clip")
        set_learning_rate(self.optimizer, self.spec, batch.step)
        self.optimizer.step()
        observe("after_update")
        self.optimizer.zero_grad()
        return StepResult(loss=total, norm=norm)

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Global norm: split parts over both axes, the others over ``shard`` only."""
        sums = {axes: torch.zeros((), dtype=torch.float64) for axes in (("shard",), ("tensor",))}
        local = []
        for parameter in self.trainable.values():
            if parameter.grad is None:
                continue
            local.append(parameter.grad.to_local())
            copies = self.copies(parameter.grad)
            sums[("tensor",) if copies == () else ("shard",)] += power_sum(local[-1])
        self.mesh.comm("tensor").all_reduce(sums["tensor",])
        total = sums["shard",] + sums["tensor",]
        self.mesh.comm("shard").all_reduce(total)
        norm = total.sqrt()
        for gradient in local:
            gradient.mul_(clip_factor(norm, limit))
        return norm

    def copies(self, tensor: DTensor) -> tuple[str, ...]:
        """Axes along which ranks hold the same part."""
        names = tensor.device_mesh.mesh_dim_names or ()
        placed = dict(zip(names, tensor.placements, strict=True))
        return tuple(
            axis for axis in self.mesh.axes if isinstance(placed.get(axis, Replicate()), Replicate)
        )

    def local_state(self, kind: Kind) -> list[Piece]:
        """Local blocks, placed by DTensor's own layout."""
        if kind == "optimizer":
            return slot_pieces(self.optimizer, lambda n, s, t: self.piece(f"{n}.{s}", t))
        found: dict[str, Tensor] = dict(self.module.named_buffers())
        if kind == "parameters":
            found = dict(self.module.named_parameters())
        elif kind == "gradients":
            found = {n: p.grad for n, p in self.trainable.items() if p.grad is not None}
        return [self.piece(name, tensor.detach()) for name, tensor in found.items()]

    def piece(self, name: str, tensor: Tensor) -> Piece:
        """A DTensor's block, or a plain tensor that every rank holds whole."""
        if not isinstance(tensor, DTensor):
            return Piece.whole(name, tensor, replica=self.mesh.rank)
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        replica = 0
        for axis in self.copies(tensor):
            replica = replica * self.mesh.axes[axis] + self.mesh.coordinate[axis]
        blocks = tuple((o, o + n) for o, n in zip(offset, shape, strict=True))
        return Piece(name, tuple(tensor.shape), tensor.to_local(), slices=blocks, replica=replica)
