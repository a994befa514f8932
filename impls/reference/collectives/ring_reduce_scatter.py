"""Ring reduce-scatter: N partial sums travel round the ring, and each rank adds its own part.

The vector is cut into N chunks.  The sum of chunk c begins on rank c + 1 and goes round to the
right; after N - 1 hops it has met every rank and arrives, complete, on rank c.

    4 ranks; s2 is the sum of chunk 2 so far; every rank sends to its right neighbour (3 to 0)

    round     rank 0        rank 1        rank 2        rank 3
      0       s3 ->         s0 ->         s1 ->         s2 ->       own values
      1       s2 ->         s3 ->         s0 ->         s1 ->       2 ranks in it
      2       s1 ->         s2 ->         s3 ->         s0 ->       3 ranks in it
    then      has s0        has s1        has s2        has s3      all 4

    round t: rank r sends chunk r - 1 - t, and receives r - 2 - t, to which it adds its own.

Cost.  A rank sends every chunk but the one it keeps: n - c_r elements in N - 1 messages, where c_r
is the size of chunk r, n // N or one more.  With m = min(n, N) chunks that are not empty the
messages are m - [r < m].  Rounds: N - 1 (0 if n = 0): the chunk 0 moves in each of them.
In seconds (N-1) alpha + (N-1)/N n beta + (N-1)/N n gamma: Thakur, Rabenseifner and Gropp (2005),
Optimization of collective communication operations in MPICH, section 4.3 (pairwise exchange has the
same cost); Patarasuk and Yuan (2009), Bandwidth optimal all-reduce algorithms.
Both terms with n are the least possible: a rank must part with all but its own chunk.
Numbers: chunk c is summed in the order c+1, c+2, ..., c of the ranks, so another N, another length
or another rank count changes the bits; all is well defined, and nobody but rank c has the sum.
Left out: nothing; any N, any length.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives.schedule import Reduce, Round, Send, cut


def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
    """Sum over ranks: rank r ends with the r-th of ``size`` chunks; the rest is undefined."""
    chunks = cut(range(length), size)
    left, right = (rank - 1) % size, (rank + 1) % size
    for t in range(size - 1):
        yield [
            Send(right, chunks[(rank - 1 - t) % size]),
            Reduce(left, chunks[(rank - 2 - t) % size]),
        ]
