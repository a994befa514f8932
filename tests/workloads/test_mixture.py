"""The mixture of experts: choice, places, weights, statistics, and the terms of its loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from made_case import made_case

from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec
from shardproof.impls.reference.context import ReferenceContext
from shardproof.oracle.training import train
from shardproof.registry.declaration import Declaration
from shardproof.workloads import Workload, WorkloadError, make, mixture
from shardproof.workloads.mixture import Mixture

SMALL = {"layers": 2, "width": 16, "seq": 8, "experts": 4}


def test_a_narrow_dtype_would_route_otherwise() -> None:
    spec = WorkloadSpec("charnames_gpt", params=SMALL)
    with pytest.raises(WorkloadError, match="use lane fp64"):
        make(spec, "float32", "working_precision")


def workload(**params: Any) -> Workload:
    return make(WorkloadSpec("charnames_gpt", params={**SMALL, **params}, global_batch=6))


def layer(**params: Any) -> Mixture:
    own = workload(**params)
    module = own.build_for(0)()
    own.load(module)
    return mixture.mixtures(module)["blocks.0.mlp"]


def test_of_equal_scores_the_lower_number_comes_first() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert layer().choose(scores, 3).tolist() == [[1, 2, 0], [0, 1, 2]]


def test_weights_are_normalized_after_or_before_the_choice() -> None:
    scores, chosen = torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([[1, 2]])
    after = layer().weigh(scores, chosen)
    before = layer(router_weights="before").weigh(scores, chosen)
    assert torch.allclose(after, torch.tensor([[3.0, 2.0]]).softmax(-1))
    assert torch.allclose(before, scores.softmax(-1)[:, [1, 2]])


def test_tokens_claim_places_in_their_order() -> None:
    """Four tokens, two choices each, two experts of which each has ceil(0.5 * 8 / 4) = 1 place."""
    chosen = torch.tensor([[0, 1], [1, 0], [2, 0], [2, 3]])
    by_position = layer(capacity=0.5).places(chosen, 1)
    assert by_position.tolist() == [[True, True], [False, False], [True, False], [False, True]]
    by_choice = layer(capacity=0.5, claims="choice").places(chosen, 1)
    assert by_choice.tolist() == [[True, False], [True, False], [True, False], [False, True]]
    # Two samples of two tokens: ceil(0.5 * 4 / 4) = 1 place in each.
    by_sample = layer(capacity=0.5, capacity_over="sample").places(chosen, 2)
    assert by_sample.tolist() == [[True, True], [False, False], [True, True], [False, True]]


def test_what_has_no_place_passes_through_the_residual_only() -> None:
    own = layer(capacity=0.5)
    tokens = torch.randn(1, 8, 16, dtype=torch.float64)
    mixed = own(tokens)[0]
    routing = own.route(own.router(tokens[0]), 1)
    assert not routing.placed.all()
    weights = routing.weights * routing.placed
    parts = [
        weights[t, c] * own.experts(tokens[0, t : t + 1], routing.experts[t, c : c + 1])
        for t in range(8)
        for c in range(2)
    ]
    assert torch.allclose(torch.cat(parts).view(8, 2, 16).sum(1), mixed, atol=1e-14)


def test_statistics_count_training_alone() -> None:
    own = layer(capacity=0.5)
    own.carried_out = []
    own(torch.randn(2, 8, 16, dtype=torch.float64))
    load, dropped = own.load.clone(), own.dropped.clone()
    assert int(load.sum()) == 2 * 8 * 2
    assert int(dropped[0]) == 2 * 8 * 2 - int(own.carried_out[0].sum())
    own.eval()
    own(torch.randn(2, 8, 16, dtype=torch.float64))
    assert torch.equal(own.load, load)
    assert torch.equal(own.dropped, dropped)


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    own = layer()
    rows = torch.randn(3, 16, dtype=torch.float64)
    own.experts(rows, torch.tensor([0, 0, 2])).sum().backward()
    assert own.experts.up.grad is not None
    assert [bool(part.any()) for part in own.experts.up.grad] == [True, False, True, False]


def test_the_bias_counts_for_the_choice_and_not_for_the_weights() -> None:
    own = layer(balancing_bias=True)
    scores = torch.zeros(1, 4, dtype=torch.float64)
    own.get_buffer("balancing_bias").copy_(torch.tensor([0.0, 3.0, 0.0, 2.0]))
    routing = own.route(scores, 1)
    assert routing.experts.tolist() == [[1, 3]]
    assert routing.weights.tolist() == [[0.5, 0.5]]


def test_the_oracle_tells_where_tokens_went() -> None:
    truth = train(workload(capacity=1.0), OptimizerSpec(), 3, 2, "per_rank")
    for number, step in enumerate(truth.steps):
        assert [set(own) for own in step.routed] == [{"blocks.0.mlp", "blocks.1.mlp"}] * 3
        for own, buffers in zip(step.routed, step.buffers, strict=True):
            for name, counts in own.items():
                placed = buffers[f"{name}.load"].sum() - buffers[f"{name}.dropped"][0]
                assert number or int(counts.sum()) == int(placed)


def test_the_balance_of_a_whole_is_not_that_of_its_parts() -> None:
    losses = {}
    for scope in ("global", "rank", "micro-batch"):
        truth = train(workload(balance=scope, z_loss=True), OptimizerSpec(), 2, 1, "per_rank")
        losses[scope] = truth.steps[0].loss
    assert len({round(loss, 9) for loss in losses.values()}) == 3
    alone = train(workload(balance="global"), OptimizerSpec(), 1, 1, "per_rank").steps[0]
    cut = train(workload(balance="global"), OptimizerSpec(), 3, 1, "per_rank").steps[0]
    assert alone.loss == pytest.approx(cut.loss, rel=1e-13)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_term_of_a_micro_batch_needs_all_of_its_positions(ranks: int) -> None:
    spec = WorkloadSpec("charnames_gpt", params={**SMALL, "balance": "micro-batch"})
    case = made_case("reference/context", {"context": ranks}, workload=spec)
    declared = Declaration.of(ReferenceContext, {})
    sums = "does not sum loss terms of scope 'micro-batch' (Capabilities.scopes)"
    assert declared.excludes_case(case, "") == (sums if ranks > 1 else "")
    assert replace(declared, scopes=("micro-batch",)).excludes_case(case, "") == ""


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"top_k": 5}, "top_k = 5 is more than experts = 4; set top_k to at most 4"),
        ({"top_k": 1}, "set router_weights to 'before'"),
        ({"balancing_bias": True, "balance": "rank"}, "set balance to 'none'"),
        ({"experts": 0, "z_loss": True}, "z_loss needs experts; set experts to 2 or more"),
        ({"z_loss": True, "first_step": "head"}, "set first_step to 'all'"),
        ({"capacity": 2.0}, "capacity = 2.0: must be one of"),
        # Left out: see the module's first page.
        ({"capacity_over": "global"}, "capacity_over = .*: must be one of 'micro-batch', 'sample'"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        workload(**params)
