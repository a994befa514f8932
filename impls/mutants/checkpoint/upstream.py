"""Faults around upstream checkpoints: state given to torch or returned by it is not passed on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from shardproof.case import CheckpointPlan, WorkloadSpec
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import ADAMW
from shardproof.impls.pytorch.checkpoint.full import Full
from shardproof.impls.pytorch.checkpoint.state import State, Training
from shardproof.impls.pytorch.ddp import PyTorchDDP
from shardproof.impls.pytorch.tensor_parallel import PyTorchTensorParallel

mutant = declare.family(
    PyTorchDDP,
    killed_by=("checkpoint",),
    backend="gloo",
    checkpoint=CheckpointPlan(save_at=2),
    optimizer=ADAMW,
    steps=3,
)
FULL: Mapping[str, Any] = {"checkpoint": {"format": "full"}}
#: Heads of 4: 16 rows of queries, 8 of keys, 8 of values.
FEWER_KEYS: Mapping[str, Any] = {"layers": 1, "width": 16, "seq": 8, "heads": 4, "kv_heads": 2}


@mutant(
    "torch_saves_no_optimizer", says="optimizer state was not loaded", zoo=("K16",), options=FULL
)
class NoOptimizer(Full):
    """Only the model's state is passed to torch."""

    def put(self, training: Training, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        set_model_state_dict(training.modules[0], model)


@mutant("torch_loads_no_generators", says=r"the RNG of rank 0 \(torch\) was not loaded")
class NoGenerators(State):
    """Generators are saved but not restored."""

    def put(self) -> Mapping[str, Any]:
        self.tree["rng"] = {}
        return super().put()


@mutant("torch_saves_rounded", says="parameters were not loaded: .* elements of .* differ")
class Rounded(State):
    """Tensors are passed to torch in float32 and cast back silently on loading."""

    def _as_saved(self, name: str, value: Any) -> Any:
        kept = super()._as_saved(name, value)
        if isinstance(kept, torch.Tensor) and kept.dtype == torch.float64:
            return kept.float()
        return kept


@mutant(
    "torch_saves_fused_rows_in_thirds",
    says=r"parameters were not loaded: \d+ of \d+ elements of '.*qkv.weight' differ",
    parent=PyTorchTensorParallel,
    mesh={"tensor": 2},
    workload=WorkloadSpec("charnames_gpt", params=FEWER_KEYS),
    checkpoint=CheckpointPlan(save_at=2, into={"mesh": {"tensor": 1}}),
)
class FusedRowsInThirds(PyTorchTensorParallel):
    """Rows of fused projections are reordered as if keys and values had as many heads as
    queries.
    """

    def row_orders(self) -> Mapping[str, Sequence[int]]:
        ranks = self.mesh.size("tensor")
        orders = {}
        for name, order in super().row_orders().items():
            third = len(order) // 3
            cut = third // ranks
            places = itertools.product(range(ranks), range(3), range(cut))
            rows = [part * third + rank * cut + row for rank, part, row in places]
            orders[name] = [*rows, *range(len(rows), len(order))]
        return orders
