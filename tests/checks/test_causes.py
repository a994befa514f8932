"""What coefficients of a fit mean, in words."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_case import made_case

from shardproof import registry
from shardproof.cases.kills import pair
from shardproof.cases.runner import run_cases
from shardproof.checks.causes import fits, routing
from shardproof.checks.causes.fits import said, same_of_loss
from shardproof.checks.results import CaseResult
from shardproof.contract import OptimizerSpec

SUPPORT = Path(__file__).parents[1] / "support"

KNOWN = {"ranks": 3, "micro-batches": 2, "ranks x micro-batches": 6, "loss scale": 1024.0}


@pytest.mark.parametrize(
    ("rows", "before", "sentence"),
    [
        ([[1, 1], [1, 1]], 0.0, ""),
        ([[2, 2], [2, 2]], 0.0, "every gradient is 2 times too large (2 = micro-batches)"),
        ([[1 / 3] * 2] * 3, 0.0, "every gradient is 3 times too small (3 = ranks)"),
        ([[1024.0] * 2] * 3, 0.0, "every gradient is 1024 times too large (1024 = loss scale)"),
        ([[1.7] * 2] * 3, 0.0, "every gradient is 1.7 times too large"),
        ([[-1.0] * 2] * 3, 0.0, "every gradient has the wrong sign (-1 times the true one)"),
        ([[0, 0], [0, 0]], 0.0, "every gradient is zero"),
        ([[1 / 1024] * 2] * 3, 0.0, "every gradient is 1024 times too small (1024 = loss scale)"),
        ([[0, 0], [0, 0]], 1.0, "this is the gradient of the step before"),
        ([[1, 1], [1, 1]], 0.5, "the gradient contains that of the step before 0.5 times"),
        ([[1, 1], [0, 0], [1, 1]], 0.0, "the share of data coordinate 1 is missing"),
        ([[1, 1], [2, 2], [1, 1]], 0.0, "data coordinate 1 counts 2 times"),
        (
            [[0, 0], [1, 1], [0, 0]],
            0.0,
            "this is the gradient of data coordinate 1 alone: it was not reduced",
        ),
        ([[0, 1], [0, 1]], 0.0, "the gradient contains only the last micro-batch"),
        ([[0, 0, 1], [0, 1]], 0.0, "the gradient contains only the last micro-batch"),
        ([[1, 0], [1, 0]], 0.0, "the gradient contains only the first micro-batch"),
        ([[1, 2, 1], [1, 2, 1]], 0.0, "micro-batch 1 counts 2 times"),
        ([[1, 0, 1], [1, 0, 1]], 0.0, "the share of micro-batch 1 is missing"),
        ([[1, 1], [1, 0]], 0.0, "micro-batch 1 of data coordinate 1 counts 0 times"),
    ],
)
def test_what_coefficients_mean(rows: list[list[float]], before: float, sentence: str) -> None:
    assert said(rows, before, KNOWN) == sentence


def test_a_factor_that_may_be_either_of_two_numbers_names_both() -> None:
    known = {"ranks": 2, "micro-batches": 2, "loss scale": 1.0}
    assert said([[2, 2], [2, 2]], 0.0, known) == (
        "every gradient is 2 times too large (2 = ranks or micro-batches, as many here: another "
        "number of ranks tells which)"
    )


@pytest.mark.parametrize(
    ("loss", "gradients", "is_same"),
    [
        ("the loss is 2 times too large", "every gradient is 2 times too large", True),
        ("the loss is 2 times too large", "every gradient is 3 times too large", False),
        (
            "the loss contains only the last micro-batch",
            "the gradient contains only the last micro-batch",
            True,
        ),
        ("the loss is 2 times too large", "the gradient contains only the last micro-batch", False),
        ("this is the loss of the step before", "this is the gradient of the step before", True),
        (
            "this is the loss of data coordinate 0 alone",
            "this is the gradient of data coordinate 0 alone: it was not reduced",
            True,
        ),
        (
            "every micro-batch counts the same in the loss, however many tokens it has",
            "micro-batch 0 counts 0.9 times",
            True,
        ),
        (
            "every micro-batch counts the same in the loss, however many tokens it has",
            "every gradient is 2 times too small",
            False,
        ),
        ("", "every gradient is 2 times too small", False),
    ],
)
def test_what_a_wrong_loss_says_of_gradients(loss: str, gradients: str, is_same: bool) -> None:
    assert same_of_loss(loss, gradients) is is_same


@pytest.mark.parametrize("shows_buffers", [True, False])
def test_experts_are_blamed_only_if_their_tokens_were_counted(shows_buffers: bool) -> None:
    counts = {"mlp.load": torch.tensor([3, 1]), "mlp.dropped": torch.zeros(2)}
    held = {name: {0: tensor} for name, tensor in counts.items() if shows_buffers}
    step = SimpleNamespace(routed=[{"mlp": counts["mlp.load"]}], buffers=[counts])
    evidence: Any = SimpleNamespace(
        case=made_case("reference/expert", {"expert": 2}),
        truth=SimpleNamespace(steps=[step]),
        observed=lambda *_: SimpleNamespace(tensors=held),
    )
    assert routing.of_choices(evidence, 0) == ""
    assert bool(routing.of_experts(evidence, 0)) == shows_buffers


#: One fault for every kind of sentence.
SENTENCES = {
    "ddp_divides_by_world": "every gradient is 3 times too small (3 = ranks)",
    "ddp_never_reduces": "the gradient of data coordinate 0 alone: it was not reduced",
    "ddp_fourth_rank_left_out": "the share of data coordinate 3 is missing",
    "ddp_reduces_in_fp32": "gradients are those of rounding to float32",
    "ddp_exchanges_equal_buckets": "contains a rank's gradient of 'blocks.2.mlp.up.bias'",
    "tensor_norm_not_summed": "of 'norm.weight' on ranks [0, 1] add up to the expected gradient",
    "tensor_gather_scatters_terms": "in forward order is wrong, every later one is right",
    "torch_tensor_first_chunk_everywhere": "the part of 'embed.token.weight' on rank 1 is wrong",
    "torch_pipeline_backwards": "the difference is within the error of reordered summation",
    "zero2_norm_of_nothing": "nothing was clipped",
    "ddp_clips_on_rank_0_only": "rank 1 does not clip",
    "zero2_clips_scaled_norm": "the norm is 1024 times too large (1024 = loss scale)",
    "zero2_averages_norms": "the norms of ranks [0, 1, 2] were averaged",
    "ddp_norm_before_last_bucket": "before the gradients of 'embed.token.weight' were reduced",
    "hybrid_norm_misses_the_stages": "the squares were summed over 'tensor' only, not over 'pipe'",
    "zero1_norm_of_local_shards": "this is the norm of the part that rank 0 holds itself",
    "ddp_ignores_warmup": "every update is 4 times the true one",
    "ddp_drops_weight_decay": "weight decay was left out",
    "zero2_one_shard_loses_momentum": "the update began with an empty optimizer state",
    "zero1_optimizer_on_old_tensors": "no update was made",
    "zero2_reports_scaled_loss": "the loss is 1024 times too large (1024 = loss scale)",
    "pipeline_tells_last_window_only": "only the last window is in the loss",
    "pipeline_labels_of_another_micro_batch": "against the targets of the next micro-batch",
    "zero2_drops_in_evaluation": "this is the loss in training mode",
    "tensor_loss_plus_log": "the loss is too large by log(2)",
    "tensor_identical_shards": "from rank 0's part",
    "ddp_forgets_initial_parameter": "rank 1 starts 'embed.token.weight' from the values",
    "ddp_dummy_first_step": "an update with gradients of zero was made before the first step",
    "recompute_updates_buffers_twice": "counted every micro-batch twice",
    "ddp_keeps_local_buffers": "'blocks.0.norm.running_mean' was never sent",
    "ddp_full_state_of_the_start": "it is the value held after setup",
    "zero1_reduces_narrow": "as many calls, 2 times narrower, as another dtype would be",
}


def test_planted_faults_are_called_by_their_cause() -> None:
    cases = {n: pair(registry.load_mutant(n), weigh_all=False).case for n in SENTENCES}
    results, _ = run_cases(list(cases.values()), 2, lambda result: None)
    reasons = {result.id: result.reason for result in results}
    for name, case in cases.items():
        assert SENTENCES[name] in reasons[case.id], reasons[case.id]


def test_what_is_not_there_is_not_missing_and_digits_count() -> None:
    assert said([[2.0, None], [None, None]], 0.0) == "every gradient is 2 times too large"
    assert said([[1.0, None], [1.0, 1.0]], 0.0) == ""
    assert said([[1.004] * 2] * 2, 0.0).startswith("every gradient is 1.004 times")
    assert said([[1.004] * 2] * 2, 0.0, digits=2) == ""
    assert "missing" not in said([[0.005]] * 199 + [[0.01]], 0.0)


#: What is wrong by a factor of 1 + 1e-10 or 1 - 1e-10 -> how the reason begins.
SLIGHTLY = {
    "Loss": "equivalence: summed loss ",
    "Evaluation": "equivalence: differs: 'loss' at step 2, evaluation",
    "Norm": "norm: pre-clip global norm is wrong",
    "Start": "equivalence: rank 0 starts {} from 1 ~ 1e-10 times the values given: ",
    "Gradients": "equivalence: {} are multiples of the expected gradients, 1 ~ 1e-10 times: ",
    "Clipped": "equivalence: clipped by a norm that is 1 ^ 1e-10 times the true one: ",
}


#: Systems that round outputs -> what must be said of them.
ROUNDED = {
    "Rounds": "equivalence: the outputs were cast to float32 before the loss: summed loss",
    "RoundsMore": "equivalence: the outputs were cast to bfloat16 before the loss: summed loss",
    "RoundsInEvaluation": (
        "equivalence: the outputs were cast to float32 before the loss: differs: 'loss' at "
        "step 2, evaluation"
    ),
    "LeavesNarrow": "equivalence: the outputs were cast to float16 before the loss: summed loss",
}


@pytest.fixture(scope="module")
def slightly_wrong() -> dict[str, CaseResult]:
    optimizer = OptimizerSpec("adamw", clip_norm=0.01)
    cases = [
        made_case(
            f"slightly_wrong:{name}",
            {"shard": 3},
            id=name,
            optimizer=optimizer,
            checks=("equivalence", "norm"),
        )
        for name in (*(way + what for what in SLIGHTLY for way in ("More", "Less")), *ROUNDED)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        patch.setenv("PYTHONPATH", str(SUPPORT))
        results, _ = run_cases(cases, 2, lambda result: None)
    return {result.id: result for result in results}


@pytest.mark.parametrize("way", ["More", "Less"])
@pytest.mark.parametrize("what", SLIGHTLY)
def test_a_cause_explains_much_more_than_the_truth(
    slightly_wrong: dict[str, CaseResult], what: str, way: str
) -> None:
    result = slightly_wrong[f"{way}{what}"]
    assert result.verdict == "fail"
    more, less = "+-" if way == "More" else "-+"
    begin, _, end = SLIGHTLY[what].replace("~", more).replace("^", less).partition("{}")
    assert result.reason.startswith(begin), result.reason
    assert end in result.reason, result.reason


@pytest.mark.parametrize("name", ROUNDED)
def test_outputs_that_were_rounded_are_told(
    slightly_wrong: dict[str, CaseResult], name: str
) -> None:
    result = slightly_wrong[name]
    assert result.reason.startswith(ROUNDED[name]), result.reason


@pytest.mark.parametrize(
    ("held", "tries", "sentence"),
    [
        (1.1, [1.0, 1.05, 1.08], ""),
        (1.1, [1.0, 1.099, 1.09999], "2"),
        (1.1, [1.0, 1.099, 1.0989, 1.0991], "1"),
        (1.1, [1.1, 1.1], "0"),
        (1.1, [math.nan, 1.1], "1"),
        (math.nan, [math.nan, 1.1], ""),
    ],
)
def test_the_nearest_try_tells_and_of_near_ones_the_first(
    held: float, tries: list[float], sentence: str
) -> None:
    named = [(value, str(number)) for number, value in enumerate(tries)]
    assert fits.nearest(held, 1.0, named, limit=0.01) == sentence
    tensors = [(torch.tensor([value, 0.0]), name) for value, name in named]
    of = fits.nearest(torch.tensor([held, 0.0]), torch.tensor([1.0, 0.0]), tensors, limit=0.01)
    assert of == sentence


@pytest.mark.parametrize(
    ("held", "times"),
    [([1.0, 2.0, 3.0], 1.0), ([3.0, 6.0, 9.0], 3.0), ([1.0, 2.0, 4.0], None), ([1.001, 2, 3], 1.0)],
)
def test_a_multiple_of_the_truth_is_told_where_the_truth_does_not_do(
    held: list[float], times: float | None
) -> None:
    held, truth = {"w": torch.tensor(held)}, {"w": torch.tensor([1.0, 2.0, 3.0])}
    assert fits.multiple(held, truth, limit=0.01) == times
