"""Faults that show between two runs: state that gets lost on its way, values that are a step old.

``expect`` names the relation to the second run.  The run itself is right, or wrong by less than any
bound of a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardproof.case import WorkloadSpec
from shardproof.comm import Comm
from shardproof.contract import Kind, OptimizerSpec, Piece
from shardproof.impls.mutants import declare
from shardproof.impls.reference.engine.state import copy_pieces
from shardproof.impls.reference.fsdp import ReferenceFSDP
from shardproof.impls.reference.zero1 import Options, ReferenceZero1, Zero1
from shardproof.impls.reference.zero2 import ReferenceZero2, Zero2
from shardproof.impls.reference.zero3 import ReferenceZero3

RELOAD: Mapping[str, Any] = {"relation": "reload"}
AS_DDP: Mapping[str, Any] = {"relation": {"same_as": {"implementation": "reference/ddp"}}}
AS_FREED: Mapping[str, Any] = {
    "relation": {"same_as": {"options": {"reshard_after_forward": True}}},
}


def mutant(name: str, parent: Any, **fields: Any) -> Callable[[declare.C], declare.C]:
    """Declare a fault of ``parent`` that the check ``relations`` must see."""
    usual = {
        "mesh": {"shard": 2},
        "optimizer": OptimizerSpec("adamw", lr=0.003, weight_decay=0.1),
        "killed_by": ("relations",),
    }
    told = usual | fields
    return declare.mutant(name, parent=parent, parent_name=f"reference/{parent.strategy}", **told)


@mutant(
    "zero1_reload_restarts_counter",
    ReferenceZero1,
    zoo=("K02",),
    summary="moments are loaded, Adam's counter of steps starts again",
    expect=RELOAD,
)
class ReloadRestartsCounter(ReferenceZero1):
    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        again = [
            replace(p, tensor=torch.zeros_like(p.tensor)) if p.name.endswith(".step") else p
            for p in pieces
        ]
        super().load_pieces(kind, again)


@mutant(
    "zero3_reload_drops_new_slots",
    ReferenceZero3,
    zoo=("K16",),
    summary="what a fresh optimizer does not hold yet, which is everything, is not loaded",
    expect=RELOAD,
)
class ReloadDropsNewSlots(ReferenceZero3):
    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        copy_pieces(self.local_state(kind), pieces)


@mutant(
    "zero2_reload_drops_masters",
    ReferenceZero2,
    zoo=("O14",),
    summary="masters start again from the parameters that were rounded from them",
    expect=RELOAD,
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "bfloat16"},
)
class ReloadDropsMasters(ReferenceZero2):
    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        super().load_pieces(kind, [p for p in pieces if not p.name.endswith(".master")])


@mutant(
    "zero1_reload_keeps_masters",
    ReferenceZero1,
    zoo=("K02",),
    summary="parameters are loaded, their masters on the host are not: the update undoes the load",
    expect=RELOAD,
    options={"offload": "optimizer"},
)
class ReloadKeepsMasters(ReferenceZero1):
    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        masters, self.masters = self.masters, None
        super().load_pieces(kind, pieces)
        self.masters = masters


@mutant(
    "zero2_reload_leaves_buckets",
    ReferenceZero2,
    zoo=("K02",),
    summary="a transposed parameter is loaded, its place in the bucket, which is updated, is not",
    expect=RELOAD,
    options={"offload": "optimizer"},
    workload=WorkloadSpec("charnames_gpt", traits=("non_contiguous",)),
)
class ReloadLeavesBuckets(Zero2):
    def loaded(self) -> None:
        pass


@mutant(
    "zero1_makes_contiguous",
    ReferenceZero1,
    summary="a transposed parameter loses its strides: its products are rounded otherwise",
    expect=AS_DDP,
    workload=WorkloadSpec("charnames_gpt", traits=("non_contiguous",), params={"width": 20}),
    lane="bitwise",
    dtype="float32",
)
class MakesContiguous(Zero1):
    def __init__(self, module: nn.Module, comm: Comm, options: Options) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(module, comm, options)


@mutant(
    "fsdp_kept_parameters_outlive_update",
    ReferenceFSDP,
    zoo=("F16",),
    summary="where parameters are kept, one unit stays whole over the update and is a step behind",
    expect=AS_FREED,
    options={"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": False},
    mesh={"replicate": 1, "shard": 2},
)
class KeptParametersOutliveUpdate(ReferenceFSDP):
    def update(self) -> None:
        handle: Any = self.handle
        if handle.options.keeps_parameters:
            handle.gather(handle.units[-1])
            handle.units[-1].wait()
        super().update()
