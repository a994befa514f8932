"""Reductions of a single member: nothing is sent, and its residuals are applied.

Of a group that compresses, one member may be all that stays.  What it has not sent so far is added
to its next gradients; from then on it owes nothing, until there are others again.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.comm import Comm
from shardproof.contract import Piece
from shardproof.impls.reference.parts.compressors.feedback import Feedback
from shardproof.impls.reference.parts.reducers import Bucket, Reducer, Work


class Owed(Reducer):
    """Sums of one rank."""

    slots = ("residual",)

    def __init__(self) -> None:
        self.feedback = Feedback(0, 1)

    def all_reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """Add the residuals to the gradients."""
        self.feedback.add_to(bucket)
        for name in bucket.names:
            self.feedback.residuals.pop(name, None)
        return super().all_reduce(bucket, comm)

    def pieces(self) -> list[Piece]:
        """The residuals."""
        return self.feedback.pieces()

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Load residuals from ``pieces``."""
        return self.feedback.load_pieces(pieces)
