"""fairscale's ``OSS`` with torch's DDP, unmodified.

Used: ``OSS`` around torch's optimizer class; DDP with its defaults over the default group; torch's
clipping, for every rank has all gradients (``OSS.clip_grad_norm`` would scale only what a rank
owns).  Whole parameters go to ranks, each to the one with the fewest
elements so far; after the update every rank broadcasts what it owns.

One compensation: DDP divides by the ranks, so the loss is multiplied by them.  Cost: DDP's, and
one broadcast of all trained parameters.  Tried with fairscale 0.4.13.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.contract import Kind, Piece
from shardproof.impls.ecosystem.whole import DDP_FEATURES, Whole
from shardproof.impls.reference.engine.optimizer import (
    param_groups,
    unnamed_groups,
)

if importlib.util.find_spec("fairscale") is not None:
    import fairscale.optim


class FairscaleOSS(Whole):
    """The adapter."""

    strategy = "zero1"
    package = "fairscale"
    axis = "shard"
    features = DDP_FEATURES

    def shard(self, module: nn.Module) -> nn.Module:
        """DDP with its defaults."""
        return DistributedDataParallel(module)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer over this rank's parameters, inside OSS."""
        spec = self.spec
        groups = unnamed_groups(param_groups(spec, self.updated()))
        self.oss: Any = fairscale.optim.OSS(
            groups, optim=spec.kind, **spec.arguments, foreach=False
        )
        return self.oss

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Reduce in the last micro-batch only."""
        return nullcontext() if is_last else self.module.no_sync()  # type: ignore[operator]

    def local_state(self, kind: Kind) -> list[Piece]:
        """Optimizer state of this rank's parameters; the rest whole."""
        if kind != "optimizer":
            return super().local_state(kind)
        return [
            self.slot(name, slot, value)
            for name, parameter in self.updated().items()
            for slot, value in self.oss.optim.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]

    def slot(self, name: str, slot: str, tensor: Tensor) -> Piece:
        """The only copy of a slot; of a counter, one copy per rank."""
        replica = self.mesh.rank if slot == "step" else 0
        return Piece.whole(f"{name}.{slot}", tensor, replica=replica)


IMPLEMENTATION = FairscaleOSS
