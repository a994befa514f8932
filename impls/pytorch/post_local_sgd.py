"""PyTorch's ``PostLocalSGDOptimizer`` over a ``PeriodicModelAverager`` with an explicit group.

    what                        where
    parameters                  every rank, whole; equal after a meeting, its own in between
    gradients, optimizer state  every rank, its own
    buffers                     every rank, its own

    step     micro-batches   forward, backward; gradients add up locally
             clip, update    by this rank's own norm
             in the update   steps 0, every, 2 every, ...: parameters = mean over the group

The averager counts from 0, so ranks meet after the first step already.  It takes what has a
gradient on this rank: where ranks use different parameters their messages would differ in size, so
that is declined.  Warm-up, in which gradients are summed by a hook of DDP, is left out: it is DDP.

One compensation: a rank's loss is a share of the batch's, and is multiplied by the number of ranks.
After an overflow ``GradScaler`` leaves the optimizer's step out, and with it the mean and the
averager's count (pytorch/pytorch#76282): a loss scaler is refused.

Cost: as ``reference/local_sgd``, in one call.  Numbers: as its.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Kind, Piece, Refused
from shardproof.impls.pytorch.adapter import Adapter
from shardproof.impls.pytorch.ddp import VARYING
from shardproof.impls.reference.engine.choices import declared
from shardproof.impls.reference.engine.optimizer import build_optimizer, param_groups, slot_pieces
from shardproof.impls.reference.engine.options import at_least, parse_options

_UNUSED = "the averager uses only parameters that have a gradient on this rank"
_WITHOUT_DATA = "a rank without gradients averages nothing, and the other ranks wait for it"
_SKIPS = "GradScaler skips the averaging when it skips the update (pytorch/pytorch#76282)"


@dataclass(frozen=True)
class Options:
    """``every``: the averager's ``period``."""

    every: int = 8

    def __post_init__(self) -> None:
        at_least("every", self.every, 2)


class PyTorchPostLocalSGD(Adapter):
    """The adapter."""

    strategy = "post_local_sgd"
    depth = "layout"
    averager_type: ClassVar[type[PeriodicModelAverager]] = PeriodicModelAverager
    optimizer_type: ClassVar[type[PostLocalSGDOptimizer]] = PostLocalSGDOptimizer

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Trajectories that meet; all ranks must use the same parameters."""
        parse_options(Options, options)
        declines = dict.fromkeys(("unused", *VARYING), _UNUSED)
        declines |= {"unequal_micro_batches": _WITHOUT_DATA, "overflow_on_one_rank": _SKIPS}
        return declared(
            exactness="reordered-sum", oracle="emulated", emulates="trajectory", declines=declines
        )

    @classmethod
    def meeting(cls, options: Mapping[str, Any]) -> Meeting:
        """The mean after steps 0, ``every``, ..."""
        return Meeting(parse_options(Options, options).every)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options; gradients are those of a share, times the number of ranks."""
        self.options = parse_options(Options, options)
        self.comm = mesh.comm("replicate")
        self.loss_factor = self.comm.size

    def shard(self, module: nn.Module) -> nn.Module:
        """The whole model on every rank."""
        return module

    def updated(self) -> dict[str, Tensor]:
        """All trained parameters."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's own optimizer inside PostLocalSGDOptimizer, over the group of the axis."""
        if self.spec.scaler is not None:
            raise Refused(f"optimizer.scaler: {_SKIPS}; leave the scaler out")
        averager = self.averager_type(self.options.every, process_group=self.comm.group)
        self.local = build_optimizer(self.spec, param_groups(self.spec, self.updated()))
        return self.optimizer_type(self.local, averager)

    def clip(self, limit: float) -> Tensor:
        """Scale this rank's gradients to a norm of at most ``limit``; return the norm before."""
        return nn.utils.clip_grad_norm_(list(self.updated().values()), limit, foreach=False)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Whole tensors."""
        if kind == "optimizer":
            return slot_pieces(self.local, self._place)
        if kind == "buffers":
            return self.buffers()
        named: dict[str, Tensor] = dict(self.module.named_parameters())
        if kind == "gradients":
            named = {n: p.grad for n, p in self.updated().items() if p.grad is not None}
        rank = self.comm.rank
        return [Piece.whole(n, t.detach(), replica=rank) for n, t in named.items()]

    def _place(self, name: str, slot: str, tensor: Tensor) -> Piece:
        return Piece.whole(f"{name}.{slot}", tensor, replica=self.comm.rank)


@dataclass(frozen=True)
class Meeting:
    """The meeting for the oracle: the averager's rule in one process."""

    every: int

    def begin(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Nothing to store."""
        return {}

    def meets(self, step: int) -> bool:
        """After the first step, and after every ``every``-th step from there."""
        return step % self.every == 0

    def meet(
        self, ends: Sequence[Mapping[str, Tensor]], kept: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Divide each, then sum all in the order of ranks."""
        met = {name: ends[0][name] / len(ends) for name in ends[0]}
        for end in ends[1:]:
            met = {name: value + end[name] / len(ends) for name, value in met.items()}
        return met, {}


IMPLEMENTATION = PyTorchPostLocalSGD
