"""Double binary tree all-reduce: two pipelined trees, each for half of the vector.

In a binary tree half of the ranks are leaves, which send little.  So a second tree, in which the
leaves of the first are inner nodes, carries the other half of the vector.

    6 ranks, first tree                     second tree: its mirror image (rank 5 - r)

                  3                                  2
              .---'---.                          .---'---.
              1       5                          0       4
            .-'-.   .-'                          '-.   .-'-.
            0   2   4                              1   3   5

    leaves: 0, 2, 4                         leaves: 1, 3, 5

A tree over m places: the root is place 2^a - 1, where 2^a is the largest power of two in m; at its
left a complete tree of 2^a - 1 places, at its right a tree over the m - 2^a that are left.  So
places with even numbers are leaves, those with odd numbers inner nodes.  Where N is odd the second
tree is the first one shifted by one place, and one rank is a leaf twice.

The half of a tree is cut into S pieces, which follow each other up the tree and down again:

    depth D = 2, S = 3 pieces; u0 = piece 0 goes up, d0 = down

    round                 0     1     2     3     4     5
    depth 2 -> 1          u0    u1    u2
    depth 1 -> root             u0    u1    u2
    root -> depth 1                   d0    d1    d2
    depth 1 -> 2                            d0    d1    d2

Cost.  In tree i, which carries h_i of the n elements (h_0 = ceil(n/2), h_1 = floor(n/2)) in
S_i = ceil(h_i / PIECE) pieces, a rank sends to its parent, if it has one, and to each of its
children: h_i elements in S_i messages each time.  D = floor(lg N); rounds 2D + S_0 - 1 (0 if n = 0
or N = 1).  Over all ranks 2 (N - 1) n elements.  Sanders, Speck and Traeff (2009), Two-tree
algorithms for full bandwidth broadcast, reduction and scan: 2n elements per rank on average, while
all links work in both directions, at a latency that grows with lg N.  A single tree would send n
from a leaf and up to 3n from an inner node.
Numbers: every sum is made once, at a root, and then copied: equal bits on all ranks.
Left out: the paper's colouring of edges, by which no rank sends twice in one round; here one may
send to its parent and to both children at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.impls.reference.collectives.schedule import (
    Reduce,
    Replace,
    Round,
    Send,
    Transfer,
    cut,
)

#: Elements of a piece, at most: small enough to fill the tree soon, large beside a latency.
PIECE = 1 << 17


@dataclass(frozen=True)
class Node:
    """The position of a rank in a tree; ``depth`` is 0 at the root."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


def rounds(rank: int, size: int, length: int, piece: int = PIECE) -> Iterator[Round]:
    """Sum over ranks, on every rank; ``piece`` is the largest number of elements per piece."""
    halves = cut(range(length), 2)
    trees = [
        (node(rank, size, second), cut(half, max(1, -(-len(half) // piece))))
        for second, half in enumerate(halves)
    ]
    height, most = size.bit_length() - 1, max(len(pieces) for _, pieces in trees)
    for t in range(2 * height + most - 1 if height else 0):
        yield [transfer for own, pieces in trees for transfer in in_round(t, own, pieces, height)]


def in_round(t: int, own: Node, pieces: list[range], height: int) -> Iterator[Transfer]:
    """The transfers of one tree for a rank in round ``t``."""

    def at(first: int) -> range:
        """The piece of this round on an edge that carries piece 0 in round ``first``."""
        return pieces[t - first] if 0 <= t - first < len(pieces) else range(0)

    up, down = height - own.depth, height + own.depth
    for child in own.children:
        yield Reduce(child, at(up - 1))
    if own.parent is not None:
        yield Send(own.parent, at(up))
        yield Replace(own.parent, at(down - 1))
    for child in own.children:
        yield Send(child, at(down))


def node(rank: int, size: int, second: int) -> Node:
    """The node of ``rank`` in the first or the second tree."""

    def swap(number: int) -> int:
        """Rank -> position, and position -> rank, of the second tree: mirrored."""
        return size - 1 - number

    def shift(number: int, by: int) -> int:
        return (number + by) % size

    if not second:
        return place(rank, size)
    if size % 2 == 0:
        own = place(swap(rank), size)
        parent = None if own.parent is None else swap(own.parent)
        return Node(parent, tuple(map(swap, own.children)), own.depth)
    own = place(shift(rank, 1), size)
    parent = None if own.parent is None else shift(own.parent, -1)
    return Node(parent, tuple(shift(child, -1) for child in own.children), own.depth)


def place(wanted: int, size: int) -> Node:
    """Parent, children and depth of a position in the first tree."""
    low, high, parent, depth = 0, size, None, 0
    while True:
        root = top(low, high)
        if wanted == root:
            sides = ((low, root), (root + 1, high))
            return Node(parent, tuple(top(*side) for side in sides if side[0] < side[1]), depth)
        low, high = (low, root) if wanted < root else (root + 1, high)
        parent, depth = root, depth + 1


def top(low: int, high: int) -> int:
    """The root of a tree over positions ``low`` to ``high``."""
    return low + (1 << ((high - low).bit_length() - 1)) - 1
