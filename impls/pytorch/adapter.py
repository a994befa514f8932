"""The common part of adapters for torch's sharded systems: one step, evaluation, pieces.

    set-up   build on every rank, initial state on rank 0; broadcast; shard
    step     each micro-batch: forward, loss, backward
             take the loss scale out                      observe("gradients_final")
             clip                                         observe("after_clip")
             learning rate, update                        observe("after_update")

After an overflow, nothing is clipped or updated.  No system here lets a rank skip a round of
collectives, so all ranks need the same number of micro-batches; the trait that breaks this is
declined.  Not a strategy by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardproof.axes import summing
from shardproof.comm import Comm, Mesh
from shardproof.contract import (
    Batch,
    Build,
    Kind,
    MicroBatch,
    Observe,
    OptimizerSpec,
    Piece,
    Refused,
    StepResult,
)
from shardproof.impls.pytorch.checkpoint.saves import Saves
from shardproof.impls.pytorch.parts.recompute import plain
from shardproof.impls.pytorch.parts.scaling import make_scaler, update
from shardproof.impls.reference.engine.optimizer import build_optimizer, param_groups
from shardproof.impls.reference.engine.precision import Precision
from shardproof.impls.reference.engine.state import broadcast_tensors, load_state, named_state
from shardproof.impls.reference.units.plan import Wrap, plan_units


class Adapter(Saves):
    """Base of the adapters, which implement ``shard`` and ``held``."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    #: Undoes what the system divides gradients by.
    loss_factor: float = 1.0

    @abstractmethod
    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """Read ``options``; :class:`Refused` for those that do not fit ``mesh``."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Put ``module``, equal on all ranks, under the system; return the callable model."""

    @abstractmethod
    def updated(self) -> dict[str, Tensor]:
        """The tensors for the optimizer, under the parameters' own names."""

    def setup(
        self,
        build: Build,
        state: Mapping[str, Tensor] | None,
        optimizer: OptimizerSpec,
        mesh: Mesh,
        options: Mapping[str, Any],
    ) -> None:
        """Build, load on rank 0, broadcast over all data ranks, shard."""
        self.parse(options, mesh)
        self.build, self.spec, self.mesh = build, optimizer, mesh
        self.inner = build(mesh.device)
        if state is not None:
            load_state(self.inner, state)
        self.share(list(named_state(self.inner).values()))
        self.module = self.shard(self.inner)
        self.optimizer = self.make_optimizer()
        self.scaler = make_scaler(optimizer, mesh.device, self.scaled_over())

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite ``tensors`` with those of global rank 0, on every rank."""
        self.data = data_comm(self.mesh)
        broadcast_tensors(tensors, self.data)

    def scaled_over(self) -> ProcessGroup | None:
        """The group of shards that must agree on an overflow (``None``: torch knows it)."""
        return None

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer over this rank's shards."""
        return build_optimizer(self.spec, param_groups(self.spec, self.updated()))

    def step(self, batch: Batch, observe: Observe) -> StepResult:
        """Accumulate, clip, update."""
        micro_batches = batch.micro_batches
        if not micro_batches:
            raise Refused(
                f"step {batch.step}: this rank has no micro-batch, so the other ranks would wait "
                "in their collectives; give every rank at least 1 micro-batch"
            )
        losses = []
        for number, micro in enumerate(micro_batches):
            with self.accumulating(is_last=number == len(micro_batches) - 1):
                loss = self.loss(micro)
                self.backward(self.scaler.scale(loss * self.loss_factor))
            losses.append(loss.detach())
        self.finish()
        norm, metrics = update(
            self.scaler, self.optimizer, self.spec, self.clip, batch.step, observe
        )
        self.steps_done = batch.step + 1
        return StepResult(loss=torch.stack(losses).sum(), norm=norm, metrics=metrics)

    def loss(self, micro: MicroBatch) -> Tensor:
        """Weighted loss of one micro-batch."""
        return self.build.loss(self.module(micro.inputs), micro)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, multiplied by the factor and the scale."""
        loss.backward()

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of the forward and backward of a micro-batch."""
        return nullcontext()

    def finish(self) -> None:
        """Complete the gradients after the last backward."""

    @abstractmethod
    def clip(self, limit: float) -> Tensor:
        """Scale gradients to a global norm of at most ``limit``; return the norm before."""

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's share of the loss in evaluation mode."""
        self.module.eval()
        try:
            shares = [self.loss(micro) for micro in batch.micro_batches]
        finally:
            self.module.train()
            self.settle()
        return torch.stack(shares).sum() if shares else torch.zeros(())

    def settle(self) -> None:
        """After a forward without backward, free the units that it left gathered."""

    @abstractmethod
    def local_state(self, kind: Kind) -> list[Piece]:
        """Pieces whose tensors are views of this rank's state."""

    def buffers(self) -> list[Piece]:
        """Buffers differ between ranks."""
        named = self.inner.named_buffers()
        return [Piece.whole(plain(n), b.detach(), replica=self.mesh.rank) for n, b in named]

    @torch.no_grad()
    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Copy into the state of this rank with the same name and place.

        Optimizer slots that do not exist yet, before the first step, are made.
        """
        if kind == "optimizer":
            self.make_slots(pieces)
        held = {(p.name, p.slices, p.flat_range): p.tensor for p in self.local_state(kind)}
        for piece in pieces:
            place = (piece.name, piece.slices, piece.flat_range)
            if place not in held:
                raise Refused(
                    f"this rank holds no range {place[1] or place[2]} of {piece.name!r} ({kind})"
                )
            held[place].copy_(piece.tensor)

    def make_slots(self, pieces: Iterable[Piece]) -> None:
        """Create a slot in the optimizer for every slot among ``pieces``."""
        updated = self.updated()
        for piece in pieces:
            name, _, slot = piece.name.rpartition(".")
            if name in updated and slot not in self.optimizer.state[updated[name]]:
                like = piece.tensor if slot == "step" else updated[name].detach()
                self.optimizer.state[updated[name]][slot] = torch.zeros_like(like)


def data_comm(mesh: Mesh) -> Comm:
    """All ranks with a copy or a shard of the same model."""
    return mesh.comm(*summing(mesh.axes))


def unit_features(silent: bool, precision: Precision) -> set[str]:
    """The additional declarations of FSDP; ``silent``: only the last micro-batch reduces."""
    features = {"wrapped_units"}
    if silent:
        features.add("accumulation_without_communication")
    if precision.reduce == torch.float32:
        features.add("fp32_reduction")
    return features


def whole_units(module: nn.Module, wrap: Wrap, blocks: Sequence[str]) -> list[str]:
    """The units of ``wrap`` except the root, in order of registration, if torch supports them.

    torch wants all owners of a tied parameter in one unit: a unit that shares one with what lies
    outside of it is left to the unit around it.
    """
    names = [unit.name for unit in plan_units(module, wrap, blocks) if unit.name]
    owners: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(path)
    return [
        name
        for name in names
        if all(
            sum(path.startswith(f"{name}.") for path in paths) in (0, len(paths))
            for paths in owners.values()
        )
    ]
