"""fairscale's ``ShardedDataParallel`` with ``OSS``: gradients are reduced to their owners.

Used: the wrapper, its ``no_sync``, ``OSS`` and its ``clip_grad_norm``; ``optimizer.zero_grad()``
with torch's default.  That sets gradients to ``None``; the wrapper's buckets, whose views they
were, are filled no more, and from the second step on gradients are one rank's own.  Without buckets
(``reduce_buffer_size: 0``), or with the wrapper's ``zero_grad()``, it is sound.

One compensation: the wrapper divides by the ranks.  Cost: one reduction of all gradients to their
owners, and one broadcast of all trained parameters.  Tried with fairscale 0.4.13.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Kind, Piece
from shardproof.impls.ecosystem.fairscale_oss import FairscaleOSS
from shardproof.impls.reference.engine.options import parse_options

if importlib.util.find_spec("fairscale") is not None:
    from fairscale.nn.data_parallel import ShardedDataParallel


@dataclass(frozen=True)
class Options:
    """fairscale's argument: elements in a bucket of each owner; ``None``: its default, 2^23."""

    reduce_buffer_size: int | None = None


class FairscaleShardedDDP(FairscaleOSS):
    """The adapter."""

    strategy = "zero2"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities of OSS under DDP."""
        parse_options(Options, options)
        return super().capabilities({})

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The option with the bucket size."""
        size = parse_options(Options, options).reduce_buffer_size
        self.buckets = {} if size is None else {"reduce_buffer_size": size}
        super().parse({}, mesh)

    def shard(self, module: nn.Module) -> nn.Module:
        """The wrapper, which asks OSS for owners."""
        return ShardedDataParallel(module, super().make_optimizer(), **self.buckets)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which was made before the wrapper."""
        return self.oss

    def clip(self, limit: float) -> Tensor:
        """Clip with OSS, over this rank's parameters."""
        return self.oss.clip_grad_norm(limit)

    def local_state(self, kind: Kind) -> list[Piece]:
        """Gradients of this rank's parameters; the rest like OSS."""
        pieces = super().local_state(kind)
        if kind != "gradients":
            return pieces
        owned = {
            n for n, p in self.updated().items() if self.oss._param_to_rank[p] == self.mesh.rank
        }
        return [replace(piece, replica=0) for piece in pieces if piece.name in owned]


IMPLEMENTATION = FairscaleShardedDDP
