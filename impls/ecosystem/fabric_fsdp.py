"""Lightning Fabric with ``ModelParallelStrategy`` on CPUs: ``fully_shard`` of every block.

The same calls as ``fabric_ddp``.  Fabric makes the mesh and hands it over with the module; what is
sharded is the caller's: every block, then the root, as Fabric's documentation shows.  Fabric's
``FSDPStrategy`` asks for a GPU.

One compensation: ``fully_shard`` divides by the ranks, so the loss is multiplied by them.  Cost: as
``pytorch/fsdp2``.  Tried with lightning-fabric 2.6.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardproof.comm import Mesh
from shardproof.contract import Capabilities, Depth
from shardproof.impls.ecosystem.fabric_ddp import Fabricated
from shardproof.impls.ecosystem.whole import NoOptions, process_capabilities
from shardproof.impls.pytorch.fsdp2 import Options, PyTorchFSDP2
from shardproof.impls.reference.engine.options import parse_options


class FabricFSDP(Fabricated, PyTorchFSDP2):
    """The adapter; pieces like those of FSDP2."""

    strategy = "fsdp"
    depth: ClassVar[Depth] = "family"

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """FSDP's profile, without traits that ``fully_shard`` declines."""
        parse_options(NoOptions, options)
        features = ("wrapped_units", "accumulation_without_communication")
        usual = {"axes": ("shard",), "declines": Options().declines()}
        return process_capabilities("lightning_fabric", *features, **usual)

    def parse(self, options: Mapping[str, Any], mesh: Mesh) -> None:
        """The options; there are none."""
        super().parse(options, mesh)
        self.loss_factor = float(mesh.world)

    def shard(self, module: nn.Module) -> nn.Module:
        """Fabric's wrapper around the sharded module."""
        from lightning_fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(self.parallelize, self.mesh.world, 1)
        wrapped = self.launch(strategy).setup_module(module)
        self.named = dict(module.named_parameters())
        return wrapped

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard blocks, then the rest."""
        parts = [module.get_submodule(name) for name in self.build.units] + [module]
        self.sharded = [fully_shard(part, mesh=mesh["data_parallel"]) for part in parts]
        return module


IMPLEMENTATION = FabricFSDP
