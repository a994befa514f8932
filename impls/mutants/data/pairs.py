"""Faults that show between two runs: state that gets lost on its way, values that are a step old.

``expect`` names the relation to the second run.  The run itself is right, or wrong by less than any
bound of a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardproof.case import WorkloadSpec
from shardproof.contract import Kind, OptimizerSpec, Piece
from shardproof.impls.mutants import declare
from shardproof.impls.reference.engine.state import copy_pieces
from shardproof.impls.reference.fsdp import ReferenceFSDP
from shardproof.impls.reference.parts.owned_bucket import OwnedBucket
from shardproof.impls.reference.zero1 import ReferenceZero1, Zero1
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
    given = usual | fields
    return declare.mutant(name, parent=parent, parent_name=f"reference/{parent.strategy}", **given)


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
        # Drops what has no place yet, where the parent makes one.
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
        # Without masters the parent loads parameters only, and starts nothing again from them.
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
    "zero1_averages_then_multiplies",
    ReferenceZero1,
    summary="gradients are divided by the ranks before the sum and multiplied after it",
    expect=AS_DDP,
    mesh={"shard": 3},
    lane="bitwise",
    dtype="float32",
)
class AveragesThenMultiplies(Zero1):
    # A third of a number is rounded on every CPU, element by element: no order of sums decides.
    def send(self, bucket: OwnedBucket) -> None:
        bucket.complete().div_(self.comm.size)
        super().send(bucket)

    def gradient(self, bucket: OwnedBucket) -> Tensor:
        return super().gradient(bucket).mul_(self.comm.size)


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
            # Whole before the update, so that nobody gathers it afterwards.
            handle.units[-1].wait()
        super().update()
