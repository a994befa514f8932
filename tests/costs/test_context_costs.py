"""What context parallelism costs, against hand counts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from test_costs import plan, tensor

from shardproof.costs import CostModel, Flow, cost_model_class
from shardproof.costs.context.exchange import Exchange, shares
from shardproof.costs.expression import CaseFacts

#: One attention of 4 query heads and 2 KV heads of 3 features, in float64: 8 heads of rows.
QKV = tensor("a.qkv.weight", 24, 5, dtype="float64")


def context(ranks: int, method: str, cut: str = "contiguous", **more: Any) -> CostModel:
    """One micro-batch of 2 samples of 6 positions on each of two data coordinates."""
    fields: dict[str, Any] = {
        "axes": {"replicate": 2, "context": ranks},
        "options": {"method": method, "cut": cut},
        "parameters": (QKV,),
        "inputs": (((((2, 6),),), (((2, 6),),)),),
        "roles": {"a.qkv": "heads"},
        "heads": {"a": (4, 2)},
    }
    return cost_model_class("context")(plan("context", **fields | more))


def along(model: CostModel) -> dict[str, Flow]:
    return {flow.operation: flow for flow in model.flows() if flow.axis == "context"}


def test_keys_and_values_are_gathered_and_their_gradients_scattered() -> None:
    # 2 x 6 positions x 2 KV heads x 3 features, keys and values, 8 bytes; to 2 other ranks, twice.
    whole = 2 * 2 * 6 * 2 * 3 * 8
    flows = along(context(3, "all_gather"))
    assert {name: flow.bytes for name, flow in flows.items()} == {
        "all_gather": 2 * 2 * whole,
        "reduce_scatter": 2 * 2 * whole,
    }
    assert flows["all_gather"].calls == 2 * 3
    # Four ranks have 2, 2, 1 and 1 positions: all send 2.
    padded = along(context(4, "all_gather", "striped"))["all_gather"]
    assert padded.bytes == 2 * 3 * whole // 6 * 8


def test_a_ring_sends_blocks_twice_and_gradients_once_around() -> None:
    whole = 2 * 2 * 6 * 2 * 3 * 8
    flows = along(context(3, "ring"))
    assert flows["send"].bytes == 2 * (2 + 2 + 3) * whole
    # A rank sends 2 blocks forward, 2 blocks and 3 gradients backward.
    assert flows["send"].calls == flows["recv"].calls == 2 * 3 * 7
    assert flows["recv"].bytes == 0
    assert {sum(ends) for ends in flows["send"].between} == {0 + 1, 1 + 2, 2 + 0}
    again = context(3, "ring", options={"method": "ring", "recompute_every": 1})
    assert along(again)["send"].bytes == 2 * (2 + 2 + 2 + 3) * whole


def test_gradients_of_a_ring_travel_in_float32_at_least() -> None:
    narrow = tensor("a.qkv.weight", 24, 5, dtype="bfloat16")
    flows = along(context(2, "ring", parameters=(narrow,)))
    numbers = 2 * 2 * 6 * 2 * 3
    assert flows["send"].bytes == 2 * numbers * (2 * 2 + 2 * 4)


def test_heads_travel_to_their_rank_and_back() -> None:
    flows = along(context(2, "all_to_all"))
    of_a_head = 2 * 6 * 3 * 8
    # A half leaves each time: 4 + 2 + 2 heads there and 4 back, forward and backward, twice.
    assert flows["all_to_all"].bytes == Fraction(2 * 2 * (8 + 4) * of_a_head, 2)
    # Two KV heads on four ranks are sent twice each.
    flows = along(context(4, "all_to_all"))
    assert flows["all_to_all"].bytes == Fraction(2 * 2 * 3 * (4 + 8 + 4) * of_a_head, 4)


def test_one_rank_sends_nothing_and_gradients_go_over_all_ranks() -> None:
    assert along(context(1, "ring")) == {}
    sums = [flow for flow in context(3, "ring").flows() if flow.operation == "all_reduce"]
    assert [flow.axis for flow in sums] == ["replicate+context"]
    assert sums[0].bytes == 2 * (6 - 1) * QKV.numel * 8


@pytest.mark.parametrize("cut", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_shares_add_up(cut: str, length: int) -> None:
    for ranks in (1, 2, 3, 4):
        assert sum(shares(length, ranks, cut)) == length


def test_work_is_balanced_but_for_a_contiguous_cut() -> None:
    """Of C ranks with c = S / C positions: (i + 1) c c scores on rank i; else the same on all."""
    facts, ranks, length = context(4, "ring").facts, 4, 32
    part = length // ranks

    def work(cut: str, method: str = "ring") -> list[int | Fraction]:
        exchange = Exchange(facts, method, cut)
        return [exchange.scores(place, length) for place in range(ranks)]

    assert work("contiguous") == [(place + 1) * part**2 for place in range(ranks)]
    assert work("zigzag") == [part**2 * (ranks + 1) // 2] * ranks
    # A block of a later rank has neither the first query nor the last key.
    later = [(place + 1) * part**2 + (3 - place) * (part - 1) ** 2 for place in range(ranks)]
    assert work("striped") == later
    assert work("contiguous", "all_gather") == [part * length] * ranks
    assert work("contiguous", "all_to_all") == [length**2 // ranks] * ranks


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"context": 2}])
@pytest.mark.parametrize("own", [2048, "ring", [1]])
def test_an_option_of_the_axis_may_mean_something_else_to_a_system(
    own: Any, axes: dict[str, int]
) -> None:
    facts = plan("ddp", axes=axes, options={"context": own})
    assert Exchange.of(facts) == Exchange(facts)
    assert CaseFacts({}, facts).routed_as([]).model_facts == facts
