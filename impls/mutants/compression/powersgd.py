"""Faults of PowerSGD: its bases and their initial values."""

from __future__ import annotations

from torch import Tensor

from shardproof.impls.mutants import declare
from shardproof.impls.mutants.compression.triggers import (
    POWERSGD,
    sent_by,
)
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.parts.compressors.powersgd import PowerSGD
from shardproof.impls.reference.parts.flat import Part

mutant = declare.family(
    ReferenceDDP, options=sent_by(POWERSGD), killed_by=("equivalence", "compression")
)


@mutant("powersgd_not_orthonormal", says="residual@0' at step 0")
class NotOrthonormal(PowerSGD):
    """Columns of P are not orthonormalized, so P Q^T is not a projection."""

    def orthonormal(self, p: Tensor) -> Tensor:
        return p


@mutant("powersgd_only_normed", says="residual@0' at step 0")
class OnlyNormed(PowerSGD):
    """Columns of P are normalized but not made orthogonal to each other."""

    def orthonormal(self, p: Tensor) -> Tensor:
        return p / p.norm(dim=0)


@mutant("powersgd_starts_cold", says="no rank holds .*factor@0")
class StartsCold(PowerSGD):
    """Q is redrawn in every step, so directions never improve."""

    def remember(self, part: Part, q: Tensor) -> None:
        pass


@mutant(
    "powersgd_factor_by_rank",
    says="residual@0' at step 0",
)
class FactorByRank(PowerSGD):
    """Each rank starts with its own directions, so the products cannot be summed."""

    def factor(self, part: Part, size: int, like: Tensor) -> Tensor:
        first = super().factor(part, size, like)
        return first if part.name in self.factors else first * (1.0 + self.place)


@mutant(
    "powersgd_in_fp32",
    says="are those of rounding to float32",
)
class InFp32(PowerSGD):
    """The basis is computed in fp32, whatever the dtype of the gradients."""

    def orthonormal(self, p: Tensor) -> Tensor:
        return super().orthonormal(p.float()).to(p.dtype)
