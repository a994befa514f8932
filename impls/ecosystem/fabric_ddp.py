"""Lightning Fabric with ``strategy="ddp"`` on CPUs, unmodified.

Used: ``launch``, ``setup_module`` (torch's DDP over the default group), ``setup_optimizers``,
``no_backward_sync``, ``backward``, ``clip_gradients``.

The launcher is named: left to itself Fabric asks every installed one, and an mpi4py without its MPI
beside it ends that search.

One compensation: DDP divides by the ranks, so the loss is multiplied by them.  Cost: as
``pytorch/ddp``.  Tried with lightning-fabric 2.6.6.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.impls.ecosystem.whole import DDP_FEATURES, Whole
from shardproof.impls.pytorch.adapter import Adapter

if importlib.util.find_spec("lightning_fabric") is not None:
    import lightning_fabric
    from lightning_fabric.plugins.environments import LightningEnvironment


class Fabricated(Adapter):
    """The common use of Fabric, for any strategy."""

    def launch(self, strategy: Any) -> Any:
        """A Fabric over all ranks that includes this process."""
        with self.mesh.environment(OMP_NUM_THREADS="1"):
            self.fabric = lightning_fabric.Fabric(
                accelerator="cpu",
                strategy=strategy,
                devices=self.mesh.world,
                plugins=[LightningEnvironment()],
            )
            self.fabric.launch()
        return self.fabric

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, set up by Fabric."""
        return self.fabric.setup_optimizers(super().make_optimizer())

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Reduce in the last micro-batch only."""
        return self.fabric.no_backward_sync(self.module, enabled=not is_last)

    def backward(self, loss: Tensor) -> None:
        """Run Fabric's backward."""
        self.fabric.backward(loss)

    def clip(self, limit: float) -> Tensor:
        """Clip with Fabric."""
        norm = self.fabric.clip_gradients(self.module, self.optimizer, max_norm=limit)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class FabricDDP(Fabricated, Whole):
    """The adapter."""

    package = "lightning_fabric"
    features = DDP_FEATURES

    def shard(self, module: nn.Module) -> nn.Module:
        """Fabric's wrapper around DDP."""
        return self.launch("ddp").setup_module(module)


IMPLEMENTATION = FabricDDP
