"""Hugging Face accelerate with its FSDP plugin on CPUs: nothing is sharded.

The same calls as ``accelerate_ddp``, with ``FullyShardedDataParallelPlugin(fsdp_version=2)``.  On
CPUs accelerate drops the plugin and prepares the model as DDP, without a word: every rank holds
all.  Were it to shard, the pieces would be the local chunks of ``pytorch/fsdp2``.  Tried with
accelerate 1.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Depth
from shardproof.impls.ecosystem.accelerate_ddp import Accelerated
from shardproof.impls.ecosystem.whole import DDP_DECLINES, NoOptions, process_capabilities
from shardproof.impls.pytorch.fsdp2 import PyTorchFSDP2
from shardproof.impls.reference.engine.options import parse_options


class AccelerateFSDP(Accelerated, PyTorchFSDP2):
    """The adapter; pieces like those of FSDP2."""

    strategy = "fsdp"
    depth: ClassVar[Depth] = "family"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """FSDP's profile."""
        parse_options(NoOptions, options)
        usual = {"axes": ("shard",), "declines": DDP_DECLINES}
        return process_capabilities("accelerate", "wrapped_units", **usual)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options; there are none."""
        super().parse(options, mesh)

    def accelerator_arguments(self) -> dict[str, Any]:
        """The plugin."""
        from accelerate import FullyShardedDataParallelPlugin

        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}

    def shard(self, module: nn.Module) -> nn.Module:
        """The prepared model; names are those of the plain module."""
        prepared = super().shard(module)
        self.named = dict(module.named_parameters())
        return prepared

    def settle(self) -> None:
        """Leave the units as accelerate does."""


IMPLEMENTATION = AccelerateFSDP
