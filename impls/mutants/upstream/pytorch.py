"""Faults of an adapter around an upstream system."""

from __future__ import annotations

from shardproof.impls.mutants import declare
from shardproof.impls.pytorch.ddp import PyTorchDDP

mutant = declare.family(PyTorchDDP, options={"bucket_cap_mb": 0.05})


@mutant("pytorch_ddp_uncompensated", says="2 times too small .*ranks", killed_by=("equivalence",))
class Uncompensated(PyTorchDDP):
    """The adapter forgets that DDP divides by the number of ranks."""

    def loss_factor(self) -> int:
        return 1
