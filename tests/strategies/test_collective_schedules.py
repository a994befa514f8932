"""Algorithms over send and recv, as schedules: sound, complete, and as cheap as their formulas."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import count, play, problems

from shardproof.costs import collectives as costs
from shardproof.impls.reference.collectives import (
    binomial_broadcast,
    binomial_tree,
    double_binary_tree,
    hierarchical,
)
from shardproof.impls.reference.collectives.algorithms import ALGORITHMS
from shardproof.impls.reference.collectives.schedule import Schedule, cut
from shardproof.impls.reference.engine.choices import AllReduce, Hierarchical

#: (operation, algorithm) of all that serve any number of ranks.
ANY_WORLD = [(kind, name) for kind, by_name in ALGORITHMS.items() for name in by_name]
ALL_REDUCES = sorted(ALGORITHMS["all_reduce"])


def lengths(ranks: int) -> range:
    return range(3 * ranks + 1)


def told(sent: list[costs.Sent]) -> list[tuple[int, int, int]]:
    return [(own.rounds, own.messages, own.elements) for own in sent]


def counted(schedule: Schedule, ranks: int, length: int) -> list[tuple[int, int, int]]:
    found = count(schedule, ranks, length)
    pairs = zip(found.messages, found.elements, strict=True)
    return [(found.rounds, messages, elements) for messages, elements in pairs]


def check_formulas(ranks: int, lengths: Iterable[int]) -> None:
    for kind, name in ANY_WORLD:
        schedule = ALGORITHMS[kind][name]
        for length in lengths:
            promised = told(costs.sent(kind, name, ranks, length))
            assert promised == counted(schedule, ranks, length), (kind, name, length)


@pytest.mark.parametrize("ranks", [*range(1, 65)])
def test_the_formulas_are_what_is_sent(ranks: int) -> None:
    """Rounds, messages and elements of each rank, for every length up to three chunks; of large
    worlds for lengths around whole chunks and some between.
    """
    around = {n * ranks + more for n in range(4) for more in (-1, 0, 1, ranks // 2)}
    check_formulas(ranks, lengths(ranks) if ranks < 24 else sorted(around & {*lengths(ranks)}))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [*range(24, 65)])
def test_the_formulas_are_what_is_sent_whatever_the_length(ranks: int) -> None:
    check_formulas(ranks, lengths(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12, 24, 60, 64])
def test_the_formula_of_hierarchical_for_every_size_of_a_node(ranks: int) -> None:
    for nodes in (size for size in range(1, ranks + 1) if ranks % size == 0):
        schedule = partial(hierarchical.rounds, ranks_per_node=nodes)
        for length in lengths(ranks)[:: 1 + ranks // 8]:
            promised = told(costs.sent("all_reduce", "hierarchical", ranks, length, nodes))
            assert promised == counted(schedule, ranks, length), (nodes, length)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13, 32])
@pytest.mark.parametrize("piece", [1, 3])
def test_the_formula_of_the_double_tree_in_pieces(ranks: int, piece: int) -> None:
    schedule = partial(double_binary_tree.rounds, piece=piece)
    for length in lengths(ranks):
        own = [costs.double_binary_tree(rank, ranks, length, piece) for rank in range(ranks)]
        assert told(own) == counted(schedule, ranks, length), length


def test_the_judges_piece_is_the_algorithms() -> None:
    assert costs.PIECE == double_binary_tree.PIECE


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_the_formulas_keep_to_the_published_costs(ranks: int) -> None:
    """Rounds and elements a rank sends, where N divides n (docs/collectives.md cites them)."""
    n, lg = 6 * ranks, ranks.bit_length() - 1
    least = 2 * (ranks - 1) * n // ranks

    def most(name: str) -> tuple[int, int]:
        own = costs.sent("all_reduce", name, ranks, n)
        return own[0].rounds, max(each.elements for each in own)

    assert most("ring") == (2 * (ranks - 1), least)
    assert most("rabenseifner") == (2 * lg, least)
    assert most("recursive_doubling") == (lg, lg * n)
    assert most("binomial_tree") == (2 * lg, lg * n)
    rounds, elements = most("double_binary_tree")
    assert rounds == 2 * lg and elements <= 2 * n


@pytest.mark.parametrize(("kind", "name"), ANY_WORLD)
def test_schedules_are_sound(kind: str, name: str) -> None:
    for ranks in (*range(1, 18), 31, 32, 33):
        for length in (0, 1, 2, ranks - 1, ranks, ranks + 1, 3 * ranks + 2):
            assert not problems(ALGORITHMS[kind][name], ranks, length), (ranks, length)


def all_reduces(ranks: int) -> dict[str, Schedule]:
    """Every all-reduce, those with parameters several times."""
    nodes = {
        f"hierarchical {size}": partial(hierarchical.rounds, ranks_per_node=size)
        for size in range(1, ranks + 1)
        if ranks % size == 0
    }
    pieces = {
        f"double tree {size}": partial(double_binary_tree.rounds, piece=size) for size in (1, 2)
    }
    return {**ALGORITHMS["all_reduce"], **nodes, **pieces}


@pytest.mark.parametrize("ranks", [*range(1, 14), 16, 24, 33])
def test_every_contribution_arrives_once_on_every_rank(ranks: int) -> None:
    """Played on multisets: the sum of powers of a base larger than the world cannot hide a
    contribution that came twice behind one that did not come.
    """
    base = ranks + 1
    for name, schedule in all_reduces(ranks).items():
        for length in (0, 1, 2, ranks, 2 * ranks + 1):
            values = [[base**rank * (at + 1) for at in range(length)] for rank in range(ranks)]
            wanted = [sum(base**rank for rank in range(ranks)) * (at + 1) for at in range(length)]
            ends = play(schedule, values, lambda a, b: a + b)
            assert all(own == wanted for own in ends), (name, length)


@pytest.mark.parametrize("ranks", [*range(1, 14), 16, 24, 33])
def test_every_rank_makes_the_same_sum(ranks: int) -> None:
    """Played on expressions: the order of the additions is the same on all ranks, so that their
    bits are, whatever is added."""
    for name, schedule in all_reduces(ranks).items():
        values = [[f"{rank}" for _ in range(ranks + 2)] for rank in range(ranks)]
        ends = play(schedule, values, lambda a, b: f"({a}+{b})")
        assert all(own == ends[0] for own in ends), name


@pytest.mark.parametrize("ranks", [*range(1, 10), 16, 17])
def test_scatter_and_gather_leave_chunks_where_they_belong(ranks: int) -> None:
    for length in lengths(ranks):
        chunks = cut(range(length), ranks)
        values = [[100 * rank + at for at in range(length)] for rank in range(ranks)]
        sums = play(ALGORITHMS["reduce_scatter"]["ring"], values, lambda a, b: a + b)
        for rank, own in enumerate(chunks):
            wanted = [sum(each[at] for each in values) for at in own]
            assert [sums[rank][at] for at in own] == wanted
        mine = [
            [1 if at in chunks[rank] else None for at in range(length)] for rank in range(ranks)
        ]
        whole = play(ALGORITHMS["all_gather"]["ring"], mine, lambda a, b: a)
        assert all(each == [1] * length for each in whole)


@pytest.mark.parametrize("ranks", [*range(1, 10), 16, 17])
def test_a_broadcast_reaches_all_from_any_root(ranks: int) -> None:
    for root in range(ranks):
        schedule = partial(binomial_broadcast.rounds, root=root)
        assert not problems(schedule, ranks, 3)
        ends = play(schedule, [[rank] * 3 for rank in range(ranks)], lambda a, b: a)
        assert all(own == [root] * 3 for own in ends)
        own = [costs.binomial_broadcast(rank, ranks, 3, root) for rank in range(ranks)]
        assert told(own) == counted(schedule, ranks, 3)


def test_leaves_of_one_tree_are_inner_nodes_of_the_other() -> None:
    for ranks in range(2, 40):
        leaves = [
            {
                rank
                for rank in range(ranks)
                if not double_binary_tree.node(rank, ranks, tree).children
            }
            for tree in (0, 1)
        ]
        assert len(leaves[0] & leaves[1]) == ranks % 2
        for tree in (0, 1):
            nodes = [double_binary_tree.node(rank, ranks, tree) for rank in range(ranks)]
            assert [own.parent for own in nodes].count(None) == 1
            assert max(own.depth for own in nodes) == ranks.bit_length() - 1
            for rank, own in enumerate(nodes):
                assert all(nodes[child].parent == rank for child in own.children)


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 50))
def test_cut_is_even_and_complete(length: int, parts: int, start: int) -> None:
    pieces = cut(range(start, start + length), parts)
    assert [at for piece in pieces for at in piece] == list(range(start, start + length))
    assert [len(piece) for piece in pieces] == [costs.chunk(length, parts, i) for i in range(parts)]


def test_a_tree_is_reduced_to_rank_0_alone() -> None:
    for ranks in range(1, 12):
        ends = play(binomial_tree.reduction, [[1] for _ in range(ranks)], lambda a, b: a + b)
        assert ends[0] == [ranks] and all(own[0] < ranks for own in ends[1:])


def test_hierarchical_refuses_worlds_of_no_whole_nodes() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot be divided into nodes of 2 ranks"):
        list(hierarchical.rounds(0, 5, 3, ranks_per_node=2))


def test_every_name_that_an_option_takes_is_an_algorithm() -> None:
    names = {name for name in _literals(AllReduce) if name != "backend"}
    assert names == set(ALL_REDUCES) and Hierarchical(ranks_per_node=1).algorithm not in names
    assert {f"{kind} {name}" for kind, name in costs.FORMULAS} == {
        f"{kind} {name}" for kind, name in (*ANY_WORLD, ("all_reduce", "hierarchical"))
    }


def _literals(union: object) -> list[str]:
    return [
        name for part in getattr(union, "__args__", ()) for name in getattr(part, "__args__", ())
    ]
