"""Bytes of each rank in a collective made of sends and receives: closed formulas.

Written apart from the algorithms themselves (``impls/reference/collectives/``, where the docstring
of each derives its formula), so that a wrong one shows: tests hold both against each other for up
to 64 ranks, and the check ``traffic`` holds the formulas against what was sent.

N ranks, n elements; m = min(n, N) chunks are not empty, c_i = elements of chunk i; N = P + x with P
the largest power of two in N, k = lg P; all over ranks, tolerance 0:

    all_reduce       rounds                elements over all ranks   messages over all ranks
    ring             2 (N-1)               2 (N-1) n                 2 (N-1) m
    recursive_doubling  k + 2[x]           (P k + 2x) n              P k + 2x
    rabenseifner     2k + 2[x]             (2 (P-1) + 2x) n          2x + 2 sum_j 2^j ceil(m' / 2^j)
    binomial_tree    2 ceil(lg N)          2 (N-1) n                 2 (N-1)
    double_binary_tree  2 floor(lg N) + S-1   2 (N-1) n              2 (N-1) (S_0 + S_1)
    hierarchical     2 (L-1) + 2 (M-1)     2 (N-1) n                 by its rings
    reduce_scatter, all_gather: ring N-1   (N-1) n                   (N-1) m
    broadcast: binomial  ceil(lg N)        (N-1) n                   N-1

m' = min(n, P); j runs from 0 to k-1.  Nothing is sent for n = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from shardproof.costs import model
from shardproof.costs.model import Flow, Operation
from shardproof.costs.model_facts import ModelFacts

#: Elements of a piece of the double binary tree, at most.
PIECE = 1 << 17
#: A vector to be all-reduced has a lane for each so many elements, up to this many lanes.
#: Those of the implementation: tests/strategies/test_collectives.py compares them.
LANE, MOST_LANES = 1 << 18, 4
#: The collectives of the backend itself.
BACKEND = "backend"
#: Why ``overlap`` has nothing to count where they are not chosen.
ROUNDS_ARE_ALIKE = (
    "collectives are made of sends and receives, whose rounds run in waits: the log of calls "
    "does not tell which one starts a reduction or a gather"
)


@dataclass(frozen=True)
class Sent:
    """``rounds`` of the whole collective; messages and elements that one rank sends."""

    rounds: int
    messages: int
    elements: int

    def __add__(self, other: Sent) -> Sent:
        """One after the other."""
        return Sent(
            self.rounds + other.rounds,
            self.messages + other.messages,
            self.elements + other.elements,
        )


def chunk(length: int, parts: int, index: int) -> int:
    """Elements of a chunk: the first ``length % parts`` have one more than the rest."""
    return length // parts + (index % parts < length % parts)


def block(length: int, parts: int, first: int, count: int) -> int:
    """Elements of ``count`` chunks from ``first`` on."""
    least, larger = divmod(length, parts)
    return count * least + min(max(larger - first, 0), count)


def ring_reduce_scatter(rank: int, ranks: int, length: int) -> Sent:
    """All chunks but the rank's own."""
    chunks = min(length, ranks)
    rounds = (ranks - 1) * (length > 0)
    return Sent(rounds, chunks - (rank < chunks), length - chunk(length, ranks, rank))


def ring_all_gather(rank: int, ranks: int, length: int) -> Sent:
    """All chunks but the right neighbour's."""
    return ring_reduce_scatter((rank + 1) % ranks, ranks, length)


def ring(rank: int, ranks: int, length: int) -> Sent:
    """Both of them."""
    return ring_reduce_scatter(rank, ranks, length) + ring_all_gather(rank, ranks, length)


def recursive_doubling(rank: int, ranks: int, length: int) -> Sent:
    """The whole vector lg P times, and once more for a guest; a guest once."""
    return _folded(rank, ranks, length, _doubling)


def rabenseifner(rank: int, ranks: int, length: int) -> Sent:
    """Sibling blocks while halving, own blocks while doubling."""
    return _folded(rank, ranks, length, _halving_doubling)


def binomial_broadcast(rank: int, ranks: int, length: int, root: int = 0) -> Sent:
    """The whole vector to every child."""
    if not length:
        return Sent(0, 0, 0)
    children = _children((rank - root) % ranks, ranks)
    return Sent((ranks - 1).bit_length(), children, children * length)


def binomial_tree(rank: int, ranks: int, length: int) -> Sent:
    """Once up, but for rank 0, and once down to every child."""
    down = binomial_broadcast(rank, ranks, length)
    is_sent = int(rank > 0 and length > 0)
    return Sent(down.rounds, is_sent, is_sent * length) + down


def double_binary_tree(rank: int, ranks: int, length: int, piece: int = PIECE) -> Sent:
    """In each tree its half to every neighbour, in pieces."""
    if not length or ranks == 1:
        return Sent(0, 0, 0)
    halves = (length + 1) // 2, length // 2
    pieces = [-(-half // piece) for half in halves]
    # The place of a rank in the second tree: mirrored, or shifted by one where N is odd.
    places = rank, (rank + 1) % ranks if ranks % 2 else ranks - 1 - rank
    edges = [_neighbours(place, ranks) for place in places]
    # Up and down a tree's depth; every further piece follows one round behind.  The first half is
    # the longer one.
    rounds = 2 * (ranks.bit_length() - 1) + pieces[0] - 1
    messages = sum(n * count for n, count in zip(edges, pieces, strict=True))
    return Sent(rounds, messages, sum(n * half for n, half in zip(edges, halves, strict=True)))


def hierarchical(rank: int, ranks: int, length: int, ranks_per_node: int) -> Sent:
    """Rings inside a node, and one across nodes for the rank's own chunk."""
    node, place = divmod(rank, ranks_per_node)
    nodes, share = ranks // ranks_per_node, chunk(length, ranks_per_node, place)
    across = ring(node, nodes, share)
    #     ranks of 2 nodes       ring in a node, all chunks      ring across, the rank's own chunk
    #     0 1 2 | 3 4 5          0-1-2-0 and 3-4-5-3             0-3, 1-4, 2-5
    # Rounds are those of the whole group: of its largest chunk, which is the first.
    rounds = ring(0, nodes, chunk(length, ranks_per_node, 0)).rounds
    return ring(place, ranks_per_node, length) + Sent(rounds, across.messages, across.elements)


#: (operation, algorithm) -> what a rank sends; ``hierarchical`` also takes the ranks of a node.
FORMULAS: dict[tuple[str, str], Callable[..., Sent]] = {
    ("all_reduce", "ring"): ring,
    ("all_reduce", "recursive_doubling"): recursive_doubling,
    ("all_reduce", "rabenseifner"): rabenseifner,
    ("all_reduce", "binomial_tree"): binomial_tree,
    ("all_reduce", "double_binary_tree"): double_binary_tree,
    ("all_reduce", "hierarchical"): hierarchical,
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("all_gather", "ring"): ring_all_gather,
    ("broadcast", "binomial"): binomial_broadcast,
}


def sent(
    operation: str, algorithm: str, ranks: int, length: int, ranks_per_node: int = 0
) -> list[Sent]:
    """Bytes of each rank; a long vector is reduced in lanes, whose rounds are made together."""
    more = (ranks_per_node,) if algorithm == "hierarchical" else ()
    formula = FORMULAS[operation, algorithm]
    each = []
    for rank in range(ranks):
        own = [formula(rank, ranks, part, *more) for part in _lanes(operation, length)]
        messages, elements = sum(s.messages for s in own), sum(s.elements for s in own)
        each.append(Sent(max(s.rounds for s in own), messages, elements))
    return each


def most_lanes(facts: ModelFacts, operation: str, lengths: Iterable[int]) -> int:
    """The most lanes that a part of vectors of these lengths may be reduced in."""
    if algorithm(facts, operation)[0] == BACKEND:
        return 1
    return MOST_LANES if any(len(_lanes(operation, n)) > 1 for n in lengths) else 1


def _lanes(operation: str, length: int) -> list[int]:
    """Elements of the parts in which a vector is reduced at once."""
    parts = min(MOST_LANES, max(1, length // LANE)) if operation == "all_reduce" else 1
    return [chunk(length, parts, part) for part in range(parts)]


#: Elements and bytes of one, of what one call reduces or gathers.
Payload = tuple[int, int]


def algorithm(facts: ModelFacts, operation: str) -> tuple[str, int]:
    """The algorithm that the options choose for ``operation``, and the ranks of a node (or 0)."""
    chosen = facts.option(operation, BACKEND)
    if isinstance(chosen, str):
        return chosen, 0
    return str(chosen.get("algorithm", "hierarchical")), int(chosen["ranks_per_node"])


def over_send_recv(facts: ModelFacts, *operations: str) -> bool:
    """Whether one of ``operations`` is made of sends and receives in groups of several ranks."""
    return any(algorithm(facts, each)[0] != BACKEND for each in operations)


def flow(
    facts: ModelFacts,
    axis: str,
    operation: Operation,
    payloads: Iterable[Payload],
    times: int = 1,
    ranks: int | None = None,
) -> list[Flow]:
    """The flow of one collective per payload, made ``times`` times by every rank.

    ``ranks``: those of a group (``None``: all along the axis).  The payload is the whole output of
    an all-gather and the whole input of a reduce-scatter.
    """
    group = facts.size(axis) if ranks is None else ranks
    times *= facts.world // group
    name, nodes = algorithm(facts, operation)
    payloads = [payload for payload in payloads if payload[0]]
    if group == 1 or not payloads or not times:
        return []
    if name == BACKEND:
        sizes = [elements * item for elements, item in payloads]
        return model.grouped_flow(axis, operation, sizes, group, times)
    calls, sizes = [0] * group, [0] * group
    for elements, item in payloads:
        for place, own in enumerate(sent(operation, name, group, elements, nodes)):
            calls[place] += own.messages
            sizes[place] += own.elements * item
    by_rank = None
    if ranks is None:  # of neighbours along a part of the axis the places are not told
        each = times * group // facts.world
        places = [facts.place(rank, axis) for rank in range(facts.world)]
        by_rank = tuple((each * calls[at], Fraction(each * sizes[at])) for at in places)
    # Logical bytes count where they are sent: a receive adds a call and no byte.
    total, made = Fraction(times * sum(sizes)), times * sum(calls)
    return [Flow(axis, "send", total, made, by_rank), Flow(axis, "recv", Fraction(0), made)]


def scratch(facts: ModelFacts, operation: str, ranks: int, elements: int) -> int:
    """Most elements that a rank receives in addition to its own before it combines them, in one
    call.
    """
    parts = _lanes(operation, elements)
    if len(parts) > 1:
        return sum(scratch(facts, operation, ranks, part) for part in parts)
    name, nodes = algorithm(facts, operation)
    if name == BACKEND or ranks == 1 or operation == "all_gather":
        return 0
    if name == "ring":
        # Rings combine one chunk before the next arrives; the largest chunk counts.
        return -(-elements // ranks)
    if name == "hierarchical":
        return -(-elements // nodes)
    # Of both trees a rank has two children at most, whose pieces come at once.
    return 4 * min(PIECE, elements) if name == "double_binary_tree" else elements


def _folded(rank: int, ranks: int, length: int, inside: Callable[[int, int, int], Sent]) -> Sent:
    """``inside`` of a power of two, for any number of ranks; see collectives/fold.py."""
    if not length:
        return Sent(0, 0, 0)
    # N = 6, P = 4, x = 2: even ranks below 2 x are guests of the rank at their right.
    #     rank     0 -> 1   2 -> 3   4   5     a guest sends its vector in a round before
    #     place         0        1   2   3     and gets the result in a round after
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    rounds = inside(0, power, length).rounds + 2 * (extra > 0)
    if rank < 2 * extra and rank % 2 == 0:
        return Sent(rounds, 1, length)
    has_guest = rank < 2 * extra
    own = inside(rank // 2 if has_guest else rank - extra, power, length)
    return Sent(rounds, own.messages + has_guest, own.elements + has_guest * length)


def _doubling(rank: int, ranks: int, length: int) -> Sent:
    levels = ranks.bit_length() - 1
    return Sent(levels, levels, levels * length)


def _halving_doubling(rank: int, ranks: int, length: int) -> Sent:
    # Rank 5 (binary 101) of 8, in chunks; halving goes down this list, doubling up:
    #     j = 2   sibling block 0-3, own block 4-7
    #     j = 1   sibling block 6-7, own block 4-5
    #     j = 0   sibling block 4,   own block 5
    levels = range(ranks.bit_length() - 1)
    own = [block(length, ranks, rank >> j << j, 1 << j) for j in levels]
    beside = [block(length, ranks, (rank >> j ^ 1) << j, 1 << j) for j in levels]
    sizes = [*own, *beside]
    return Sent(len(sizes), sum(size > 0 for size in sizes), sum(sizes))


def _children(place: int, ranks: int) -> int:
    """Powers of two below the lowest bit of ``place`` that lead to another rank when added."""
    powers = (1 << j for j in range((ranks - 1).bit_length()))
    return sum(place % (2 * power) == 0 and place + power < ranks for power in powers)


def _neighbours(place: int, ranks: int) -> int:
    """Edges of a place in the in-order tree whose left subtrees are complete.

    An even place is a leaf.  An odd one has a left child, and a right one if any place follows in
    its subtree: it has 2^h - 1 places at its left, with h the lowest zero bit of ``place``.
    """
    #          3            6 places: the root is the only one without a parent,
    #        /   \          5 has no right child, because no place follows
    #       1     5
    #      / \   /
    #     0   2 4
    has_parent = place != (1 << (ranks.bit_length() - 1)) - 1
    if place % 2 == 0:
        return int(has_parent)
    # Behind it comes at least one place of its own subtree, unless it is the last of all: a
    # subtree that ends before the last rank ends with a leaf at its right.
    return 1 + int(place + 1 < ranks) + int(has_parent)
