"""Faults of sign compression: votes, magnitudes and server residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardproof.impls.mutants import declare
from shardproof.impls.mutants.compression.triggers import (
    ONEBIT,
    SIGN,
    sent_by,
)
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.parts.compressors.onebit import OneBit
from shardproof.impls.reference.parts.compressors.sign import Sign
from shardproof.impls.reference.parts.compressors.signs import Served

SERVERS: Mapping[str, Any] = {
    "options": sent_by(ONEBIT),
    "killed_by": ("equivalence", "compression"),
}

mutant = declare.family(ReferenceDDP, options=sent_by(SIGN), killed_by=("equivalence",))


@mutant("sign_ties_lose", says="signs are flipped")
class TiesLose(Sign):
    """A tied vote counts as minus."""

    def serve(self, one: Served, signs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        _, size = super().serve(one, signs, sizes)
        return signs.sum(0) > 0, size


@mutant("sign_one_rank_decides", says="signs are flipped", mesh={"replicate": 3})
class OneRankDecides(Sign):
    """The first rank's signs are taken for the majority."""

    def serve(self, one: Served, signs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        _, size = super().serve(one, signs, sizes)
        return signs[0] > 0, size


@mutant("sign_of_one_magnitude", says="2 times too small")
class OfOneMagnitude(Sign):
    """Votes are multiplied by the mean magnitude of the ranks instead of the sum."""

    def serve(self, one: Served, signs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        plus, size = super().serve(one, signs, sizes)
        return plus, size / len(sizes)


@mutant(
    "onebit_magnitude_is_the_mean",
    says="residual@0' at step 0",
    killed_by=("equivalence", "compression"),
    options=sent_by(ONEBIT),
)
class MagnitudeIsTheMean(OneBit):
    """Signs are multiplied by the mean magnitude instead of norm over root of n."""

    def magnitude(self, values: Tensor) -> Tensor:
        return values.abs().mean()


@mutant("server_error_dropped", says="server_residual@all' at step 1", **SERVERS)
class ServerErrorDropped(OneBit):
    """The residual of the second compression is kept but never added."""

    def add_lost(self, name: str, total: Tensor) -> None:
        pass


@mutant("server_error_of_another", says="server_residual@all' at step 1", **SERVERS)
class ServerErrorOfAnother(OneBit):
    """Server residuals of two parameters of equal size are exchanged."""

    def add_lost(self, name: str, total: Tensor) -> None:
        alike = [n for n, piece in self.served.items() if piece.tensor.shape == total.shape]
        super().add_lost(alike[alike.index(name) - 1] if name in alike else name, total)


@mutant(
    "server_error_not_taken_out", says="server_residual@all' at step 0", options=sent_by(ONEBIT)
)
class ServerErrorNotTakenOut(OneBit):
    """The server keeps its whole sum, including the part that it sends back."""

    def add_lost(self, name: str, total: Tensor) -> None:
        super().add_lost(name, total)
        self.total = total.clone()

    def lose(self, one: Served, left: Tensor) -> None:
        super().lose(one, self.total)
