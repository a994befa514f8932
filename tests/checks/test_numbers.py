"""Comparisons: pass on the truth, fail on what is spoilt, and say when they prove nothing."""

from __future__ import annotations

import math

import pytest
import torch

from shardproof.checks.numbers import (
    FP64_BOUND,
    bitwise,
    powerless,
    relative_frobenius,
    root_mean_square,
    split_zero,
    within_ulps,
)
from shardproof.contract import OptimizerSpec
from shardproof.oracle.optimizers import build_optimizer, largest_terms

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


def test_power_needs_every_spoilt_copy_to_fail() -> None:
    assert powerless(TRUTH, 3, FP64) == []
    assert powerless(TRUTH, 3, bitwise) == []
    assert powerless(torch.zeros(4), 3, FP64) == ["rolled", "halved", "scaled"]
    assert powerless(torch.ones(4), 3, FP64) == ["rolled"], "equal values hide a permutation"
    assert powerless(torch.ones(1), 2, FP64) == ["rolled"]
    loose = relative_frobenius(0.4)
    assert powerless(TRUTH, 3, loose) == ["scaled"], "a third too little passes a bound of 0.4"


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
