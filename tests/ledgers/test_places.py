"""What part of what is sent goes between nodes, against counts made by hand and by algorithms."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shardproof.costs.collectives import hierarchical, ring
from shardproof.ledgers import places
from shardproof.ledgers.traffic import LoggedCall

TWO_BY_TWO = [0, 0, 1, 1]


def _call(operation: str, group: tuple[int, ...], peer: int | None = None) -> LoggedCall:
    share = Fraction(2 * (len(group) - 1) * 100, len(group))
    given = ("axis", "float32", 100, share, "backward", True, 0, 1)
    return LoggedCall(0, operation, group, *given, peer=peer)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
@pytest.mark.parametrize("nodes", [2, 3])
def test_hierarchical_rings_send_what_is_promised(nodes: int, ranks_per_node: int) -> None:
    """The least of the model is reached by an algorithm; what it sends inside is counted apart."""
    ranks, length = nodes * ranks_per_node, 60
    every = [hierarchical(rank, ranks, length, ranks_per_node).elements for rank in range(ranks)]
    inside = [ring(rank % ranks_per_node, ranks_per_node, length).elements for rank in range(ranks)]
    homes = [rank // ranks_per_node for rank in range(ranks)]
    share = places.promised_across("all_reduce", [range(ranks)], homes)
    assert share is not None and share * sum(every) == sum(every) - sum(inside)


def test_an_axis_lies_inside_nodes_across_them_or_partly() -> None:
    mesh = {"pipe": 2, "shard": 2, "tensor": 2}
    homes = [rank // 2 for rank in range(8)]
    assert places.groups_along(mesh, "tensor")[:2] == [(0, 1), (2, 3)]
    assert places.groups_along(mesh, "pipe+shard")[0] == (0, 2, 4, 6)
    assert places.groups_along({"shard": 4}, "shard", 2) == [(0, 1), (2, 3)]
    found = {axis: places.lie(places.groups_along(mesh, axis), homes) for axis in mesh}
    assert found == {"pipe": "across nodes", "shard": "across nodes", "tensor": "inside nodes"}
    assert places.lie(places.groups_along({"shard": 4}, "shard"), TWO_BY_TWO) == (
        "partly across nodes"
    )


def test_a_message_crosses_where_its_ends_lie_apart() -> None:
    every = (0, 1, 2, 3)
    sent = [places.sent_across(_call("send", every, peer), 1, TWO_BY_TWO) for peer in (0, 2)]
    assert sent == [0, _call("send", every).logical_bytes]
    with pytest.raises(ValueError, match="has no receiver"):
        places.sent_across(_call("send", every), 1, TWO_BY_TWO)


@pytest.mark.parametrize("operation", ["all_to_all", "gather", "scatter"])
def test_what_hangs_on_ranks_of_a_node_is_split_nowhere(operation: str) -> None:
    """A case with such a call ended as a fault of the judge."""
    partly, across = _call(operation, (0, 1, 2)), _call(operation, (0, 2))
    assert places.sent_across(partly, 0, TWO_BY_TWO) is None
    assert places.promised_across(operation, [partly.group], TWO_BY_TWO) is None
    assert places.sent_across(across, 0, TWO_BY_TWO) == across.logical_bytes


def test_of_four_ranks_on_two_nodes_a_third_of_a_reduction_crosses() -> None:
    call = _call("all_reduce", (0, 1, 2, 3))
    total = sum(places.sent_across(call, rank, TWO_BY_TWO) or 0 for rank in range(4))
    assert total == 2 * (2 - 1) * 100
    assert places.promised_across("all_reduce", [call.group], TWO_BY_TWO) == Fraction(1, 3)


def test_messages_are_promised_by_their_ends() -> None:
    between = {(0, 1): Fraction(10), (1, 2): Fraction(20), (3, 0): Fraction(5)}
    assert places.promised_messages(between, [(0, 1, 2, 3)], TWO_BY_TWO) == 25
    assert places.promised_messages({}, [(0, 1, 2, 3)], TWO_BY_TWO) is None
    groups, homes = [(0, 2, 4), (1, 3, 5)], [0, 0, 0, 1, 1, 1]
    assert places.promised_messages({(0, 1): Fraction(7)}, groups, homes) is None, "no, and yes"


def test_what_hangs_on_more_than_the_mesh_is_not_promised() -> None:
    whole = [(0, 1, 2, 3)]
    assert places.promised_across("send", whole, TWO_BY_TWO) is None
    assert places.promised_across("all_to_all", whole, TWO_BY_TWO) is None
    assert places.promised_across("all_reduce", [(0, 1), (2, 3)], [0, 0, 0, 1]) is None
    assert places.promised_across("all_reduce", whole, TWO_BY_TWO, whole=False) is None
    assert places.promised_across("all_reduce", whole, [0, 0, 0, 0], whole=False) == 0
    assert places.promised_across("all_reduce", whole, [0, 1, 2, 3], whole=False) == 1
    assert places.promised_across("send", [(0, 1), (2, 3)], TWO_BY_TWO) == 0
    assert places.promised_across("send", [(0, 2), (1, 3)], TWO_BY_TWO) == 1
