"""Sign: the majority of the ranks decides the sign of every element.

Problem.  Which way an element should go takes one bit, and one bit has no size to be wrong about.
Ranks vote with the signs of their gradients, and everybody gets the sign that most have.  A rank
that is far off has one vote, however large its numbers are.

    what                        where
    nothing                     signs of this step depend on no other

    all_reduce   signs and mean magnitude of each parameter to the ranks that serve them (signs.py)
         wait    [1] count: plus where at least half of the ranks say so
                 [2] signs back to all, times the sum of the ranks' magnitudes

The vote alone would be a gradient of ones.  Times the mean magnitude of each parameter it keeps the
size of the gradient (Karimireddy et al., arXiv 1901.09847, section 5), and learning rates their
meaning.

Cost: bytes sent, over all N ranks: 2 (N-1) B for B = n/8 bytes, rounded up for each parameter, and
(N-1) N magnitudes for each parameter (Bernstein et al., arXiv 1810.05291, algorithm 1: one bit up
and one bit down).
Numbers: the vote is a sum of integers, so all backends agree; a tie is plus.
Left out: feedback, for the vote is no sum, so nobody knows what was lost of one rank's gradient:
see onebit.py.
"""

from __future__ import annotations

from torch import Tensor

from shardproof.impls.reference.parts.compressors.exchange import fold
from shardproof.impls.reference.parts.compressors.signs import Served, Signs


class Sign(Signs):
    """Majority vote of signs."""

    tells_magnitudes = False

    def magnitude(self, values: Tensor) -> Tensor:
        """The mean magnitude."""
        return values.abs().mean()

    def serve(self, one: Served, signs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """The majority sign, and the sum of all magnitudes, which every rank knows."""
        return signs.sum(0) >= 0, fold(sizes, sizes.dtype)  # [1], [2]
