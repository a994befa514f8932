"""Comparisons: pass on the truth, fail on what is spoilt, and say when they prove nothing."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from shardproof.checks import working_precision
from shardproof.checks.numbers import (
    FP64_BOUND,
    Compare,
    Comparison,
    Differs,
    Moment,
    bitwise,
    parts_within_ulps,
    powerless,
    relative_frobenius,
    root_mean_square,
    split_zero,
    within_ulps,
)
from shardproof.contract import OptimizerSpec
from shardproof.evidence.records import ComparisonRow
from shardproof.oracle.optimizers import build_optimizer, largest_terms
from shardproof.oracle.truth import frobenius

TRUTH = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(4, 6)
FP64 = relative_frobenius(FP64_BOUND)


def test_bitwise_counts_what_differs() -> None:
    other = TRUTH.clone()
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(9.0, dtype=torch.float64))
    assert bitwise(TRUTH, TRUTH.clone()).ok
    assert bitwise(other, TRUTH).error == 1
    assert not bitwise(TRUTH.float(), TRUTH).ok, "another dtype is another tensor"
    nan = torch.tensor([math.nan, 1.0])
    assert bitwise(nan, nan.clone()).ok


@pytest.mark.parametrize("factor", [1 + 1e-9, 0.5, 2.0, -1.0, math.nan, math.inf])
def test_fp64_sees_scale(factor: float) -> None:
    assert not FP64(TRUTH * factor, TRUTH).ok


def test_fp64_allows_reordering_only() -> None:
    assert FP64(TRUTH * (1 + 1e-15), TRUTH).ok
    assert not FP64(TRUTH[:2], TRUTH).ok
    one = TRUTH.clone()
    one[3, 5] += 1e-9
    assert not FP64(one, TRUTH).ok


def test_ulps_are_measured_at_the_larger_value() -> None:
    value = torch.tensor([1.0, 1e-30], dtype=torch.float64)
    step = torch.finfo(torch.float64).eps
    moved = value + torch.tensor([4 * step, 0.0], dtype=torch.float64)
    assert within_ulps(moved, value, value, ulps=4).ok
    assert not within_ulps(moved + 2 * step, value, value, ulps=4).ok
    cancelled = torch.tensor([1e-17], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    assert within_ulps(cancelled, zero, torch.ones(1, dtype=torch.float64), ulps=4).ok
    assert not within_ulps(cancelled, zero, zero, ulps=4).ok


def test_errors_and_norms_do_not_hang_on_strides() -> None:
    """A tensor that is kept may be laid out otherwise than the one that was computed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):  # a quarter of them tells, in the order of its strides
        truth = torch.randn(8, 16, dtype=torch.float64, generator=generator).t()
        actual = (truth.double() * (1 + 1e-9)).t().contiguous().t()
        assert frobenius(truth) == frobenius(truth.contiguous())
        assert FP64(actual, truth) == FP64(actual.contiguous(), truth.contiguous())


def test_power_needs_every_spoilt_copy_to_fail() -> None:
    truths = {
        "good": TRUTH,
        "zero": torch.zeros(4),
        "none": torch.empty(0, 3, dtype=torch.float64),
        "ones": torch.ones(4),
        "half": TRUTH.to(torch.bfloat16),
        "one": torch.ones(1, dtype=torch.float64),
        "infinite": torch.tensor([math.inf, 1.0]),
    }
    every = ["rolled", "halved", "scaled"]
    empty = {"zero": every, "none": every}
    flat = {"ones": ["rolled"], "one": ["rolled"]}  # equal values hide a permutation
    good = {name: [] for name in truths} | empty | flat
    for passes in (FP64.parts, bitwise.parts, partial(parts_within_ulps, ulps=4)):
        assert powerless(truths, 3, passes) == good
    loose = relative_frobenius(0.4).parts
    assert powerless({"w": TRUTH}, 3, loose) == {"w": ["scaled"]}, "a third too little"


@pytest.mark.parametrize("compare", [FP64, bitwise], ids=["fp64", "bitwise"])
def test_many_tensors_at_once_are_compared_as_one_by_one(compare: Compare) -> None:
    truths = [TRUTH, TRUTH[:1], torch.tensor([1.0, math.nan]), torch.tensor([0.0])]
    others = [TRUTH.clone(), TRUTH[:1] * (1 + 1e-9), torch.tensor([1.0, math.nan]), torch.ones(1)]
    flat, other = (torch.cat([t.double().reshape(-1) for t in ts]) for ts in (truths, others))
    at_once = [bool(ok) for ok in compare.parts(other, flat, [0, 24, 30, 32])]
    assert at_once == [
        compare(o.double(), t.double()).ok for o, t in zip(others, truths, strict=True)
    ]


def test_zero_slices_are_taken_out() -> None:
    rest, zeros = split_zero(TRUTH, [((1, 3), (0, 2))])
    assert bool((rest[1:3, :2] == 0).all()) and torch.equal(rest[0], TRUTH[0])
    assert torch.equal(zeros[0], TRUTH[1:3, :2])
    assert root_mean_square([torch.tensor([3.0, 4.0])]) == pytest.approx(math.sqrt(12.5))


@pytest.mark.parametrize(
    ("spec", "slot", "largest"),
    [
        (OptimizerSpec("sgd", weight_decay=0.5, momentum=0.5), "momentum_buffer", [3.0, 2.0]),
        (OptimizerSpec("adamw", betas=(0.75, 0.9)), "exp_avg", [4.5, 0.5]),
    ],
)
def test_moments_are_compared_in_units_of_their_largest_term(
    spec: OptimizerSpec, slot: str, largest: list[float]
) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 4.0]))
    optimizer = build_optimizer(spec, {"w": parameter})
    parameter.grad = torch.tensor([-0.5, -2.0])
    optimizer.state[parameter][slot] = torch.tensor([6.0, 0.5])
    assert largest_terms(optimizer, {"w": parameter})[f"w.{slot}"].tolist() == largest


def test_a_loss_that_one_device_has_right_by_luck_may_lose_what_its_sum_loses() -> None:
    unit = working_precision.round_off("float32")
    off = 1 + 3.5 * unit
    assert working_precision.loss_ratio(off, 1.0, 1.0, unit, shares=1) == pytest.approx(3.5)
    assert working_precision.loss_ratio(off, 1.0, 1.0, unit, shares=16) == pytest.approx(3.5 / 4)
    assert working_precision.loss_ratio(off, 1 + 7 * unit, 1.0, unit, 16) == pytest.approx(0.5)


def test_the_first_failure_of_a_moment_is_told_with_how_much_is_wrong() -> None:
    """All of the moment is compared: rows go on after the failure, and the counts are whole."""
    rows: list[ComparisonRow] = []
    moment = Moment(rows, 1, "gradients_final", "differs from the oracle")
    moment.note(Comparison(0.0, 0.0), "a", "rank 0", [0])
    moment.note(Comparison(7.0, 0.0), "b", "rank 1", [1])
    moment.note(Comparison(9.0, 0.0), "c", "rank 2", [1, 2])
    moment.note(Comparison(9.0, 0.0), "c", "rank 3", [3], part=" (zero slice)")
    with pytest.raises(Differs) as caught:
        moment.end(4)
    assert str(caught.value) == (
        "differs from the oracle: 'b' at step 1, gradients_final, rank 1: 7 elements differ, "
        "expected equal bits (wrong: 2 of 3 tensors, on 3 of 4 ranks)"
    )
    assert [row.name for row in rows] == ["a", "b", "c", "c (zero slice)"]


def test_a_moment_of_one_rank_and_one_number_has_nothing_to_count() -> None:
    moment = Moment([], 0, "forward", "summed loss 2 against 1")
    moment.note(Comparison(0.5, 1e-12), "loss", "all ranks")
    with pytest.raises(Differs, match=r"rank[s]: error 0.5 against bound 1e-12$"):
        moment.end(1)
    right = Moment([], 0, "forward", "")
    right.note(Comparison(0.0, 0.0), "loss", "all ranks")
    right.end(1)


def test_an_error_has_its_unit() -> None:
    moment = Moment([], 0, "replayed update of optimizer", "differs from a one-step replay")
    moment.note(Comparison(8.0, 0.0), "w.master", "rank 0", [0], unit="ULP")
    with pytest.raises(Differs, match="error 8 against bound 0 ULP"):
        moment.end(1)
