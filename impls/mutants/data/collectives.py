"""Faults of collectives over send and recv, planted in strategies that choose them by an option.

All are schedules (``impls/reference/collectives/schedule.py``) with one line wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardproof.impls.mutants import declare
from shardproof.impls.reference.collectives import (
    binomial_broadcast,
    binomial_tree,
    double_binary_tree,
    recursive_doubling,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from shardproof.impls.reference.collectives.fold import folded, power_below
from shardproof.impls.reference.collectives.reducer import ByAlgorithm
from shardproof.impls.reference.collectives.schedule import (
    Reduce,
    Replace,
    Round,
    Send,
    cut,
    moved,
)
from shardproof.impls.reference.ddp import ReferenceDDP
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.naive_ddp import ReferenceNaiveDDP
from shardproof.impls.reference.parts.reducers import Reducer

BUCKETS: Mapping[str, Any] = {"bucket_bytes": 48 * 1024, "first_bucket_bytes": 8 * 1024}


def summed_by(algorithm: Any) -> Mapping[str, Any]:
    """The parent's options."""
    return {**BUCKETS, "all_reduce": algorithm}


mutant = declare.family(
    ReferenceDDP, ReferenceNaiveDDP, mesh={"replicate": 3}, killed_by=("equivalence",)
)


class SumsByRounds(Engine):
    """Sum by ``rounds`` instead of the algorithm that the option chooses."""

    def make_reducer(self) -> Reducer:
        reducer = super().make_reducer()
        assert isinstance(reducer, ByAlgorithm)
        reducer.summing = self.rounds
        return reducer

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        raise NotImplementedError


class Planted(SumsByRounds, ReferenceDDP):
    """The reducer of buckets with the planted rounds."""


# ------------------------------------------------------------------------------------------- rings


@mutant("ring_scatters_wrong_chunk", says="chunk of another rank", options=summed_by("ring"))
class ScattersWrongChunk(Planted):
    """Chunks are shifted by one place: a rank ends with its neighbour's sum but gathers its own
    chunk.
    """

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        chunks = cut(range(length), size)
        left, right = (rank - 1) % size, (rank + 1) % size
        for t in range(size - 1):
            there, here = chunks[(rank - t) % size], chunks[(rank - 1 - t) % size]
            yield [Send(right, there), Reduce(left, here)]
        yield from ring_all_gather.rounds(rank, size, length)


@mutant(
    "ring_stops_one_round_early",
    says="send: .* bytes in 27 calls",
    killed_by=("equivalence", "traffic"),
    options=summed_by("ring"),
)
class StopsOneRoundEarly(Planted):
    """The last round of the reduce-scatter is missing, so every sum lacks one rank."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        yield from list(ring_reduce_scatter.rounds(rank, size, length))[:-1]
        yield from ring_all_gather.rounds(rank, size, length)


@mutant(
    "ring_loses_remainder",
    says=r"differ in \d of \d+ elements",
    options=summed_by("ring"),
    mesh={"replicate": 5},
    killed_by=("equivalence", "replicas", "traffic"),
)
class LosesRemainder(Planted):
    """Chunks have length // N elements, and the remainder at the end is never summed."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        whole = length - length % size
        yield from ring_reduce_scatter.rounds(rank, size, whole)
        yield from ring_all_gather.rounds(rank, size, whole)


@mutant(
    "ring_gathers_backwards",
    says="replicas 0 and 1 differ",
    options=summed_by("ring"),
    killed_by=("equivalence", "replicas"),
)
class GathersBackwards(Planted):
    """The rounds of the all-gather run in reverse, so chunks are passed on before they are
    summed.
    """

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        yield from ring_reduce_scatter.rounds(rank, size, length)
        yield from reversed(list(ring_all_gather.rounds(rank, size, length)))


@mutant(
    "ring_skips_the_gather_of_one",
    says="deadlock: .*rank 2",
    options=summed_by("ring"),
    killed_by=("hang",),
)
class SkipsTheGatherOfOne(Planted):
    """The last rank stops after the reduce-scatter, and its neighbours wait."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        yield from ring_reduce_scatter.rounds(rank, size, length)
        if rank < size - 1:
            yield from ring_all_gather.rounds(rank, size, length)


# ------------------------------------------------------------------------------ powers of two


@mutant(
    "doubling_leaves_guests_out",
    says="data coordinate 0 is missing",
    killed_by=("equivalence", "traffic"),
    options=summed_by("recursive_doubling"),
)
class LeavesGuestsOut(Planted):
    """Ranks beyond a power of two get the result but never contribute their vector."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        _, *rest = recursive_doubling.rounds(rank, size, length)
        yield from rest


@mutant(
    "doubling_forgets_to_unfold",
    says="data coordinate 0 alone: it was not reduced",
    options=summed_by("recursive_doubling"),
    killed_by=("equivalence", "replicas", "traffic"),
)
class ForgetsToUnfold(Planted):
    """Ranks beyond a power of two contribute their vector but never get the result."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        *rest, _ = recursive_doubling.rounds(rank, size, length)
        yield from rest


@mutant(
    "doubling_misses_last_exchange",
    says="data coordinate 4 is missing",
    options=summed_by("recursive_doubling"),
    mesh={"replicate": 6},
    killed_by=("equivalence", "replicas", "traffic"),
)
class MissesLastExchange(Planted):
    """Six ranks fold to four, but the exchange between the two pairs of pairs is missing."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        def inside(number: int, power: int, count: int) -> Iterator[Round]:
            yield from list(recursive_doubling.doubling(number, power, count))[:-1]

        return folded(inside, power_below(size).bit_length() - 2, rank, size, length)


@mutant(
    "rabenseifner_reduces_wrong_half",
    says="half of another rank",
    options=summed_by("rabenseifner"),
    mesh={"replicate": 4},
)
class ReducesWrongHalf(Planted):
    """While halving, a rank keeps the half that belongs to its partner."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        chunks = cut(range(length), size)

        def block(chunk: int, count: int) -> range:
            first = chunk - chunk % count
            return range(chunks[first].start, chunks[first + count - 1].stop)

        for distance in (2, 1):
            partner = rank ^ distance
            yield [Send(partner, block(rank, distance)), Reduce(partner, block(partner, distance))]
        for distance in (1, 2):
            partner = rank ^ distance
            yield [Send(partner, block(rank, distance)), Replace(partner, block(partner, distance))]


# ------------------------------------------------------------------------------------------- trees


@mutant(
    "tree_sends_on_what_it_had",
    says="on rank 3: .*data coordinate 0 is missing",
    options=summed_by("binomial_tree"),
    mesh={"replicate": 4},
    killed_by=("equivalence", "replicas"),
)
class SendsOnWhatItHad(Planted):
    """Inner ranks send their partial sums down before the root's result has reached them."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        yield from binomial_tree.reduction(rank, size, length)
        yield from reversed(list(binomial_broadcast.rounds(rank, size, length)))


@mutant(
    "tree_root_serves_its_children_only",
    says="on rank 3: .*data coordinate 3 alone: it was not reduced",
    options=summed_by("binomial_tree"),
    mesh={"replicate": 4},
    killed_by=("equivalence", "replicas", "traffic"),
)
class RootServesItsChildrenOnly(Planted):
    """Data from the root is not forwarded: its children have it, their children do not."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        yield from binomial_tree.reduction(rank, size, length)
        for transfers in binomial_broadcast.rounds(rank, size, length):
            yield [one for one in transfers if rank == 0 or one.peer == 0]


@mutant(
    "double_tree_drops_second_half",
    says="send: .* 2 times (narrower|fewer)",
    options=summed_by("double_binary_tree"),
    killed_by=("equivalence", "replicas", "traffic"),
)
class DropsSecondHalf(Planted):
    """The second tree is never built, so half of the vector stays unchanged."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        first, _ = cut(range(length), 2)
        for transfers in double_binary_tree.rounds(rank, size, length):
            yield [one for one in transfers if one.elements.stop <= first.stop]


@mutant(
    "double_tree_forgets_right_child",
    says=r"wrong elements, of .*data coordinate \d is missing",
    options=summed_by("double_binary_tree"),
)
class ForgetsRightChild(Planted):
    """The second child's data replaces the sum with the first child's data."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        for transfers in double_binary_tree.rounds(rank, size, length):
            yield [
                Replace(*one) if isinstance(one, Reduce) and one.peer > rank else one
                for one in transfers
            ]


@mutant(
    "double_tree_has_one_tree",
    says="rank 1 sends .* naive_ddp promises",
    options={"all_reduce": "double_binary_tree"},
    mesh={"replicate": 4},
    killed_by=("traffic",),
)
class HasOneTree(SumsByRounds, ReferenceNaiveDDP):
    """The second tree equals the first, so its inner ranks send for both halves."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        own, height = double_binary_tree.place(rank, size), size.bit_length() - 1
        for t in range(2 * height):
            yield [
                one
                for half in cut(range(length), 2)
                for one in double_binary_tree.in_round(t, own, [half], height)
            ]


# ------------------------------------------------------------------------------------ hierarchical

NODES = summed_by({"algorithm": "hierarchical", "ranks_per_node": 2})


@mutant(
    "hierarchical_stays_inside",
    says="data coordinate 2 is missing; .* 3 is missing",
    options=NODES,
    mesh={"replicate": 4},
    killed_by=("equivalence", "replicas", "traffic"),
)
class StaysInside(Planted):
    """Ranks are summed inside each node only."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        number, place = divmod(rank, 2)
        node = range(2 * number, 2 * number + 2)
        for half in (ring_reduce_scatter.rounds, ring_all_gather.rounds):
            yield from moved(half(place, 2, length), node, 0)


@mutant(
    "hierarchical_crosses_with_wrong_chunk",
    says="data coordinate 2 is missing; .* 3 is missing",
    killed_by=("equivalence", "replicas"),
    options=NODES,
    mesh={"replicate": 4},
)
class CrossesWithWrongChunk(Planted):
    """Across nodes, each rank sums the chunk whose node sum its neighbour holds."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        number, place = divmod(rank, 2)
        node, own = range(2 * number, 2 * number + 2), cut(range(length), 2)[1 - place]
        yield from moved(ring_reduce_scatter.rounds(place, 2, length), node, 0)
        across = ring.rounds(number, size // 2, len(own))
        yield from moved(across, range(place, size, 2), own.start)
        yield from moved(ring_all_gather.rounds(place, 2, length), node, 0)


# -------------------------------------------------------------------------- order, bits and bytes


@mutant(
    "sum_in_an_order_of_its_own",
    says="replicas 0 and 1 differ in",
    options=summed_by("ring"),
    mesh={"replicate": 5},
    killed_by=("replicas", "traffic"),
)
class SumsInAnOrderOfItsOwn(Planted):
    """Every rank sends to all and starts adding with its neighbour, so the last bits differ."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        whole, others = range(length), [(rank - away) % size for away in range(1, size)]
        yield [*(Send(peer, whole) for peer in others), *(Reduce(peer, whole) for peer in others)]


@mutant(
    "doubling_in_place_of_ring",
    says="send: 490,496 bytes .* promises 367,872",
    options=summed_by("ring"),
    mesh={"replicate": 4},
    killed_by=("traffic",),
)
class DoublingInPlaceOfRing(Planted):
    """Another algorithm runs than the option names: right sums, more bytes."""

    @staticmethod
    def rounds(rank: int, size: int, length: int) -> Iterator[Round]:
        return recursive_doubling.rounds(rank, size, length)
