"""The formulas of expert parallelism against counts made by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from shardproof.costs.expert import ExpertParallel, cannot_share_experts
from shardproof.costs.model import NoCostModel
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
    facts = replace(FACTS, options={"recompute_every": 1})
    flow = next(f for f in ExpertParallel(facts).flows() if f.operation == "all_to_all")
    assert (flow.bytes, flow.calls) == (6 * (6 + 2) * 16, 2 * 2 * 6)


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
    with pytest.raises(NoCostModel, match="no oracle tells where tokens go"):
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
