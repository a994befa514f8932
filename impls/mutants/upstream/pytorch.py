"""Faults of an adapter around an upstream system."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.impls.mutants import declare
from shardproof.impls.pytorch.ddp import PyTorchDDP

mutant = declare.family(PyTorchDDP, options={"bucket_cap_mb": 0.05})


@mutant("pytorch_ddp_uncompensated", says="2 times too small .*ranks", killed_by=("equivalence",))
class Uncompensated(PyTorchDDP):
    """The adapter does not compensate for DDP's division by the number of ranks."""

    def loss_factor(self) -> int:
        return 1


def replace_head_weight(module: nn.Module) -> None:
    """Register a new weight of the head, as a fine-tuning script does."""
    head: Any = module.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())


@mutant(
    "pytorch_ddp_head_added_after_wrapping",
    says="head.weight.*not (reduced|summed)",
    zoo=("D04",),
    killed_by=("equivalence", "replicas"),
    options={"find_unused_parameters": True},
)
class HeadAddedAfterWrapping(PyTorchDDP):
    """The head's weight is a new parameter, unknown to DDP and never reduced."""

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        wrapped = super().wrap(module)
        replace_head_weight(module)
        return wrapped
