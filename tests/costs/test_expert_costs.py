"""The formulas of expert parallelism against counts made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from shardproof.costs.expert import ExpertParallel, cannot_share_experts, folded
from shardproof.costs.hybrid import Hybrid
from shardproof.costs.model import Flow, NoCostModel
from shardproof.costs.model_facts import ModelFacts, TensorFacts

#: Four experts of a 3 x 2 and a 2 x 3 matrix, and a dense parameter of 5 elements.
UP = TensorFacts("mlp.experts.up", (4, 3, 2), "float64")
DOWN = TensorFacts("mlp.experts.down", (4, 2, 3), "float64")
DENSE = TensorFacts("norm.weight", (5,), "float64")
#: By data coordinate, pairs by expert: rank 0 sends 5 + 1 away, rank 1 sends 2.
ROUTED = (({"mlp": (1, 2, 5, 1)}, {"mlp": (2, 0, 3, 4)}),)
FACTS = ModelFacts(
    axes={"expert": 2},
    options={},
    parameters=(DENSE, UP, DOWN),
    micro_batches=(2, 1),
    roles={"mlp.experts": "expert"},
    clipped=True,
    routed=ROUTED,
)


@pytest.mark.parametrize(
    "axes", [{"expert": 3}, {"replicate": 2, "expert": 3}, {"expert": 2, "tensor": 3}, {"shard": 4}]
)
def test_a_group_has_the_ranks_that_differ_along_its_axis_only(axes: dict[str, int]) -> None:
    costs = ExpertParallel(facts := replace(FACTS, axes=axes))
    places = [facts.coordinate(rank) for rank in range(facts.world)]
    others = [{name: at for name, at in place.items() if name != "expert"} for place in places]
    for rank, own in enumerate(others):
        assert costs.group_of(rank) == [r for r, place in enumerate(others) if place == own]


def test_bytes_of_tokens_are_those_that_leave_their_rank_and_come_back() -> None:
    flow = next(f for f in ExpertParallel(FACTS).flows() if f.operation == "all_to_all")
    row = 2 * 8
    # Rank 0 sends 6 rows and their outputs' gradients, and gives 2 outputs and gradients back.
    assert flow.by_rank is not None
    assert [size for _, size in flow.by_rank] == [2 * (6 + 2) * row, 2 * (2 + 6) * row]
    assert flow.bytes == 4 * (6 + 2) * row
    # Two rounds, for rank 1 serves the second one of rank 0: dispatch, combine, and both back.
    assert [calls for calls, _ in flow.by_rank] == [8, 8]


def test_recomputation_sends_tokens_once_more() -> None:
    facts = replace(FACTS, options={"recompute_every": 1}, units=("mlp",))
    flow = next(f for f in ExpertParallel(facts).flows() if f.operation == "all_to_all")
    assert (flow.bytes, flow.calls) == (6 * (6 + 2) * 16, 2 * 2 * 6)
    # Backward repeats units only.
    outside = ExpertParallel(replace(facts, units=("block",))).exchanged()
    assert (outside.bytes, outside.calls) == (4 * (6 + 2) * 16, 2 * 2 * 4)


def test_tokens_go_forward_only_in_a_step_whose_backward_does_not_come_to_experts() -> None:
    late = tuple(replace(t, owners=("mlp.experts",), first_use=1) for t in (UP, DOWN))
    facts = replace(FACTS, parameters=(DENSE, *late), options={"recompute_every": 1})
    flow = ExpertParallel(replace(facts, units=("mlp",))).exchanged()
    assert (flow.bytes, flow.calls) == (2 * (6 + 2) * 16, 2 * 2 * 2)


def test_the_rest_is_summed_over_the_axis_and_experts_are_not() -> None:
    flows = [f for f in ExpertParallel(FACTS).flows() if f.operation == "all_reduce"]
    assert [(f.axis, f.bytes) for f in flows] == [("expert", 2 * 5 * 8), ("expert", 2 * 8)]


def test_experts_are_summed_over_replicas_of_their_place() -> None:
    routed = ((*ROUTED[0], *ROUTED[0]),)
    facts = replace(
        FACTS, axes={"replicate": 2, "expert": 2}, routed=routed, micro_batches=(1,) * 4
    )
    flows = {(f.axis, f.operation): f.bytes for f in ExpertParallel(facts).flows()}
    assert flows["replicate+expert", "all_reduce"] == 2 * 3 * 5 * 8
    # Two groups of two replicas, each of which has half of 48 elements.
    assert flows["replicate", "all_reduce"] == 2 * 2 * 1 * 24 * 8
    assert flows["expert", "all_to_all"] == 2 * 4 * (6 + 2) * 16


def test_a_rank_holds_its_share_of_experts() -> None:
    held = ExpertParallel(FACTS).resident(1, 0, 0)
    assert held["parameters"] == held["gradients"] == held["optimizer_state"] == (5 + 24) * 8
    assert ExpertParallel(FACTS).local(0).parameters == {
        "norm.weight": 5,
        "mlp.experts.up": 12,
        "mlp.experts.down": 12,
    }


def test_counts_of_rows_are_control_messages() -> None:
    # Two ranks, two rounds, two experts of the other rank.
    assert ExpertParallel(FACTS).metadata_bytes() == 2 * 2 * 2 * 8


def test_without_an_oracle_no_formula_gives_the_bytes() -> None:
    with pytest.raises(NoCostModel, match="the choices of the router are unknown"):
        ExpertParallel(replace(FACTS, routed=())).flows()


def test_one_rank_sends_nothing() -> None:
    alone = ExpertParallel(replace(FACTS, axes={"expert": 1}))
    assert sum((f.bytes for f in alone.flows()), Fraction(0)) == 0


def test_ranks_that_do_not_divide_the_experts_are_told() -> None:
    facts = replace(FACTS, axes={"expert": 3})
    assert "4 experts, which cannot be divided among 3 ranks; valid: 1, 2, 4" in (
        cannot_share_experts(facts)
    )
    none = replace(facts, parameters=(DENSE,))
    assert "the model has no experts; set expert to 1" in cannot_share_experts(none)


# ------------------------------------------------------- experts folded over the data axes


def fold(axes: dict[str, int], ranks: int, **options: Any) -> ModelFacts:
    """The facts of a hybrid whose experts ``ranks`` neighbours divide."""
    options = {"experts": {"ranks": ranks}, "context": {"method": "all_gather"}, **options}
    steps = (tuple({"mlp": (1, 2, 5, 1)} for _ in range(8)),)
    return replace(
        FACTS, axes=axes, options=options, routed=steps, micro_batches=(1,), clipped=False
    )


def test_experts_have_a_mesh_of_their_own_under_which_ranks_keep_their_numbers() -> None:
    axes = {"replicate": 2, "shard": 4, "context": 4}
    assert folded(fold(axes, 2)) == axes | {"context": 2, "expert": 2}
    assert folded(fold(axes, 8)) == axes | {"shard": 2, "context": 1, "expert": 8}
    assert [*folded(fold({"pipe": 2, "shard": 2, "tensor": 2}, 2))] == [
        "pipe",
        "shard",
        "context",
        "expert",
        "tensor",
    ]


def test_folded_experts_are_summed_over_those_that_hold_the_same() -> None:
    flows = Counter[tuple[str, str]]()
    for one in Hybrid(fold({"shard": 4}, 2)).flows():
        flows[one.axis, one.operation] += int(one.bytes)
    # All four sum 5 elements; two groups of two have half of 48 elements each.
    assert flows["shard", "all_reduce"] == 2 * 3 * 5 * 8 + 2 * (2 * 1 * 24 * 8)
    # Places 0 send 6 rows away and places 1 send 3; out and back, forward and backward.
    assert flows["shard", "all_to_all"] == 4 * 2 * (6 + 3) * 16


def test_sharded_experts_are_gathered_and_reduced_once_a_step() -> None:
    facts = replace(fold({"shard": 4}, 2, experts={"ranks": 2, "data": "fsdp"}), micro_batches=(3,))
    flows = {(f.axis, f.operation): int(f.bytes) for f in Hybrid(facts).flows()}
    assert flows["shard", "all_gather"] == flows["shard", "reduce_scatter"] == 2 * 1 * 24 * 8
    held = Hybrid(facts).resident(0, 0, 0)
    assert held["parameters"] == held["gradients"] == (5 + 12) * 8


def test_context_ranks_that_share_experts_send_rows_of_their_own_positions() -> None:
    def flow(rows: tuple[int, ...]) -> Flow:
        facts = fold({"context": 2}, 2)
        routed = (({"mlp": rows}, {"mlp": (0, 0, 0, 0)}),)
        flows = Hybrid(replace(facts, routed=routed)).flows()
        return next(one for one in flows if one.operation == "all_to_all")

    assert flow((0, 0, 3, 1)).axis == "context"
    assert flow((0, 0, 3, 1)).bytes == 4 * 4 * 16
    assert flow((2, 2, 0, 0)).bytes == 0
