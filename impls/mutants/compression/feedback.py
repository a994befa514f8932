"""Faults of error feedback: residuals that are lost, mixed up or counted twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.comm import Comm
from shardproof.contract import Piece
from shardproof.impls.mutants import declare
from shardproof.impls.mutants.compression.triggers import FP16, POWERSGD, TOPK, sent_by
from shardproof.impls.mutants.triggers import gpt
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.parts.compressors.compressor import Finish
from shardproof.impls.reference.parts.compressors.feedback import Feedback
from shardproof.impls.reference.parts.compressors.powersgd import PowerSGD
from shardproof.impls.reference.parts.compressors.topk import TopK
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, Work
from shardproof.impls.reference.zero2 import ReferenceZero2

BOTH: Mapping[str, Any] = {"killed_by": ("equivalence", "compression")}

mutant = declare.family(ReferenceDDP, ReferenceZero2, options=sent_by(TOPK), **BOTH)


@mutant("feedback_keyed_by_memory", says="residual@0' at step 1", zoo=("G01",))
class KeyedByMemory(Feedback):
    """Residuals are keyed by their source tensor, which changes when buckets are rebuilt."""

    def __init__(self, place: int, ranks: int) -> None:
        super().__init__(place, ranks)
        self.homes: dict[str, int] = {}

    def add_to(self, bucket: Bucket) -> None:
        known = self.residuals
        here = {name: view.data_ptr() for name, view in bucket.views().items()}
        self.residuals = {n: r for n, r in known.items() if here.get(n) == self.homes[n]}
        super().add_to(bucket)
        self.residuals = known
        self.homes |= here


@mutant("feedback_zeroed_on_rebuild", says="residual@0' at step 1", zoo=("G02",))
class ZeroedOnRebuild(Feedback):
    """A bucket with new members starts with zero residuals."""

    def __init__(self, place: int, ranks: int) -> None:
        super().__init__(place, ranks)
        self.members: dict[str, list[str]] = {}

    def add_to(self, bucket: Bucket) -> None:
        for name in bucket.names:
            if self.members.get(name, bucket.names) != bucket.names:
                self.residuals[name].zero_()
            self.members[name] = bucket.names
        super().add_to(bucket)


@mutant("feedback_dropped", says="residual@0' at step 1")
class Dropped(Feedback):
    """Residuals are kept but never added to a gradient."""

    def add_to(self, bucket: Bucket) -> None:
        pass


@mutant("feedback_applied_twice", says="residual@0' at step 1")
class AppliedTwice(Feedback):
    """Residuals are added to the next gradient twice."""

    def add_to(self, bucket: Bucket) -> None:
        super().add_to(bucket)
        super().add_to(bucket)


@mutant(
    "feedback_averaged",
    says="each rank keeps the global residual",
    zoo=("G19",),
    options=sent_by({**TOPK, "density": 0.5}),
)
class Averaged(TopK):
    """Each rank keeps the global residual instead of its own; the sum over ranks stays right."""

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        wanted, work = bucket.flat.clone(), super().start(bucket, comm)

        def average() -> None:
            work.wait()
            self.keep(bucket, wanted - bucket.flat / comm.size)

        return Finish((), average)


@mutant(
    "feedback_averaged_powersgd",
    says="each rank keeps the global residual",
    zoo=("G19",),
    killed_by=("compression",),
    options=sent_by(POWERSGD),
)
class AveragedPowerSGD(PowerSGD):
    """As feedback_averaged, for PowerSGD: the applied gradients stay right, because low rank is
    linear in the sum.
    """

    def start(self, bucket: Bucket, comm: Comm) -> Work:
        wanted, work = bucket.flat.clone(), super().start(bucket, comm)

        def average() -> None:
            work.wait()
            left = wanted - bucket.flat / comm.size
            self.keep_low([part for part in bucket.parts if part.name in self.factors], left)

        return Finish((), average)


@mutant("feedback_keeps_what_was_sent", says="the residual still contains what was sent")
class KeepsWhatWasSent(Feedback):
    """Residuals are whole gradients: the sent part is not subtracted."""

    def add_to(self, bucket: Bucket) -> None:
        super().add_to(bucket)
        self.wanted = {name: view.clone() for name, view in bucket.views().items()}

    def keep(self, part: Part, left: Tensor) -> None:
        super().keep(part, self.wanted[part.name])


@mutant("feedback_fades", says="the residual is 0.9 times")
class Fades(Feedback):
    """A tenth of each residual is lost in every step."""

    def keep(self, part: Part, left: Tensor) -> None:
        super().keep(part, left * 0.9)


@mutant("feedback_kept_in_fp16", says="residual@0' at step 0", options=sent_by(FP16))
class KeptInFp16(Feedback):
    """Residuals are kept in the dtype of the message, which rounds most of them away."""

    def keep(self, part: Part, left: Tensor) -> None:
        super().keep(part, left.to(torch.float16).to(left.dtype))


@mutant(
    "feedback_not_saved",
    says="reload does not hold",
    killed_by=("relations",),
    expect={"relation": "reload"},
    steps=4,
)
class NotSaved(Feedback):
    """Training resumes from a saved state without residuals."""

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces if ".residual@" not in piece.name]


@mutant(
    "feedback_of_the_first_round_only",
    parent=ReferenceZero2,
    says="residual@0' at step 0",
    options={"bucket_bytes": 8 * 1024, "compress": TOPK},
    mesh={"shard": 2},
)
class FirstRoundOnly(Feedback):
    """Residuals are added to the first micro-batch only, although every micro-batch is reduced."""

    def __init__(self, place: int, ranks: int) -> None:
        super().__init__(place, ranks)
        self.steps: dict[str, int] = {}

    def add_to(self, bucket: Bucket) -> None:
        if self.steps.get(bucket.names[0]) != bucket.step:
            super().add_to(bucket)
        self.steps[bucket.names[0]] = bucket.step


@mutant(
    "feedback_lost_while_unused",
    says="the residual is zero.*conditional_early_step",
    killed_by=("compression",),
    workload=gpt("conditional_early_step"),
)
class LostWhileUnused(Feedback):
    """A rank without a gradient of a parameter sends nothing for it and drops its residual."""

    def add_to(self, bucket: Bucket) -> None:
        for name, view in bucket.views().items():
            if name in self.residuals and not view.any():
                self.residuals[name].zero_()
        super().add_to(bucket)
