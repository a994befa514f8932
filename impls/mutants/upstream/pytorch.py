"""Faults of an adapter around an upstream system."""

from __future__ import annotations

from functools import partial

from shardproof.impls.mutants import declare
from shardproof.impls.pytorch.ddp import PyTorchDDP

mutant = partial(
    declare.mutant,
    parent=PyTorchDDP,
    parent_name="pytorch/ddp",
    options={"bucket_cap_mb": 0.05},
)


@mutant(
    "pytorch_ddp_uncompensated",
    summary="the adapter forgets that DDP divides by the number of ranks",
    killed_by=("equivalence",),
)
class Uncompensated(PyTorchDDP):
    def loss_factor(self) -> int:
        return 1
