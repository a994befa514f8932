"""The thresholds are those of the policy, and the measured noise stays below half of them."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from shardproof.checks.numbers import WORKING_PRECISION_FACTOR_DATA_PARALLEL
from shardproof.studies.calibrate import (
    POLICY,
    RANKS,
    RECORD,
    problems,
    ring_error,
    ring_fold,
    thresholds,
)


def test_the_thresholds_stand_beside_a_measurement() -> None:
    record = json.loads(RECORD.read_text())
    assert problems(record, thresholds()) == []
    assert record["thresholds"] == thresholds()
    assert record["date"]
    assert record["versions"]["torch"]
    assert WORKING_PRECISION_FACTOR_DATA_PARALLEL <= 2.0


@pytest.mark.parametrize("dtype", POLICY)
def test_a_raised_threshold_and_a_noisier_measurement_are_found(dtype: str) -> None:
    record = json.loads(RECORD.read_text())
    (raised,) = problems(record, thresholds() | {dtype: 1.1 * POLICY[dtype]})
    assert "raised above policy" in raised
    noisy = copy.deepcopy(record)
    noisy["clean"][dtype][RANKS]["max"] = 0.6 * POLICY[dtype]
    (found,) = problems(noisy, thresholds())
    assert "2 times the clean maximum" in found
    assert "30 are asked for" in problems(record | {"seeds": 29}, thresholds())[0]


def test_ring_order_is_another_order_of_the_same_sum() -> None:
    torch.manual_seed(0)
    parts = [{"a": torch.randn(7, 3), **({"b": torch.ones(2)} if r else {})} for r in range(3)]
    found = ring_fold(0, parts)
    left = parts[0]["a"] + parts[1]["a"] + parts[2]["a"]
    assert torch.allclose(found["a"], left, atol=1e-6)
    assert not torch.equal(found["a"], left)
    assert torch.equal(found["b"], torch.full((2,), 2.0))
    assert 0 < ring_error("float64", 0, 3) < 1e-14
