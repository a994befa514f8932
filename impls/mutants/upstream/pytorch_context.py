"""Faults around PyTorch's ring attention: a cut that it does not assume, and a mean."""

from __future__ import annotations

import torch
from torch import Tensor

from shardproof.contract import MicroBatch
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import gpts
from shardproof.impls.pytorch.context import PyTorchContext

gpt = gpts(layers=1, width=16, seq=12, global_batch=4, micro_batches=2)
mutant = declare.family(
    PyTorchContext, mesh={"context": 2}, workload=gpt(), options={"convert_to_f32": False}
)


@mutant(
    "torch_context_cuts_evenly_and_balances",
    says="'loss' at step 0, forward",
    killed_by=("equivalence",),
)
class CutsEvenlyAndBalances(PyTorchContext):
    """Each rank takes the next positions, but the ring masks blocks as if chunks alternated."""

    def rows(self, micro: MicroBatch) -> Tensor:
        super().rows(micro)  # sets torch's options
        every = torch.arange(micro.targets.shape[1])
        return every.chunk(self.ring.size())[self.ring.get_local_rank()]


@mutant(
    "torch_context_averages_over_positions",
    says="every gradient is 2 times too small",
    killed_by=("equivalence",),
    mesh={"replicate": 2, "context": 2},
)
class AveragesOverPositions(PyTorchContext):
    """The loss is multiplied by the replicas alone, but DDP also divides by the context ranks."""

    def loss_factor(self) -> int:
        return self.mesh.size("replicate")
