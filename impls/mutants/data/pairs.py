"""Faults that show between two runs: lost state, and values that are one step old.

``expect`` names the relation to the second run.  The run itself is right, or wrong by less than any
bound of a lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Kind, Piece
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.triggers import ADAMW, gpt
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

mutant = declare.family(
    ReferenceZero1,
    ReferenceZero2,
    ReferenceZero3,
    ReferenceFSDP,
    mesh={"shard": 2},
    optimizer=ADAMW,
    killed_by=("relations",),
)


@mutant("zero1_reload_restarts_counter", says=r"counter|\.step'", zoo=("K02",), expect=RELOAD)
class ReloadRestartsCounter(ReferenceZero1):
    """Moments are loaded, but Adam's step counter starts again."""

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        again = [
            replace(p, tensor=torch.zeros_like(p.tensor)) if p.name.endswith(".step") else p
            for p in pieces
        ]
        super().load_pieces(kind, again)


@mutant("zero3_reload_drops_new_slots", says="optimizer state", zoo=("K16",), expect=RELOAD)
class ReloadDropsNewSlots(ReferenceZero3):
    """State that a fresh optimizer does not hold yet is not loaded; before the first step that is
    all of it.
    """

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        # Drops what has no place yet, where the parent makes one.
        copy_pieces(self.local_state(kind), pieces)


@mutant(
    "zero2_reload_drops_masters",
    says="master",
    zoo=("O14",),
    expect=RELOAD,
    lane="working_precision",
    dtype="float32",
    precision={"parameters": "bfloat16"},
)
class ReloadDropsMasters(ReferenceZero2):
    """Masters start again from the parameters that were rounded from them."""

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        super().load_pieces(kind, [p for p in pieces if not p.name.endswith(".master")])


@mutant(
    "zero1_reload_keeps_masters",
    says="master",
    zoo=("K02",),
    expect=RELOAD,
    options={"offload": "optimizer"},
)
class ReloadKeepsMasters(ReferenceZero1):
    """Parameters are loaded, but not their masters on the host, so the update undoes the load."""

    def load_pieces(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        # Without masters the parent loads parameters only, and starts nothing again from them.
        masters, self.masters = self.masters, None
        super().load_pieces(kind, pieces)
        self.masters = masters


@mutant(
    "zero2_reload_leaves_buckets",
    says="non_contiguous",
    zoo=("K02",),
    expect=RELOAD,
    options={"offload": "optimizer"},
    workload=gpt("non_contiguous"),
)
class ReloadLeavesBuckets(Zero2):
    """A transposed parameter is loaded, but not its copy in the bucket, which the update uses."""

    def loaded(self) -> None:
        pass


@mutant(
    "zero1_averages_then_multiplies",
    says="round|reordered summation",
    expect=AS_DDP,
    mesh={"shard": 3},
    lane="bitwise",
    dtype="float32",
)
class AveragesThenMultiplies(Zero1):
    """Gradients are divided by the number of ranks before the sum and multiplied after it."""

    # A third of a number is rounded on every CPU, element by element: no order of sums decides.
    def send(self, bucket: OwnedBucket) -> None:
        bucket.complete().div_(self.comm.size)
        super().send(bucket)

    def gradient(self, bucket: OwnedBucket) -> Tensor:
        return super().gradient(bucket).mul_(self.comm.size)


@mutant(
    "fsdp_kept_parameters_outlive_update",
    says="embed.token.weight.*(step before|behind|old)",
    zoo=("F16",),
    expect=AS_FREED,
    options={"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": False},
    mesh={"replicate": 1, "shard": 2},
    steps=3,
)
class KeptParametersOutliveUpdate(ReferenceFSDP):
    """With kept parameters, one unit stays whole across the update and is one step behind."""

    def update(self) -> None:
        handle: Any = self.handle
        if handle.options.keeps_parameters:
            handle.gather(handle.units[-1])
            # Whole before the update, so that nobody gathers it afterwards.
            handle.units[-1].wait()
        super().update()
