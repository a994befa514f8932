"""Ring all-gather: every rank forwards the last received chunk until all ranks have all chunks.

    4 ranks; rank r begins with chunk r; every rank sends to its right neighbour (3 to 0)

    round     rank 0        rank 1        rank 2        rank 3
      0       c0 ->         c1 ->         c2 ->         c3 ->       its own
      1       c3 ->         c0 ->         c1 ->         c2 ->       what round 0 brought
      2       c2 ->         c3 ->         c0 ->         c1 ->       what round 1 brought

    round t: rank r sends chunk r - t, and receives r - 1 - t.

Cost.  A rank sends every chunk but its right neighbour's: n - c_{r+1} elements (indices modulo N),
in m - [(r + 1) mod N < m] messages, where m = min(n, N) chunks are not empty.  Rounds: N - 1 (0 if
n = 0).  In seconds (N-1) alpha + (N-1)/N n beta: Thakur, Rabenseifner and Gropp (2005), section
4.1; the second term is the least possible, for a rank must receive what it does not have.
Numbers: copies; all ranks end with equal bits.
Left out: nothing; any N, any length.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives.schedule import Replace, Round, Send, cut


def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
    """Rank r starts with the r-th of ``size`` chunks; all ranks end with all chunks."""
    chunks = cut(range(length), size)
    left, right = (rank - 1) % size, (rank + 1) % size
    for t in range(size - 1):
        yield [Send(right, chunks[(rank - t) % size]), Replace(left, chunks[(rank - 1 - t) % size])]
