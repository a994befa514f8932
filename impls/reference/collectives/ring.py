"""Ring all-reduce: a ring reduce-scatter, then a ring all-gather of the sums.

    chunks           c0        c1        c2        c3
    at first         a rank's own values everywhere
    reduce-scatter   N - 1 rounds: rank r has the sum of chunk r      (ring_reduce_scatter.py)
    all-gather       N - 1 rounds: all ranks have all sums            (ring_all_gather.py)

    3 ranks, one vector of 3 elements each, one element a chunk; * is complete

    round           rank 0            rank 1            rank 2
              a0    b0    c0    a1    b1    c1    a2    b2    c2
      0       sends c to 1      sends a to 2      sends b to 0
              a0    b02   c0    a1    b1    c01   a12   b2    c2
      1       sends b to 1      sends c to 2      sends a to 0
              a*    b02   c0    a1    b*    c01   a12   b2    c*
      2       sends a to 1      sends b to 2      sends c to 0
      3       sends c to 1      sends a to 2      sends b to 0
              a*    b*    c*    a*    b*    c*    a*    b*    c*

Cost.  The two halves add up: rank r sends 2n - c_r - c_{r+1} elements in
2m - [r < m] - [(r + 1) mod N < m] messages, m = min(n, N), in 2 (N - 1) rounds (0 if n = 0).
Over all ranks exactly 2 (N - 1) n elements.  In seconds 2(N-1) alpha + 2(N-1)/N n beta +
(N-1)/N n gamma: Patarasuk and Yuan (2009), Bandwidth optimal all-reduce algorithms, where
2(N-1)/N n is shown to be the least that any all-reduce sends.  Best for long vectors on few ranks:
its latency grows with N.
Numbers: every sum is made once, along the ring, and then copied: equal bits on all ranks.
Left out: nothing; any N, any length.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.impls.reference.collectives import ring_all_gather, ring_reduce_scatter
from shardproof.impls.reference.collectives.schedule import Round


def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
    """Sum over ranks, on every rank."""
    yield from ring_reduce_scatter.rounds(rank, size, length)
    yield from ring_all_gather.rounds(rank, size, length)
