"""Error feedback: the unsent part of a gradient is added to the next one.

Problem.  A compressor drops something in every step, and always alike: the small elements, the
weak directions.  What is never sent is never learned.  So each rank remembers what it dropped, and
adds it to its next gradient; sooner or later everything is sent.

    what                        where
    residuals                   every rank its own, one for each parameter, of its size and dtype

    step     wanted   = gradient + residual       [1] add_to
             sent     = what others learn of it
             residual = wanted - sent             [2] keep

The difference is taken from what *this* rank sent, not from the sum or mean of all ranks: what one
rank lost is not made good by another (epfml/powersgd, issue 3, is about the other way).

Residuals are found by the parameter's name: buckets are laid out anew, tensors come and go.
Another number of ranks goes on from all of them: rank q of Q takes those of q, q + Q, ... together,
so that their sum, which is what training still owes, stays.

Cost: n elements per rank, whatever the strategy shards.
Numbers: sent + residual = gradient + old residual; bit for bit where a residual is what is left
after setting to zero, or a difference without rounding.
Source: Karimireddy et al., arXiv 1901.09847, algorithm 2; Stich et al., arXiv 1809.07599.
Left out: a residual of a parameter that nobody uses any more is sent, and dropped with its
gradient (one of a sharded unit that nobody calls any more stays); residuals under a loss scale,
which changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardproof.contract import Piece
from shardproof.impls.reference.parts.flat import Part
from shardproof.impls.reference.parts.reducers import Bucket, rank_piece, slot_of

SLOT = ".residual"


class Feedback:
    """Residuals of one rank, number ``place`` of ``ranks``."""

    def __init__(self, place: int, ranks: int) -> None:
        self.place, self.ranks = place, ranks
        self.residuals: dict[str, Tensor] = {}

    def add_to(self, bucket: Bucket) -> None:  # [1]
        """Add the residuals to the gradients."""
        for name, view in bucket.views().items():
            if name in self.residuals:
                view.add_(self.residuals[name].view(-1))

    def keep(self, part: Part, left: Tensor) -> None:  # [2]
        """Store ``left``, the one-dimensional unsent part of the parameter of ``part``."""
        if part.name in self.residuals:
            self.residuals[part.name].view(-1).copy_(left)
        else:
            self.residuals[part.name] = left.clone().view(part.shape)

    def pieces(self) -> list[Piece]:
        """Residuals, as state of this rank only."""
        held = self.residuals.items()
        return [rank_piece(f"{name}{SLOT}", tensor, self.place) for name, tensor in held]

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Replace all residuals, summing several of one parameter; return the other pieces."""
        found: dict[str, Tensor] = {}
        rest = []
        for piece in pieces:
            name, slot, _ = piece.name.rpartition(f"{SLOT}@")
            if not slot:
                rest.append(piece)
            elif name in found:
                found[name] += piece.tensor
            else:
                found[name] = piece.tensor.clone()
        self.residuals = found
        return rest


def successor(name: str, saved: int, place: int, ranks: int) -> bool:
    """Whether rank ``place`` of ``ranks`` resumes state of one of ``saved`` ranks.

    Residuals are all taken, each by one; of what all have alike each takes the first rank's.
    """
    number = name.rpartition("@")[2]
    if number == "all":
        return True
    if saved == ranks:
        return int(number) == place
    return int(number) % ranks == place if slot_of(name) == "residual" else number == "0"
