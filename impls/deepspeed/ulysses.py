"""DeepSpeed's ``DistributedAttention`` (Ulysses) under torch's DDP.

    what                           where
    parameters, gradients, state   every rank, whole and equal, as in ``pytorch/ddp``
    positions                      the i-th of C equal parts, as DeepSpeed's data loader cuts them
    attention                      some of the heads, over all positions

    attention   forward    queries, keys, values: positions -> heads, an all-to-all each; the
                           model's own attention; results: heads -> positions
                backward   the same four, the other way round
    step        DDP over replicate x context: gradients are summed in the last backward

DeepSpeed's engine trains in fp32 at most (engine.py), so DDP is around the attention here.

Heads that the ranks do not divide take another path, on which DeepSpeed asks its globals, and not
the group that it was given, for the rank: ``register`` puts a mesh there, as
``deepspeed.initialize(mesh_param=...)`` does.  Without it such heads crash (docs/findings.md, 66).

One compensation: the loss is multiplied by what DDP divides by.
Cost: ``deepspeed_ulysses.payload_bytes``.  Numbers: the softmax of one device, head by head.
Left out: overlap by streams, fewer KV heads than ranks, lengths that the ranks do not divide.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.comm import environment
from shardproof.contract import Capabilities, MicroBatch, Refused
from shardproof.impls.deepspeed.engine import init_communication
from shardproof.impls.pytorch import ddp
from shardproof.impls.pytorch.context import CutPositions
from shardproof.impls.pytorch.parts.positions import check_length

if importlib.util.find_spec("deepspeed") is not None:
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups


@dataclass(frozen=True)
class Options(ddp.Options):
    """``register``: whether DeepSpeed's globals get a mesh with the axis of positions."""

    register: bool = True


class DeepSpeedUlysses(CutPositions):
    """The adapter."""

    strategy = "deepspeed_ulysses"
    options_type: ClassVar[type[Options]] = Options
    options: Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """Ranks are processes, because of DeepSpeed's globals."""
        usual = super().capabilities(options)
        return replace(usual, backends=("gloo",), packages=("deepspeed",))

    def prepare(self, module: nn.Module) -> None:
        """Put DeepSpeed's attention around each attention of ``module``."""
        self.group = self.mesh.comm("context")
        with environment(LOCAL_RANK=str(self.mesh.rank), LOCAL_SIZE=str(self.mesh.world)):
            init_communication()
        if self.options.register:
            groups.mesh_device = DeviceMesh.from_group(
                self.group.group, "cpu", mesh_dim_names=("sequence_parallel",)
            )
        super().prepare(module)
        self.around = {
            core: DistributedAttention(Local(core), self.group.group, scatter_idx=2, gather_idx=1)
            for core in self.positions.cores
        }

    def rows(self, micro: MicroBatch) -> Tensor:
        """The next positions after those of the rank before."""
        size = self.group.size
        length = check_length(micro, size, "DeepSpeed's all-to-alls send equal parts")
        every = torch.arange(length, device=micro.targets.device)
        return every.chunk(size)[self.group.rank]

    def attend(self, core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention of ``core``, by some heads over all positions."""
        if key.shape[1] < self.group.size:
            raise Refused(
                f"the model has {key.shape[1]} KV heads, but the axis 'context' has "
                f"{self.group.size} ranks, and DeepSpeed needs at least one KV head per rank; set "
                f"context to at most {key.shape[1]}"
            )
        #   the model's (samples, heads, positions, size) -> DeepSpeed's (samples, positions, ...)
        turned = (part.transpose(1, 2).contiguous() for part in (query, key, value))
        mixed: Tensor = self.around[core](*turned, 0)
        return mixed.transpose(1, 2)

    def close(self) -> None:
        """Take the mesh out of DeepSpeed's globals."""
        super().close()
        groups.mesh_device = None


class Local(nn.Module):
    """The attention of a model, as DeepSpeed calls it: heads behind positions."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.attention = core.attend

    def forward(self, *heads: Tensor) -> Tensor:
        """The mixed values of queries, keys and values over all positions."""
        every = torch.arange(heads[0].shape[1], device=heads[0].device)
        turned = tuple(part.transpose(1, 2) for part in heads)
        mixed: Tensor = self.attention(turned, every, every)
        return mixed.transpose(1, 2).contiguous()


IMPLEMENTATION = DeepSpeedUlysses
