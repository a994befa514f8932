"""The thresholds are those of the policy, and the measured noise stays below half of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardproof.checks.numbers import WORKING_PRECISION_FACTOR_DATA_PARALLEL
from tools.studies.calibrate import (
    POLICY,
    RANKS,
    RECORD,
    Calibration,
    problems,
    ring_error,
    ring_fold,
    thresholds,
)


def test_the_thresholds_stand_beside_a_measurement() -> None:
    record = Calibration.model_validate_json(RECORD.read_text())
    assert problems(record, thresholds()) == []
    assert record.thresholds == thresholds()
    assert record.date
    assert record.versions["torch"]
    assert WORKING_PRECISION_FACTOR_DATA_PARALLEL <= 2.0


@pytest.mark.parametrize("dtype", POLICY)
def test_a_raised_threshold_and_a_noisier_measurement_are_found(dtype: str) -> None:
    record = Calibration.model_validate_json(RECORD.read_text())
    (raised,) = problems(record, thresholds() | {dtype: 1.1 * POLICY[dtype]})
    assert "raised above policy" in raised
    noisy = record.model_copy(deep=True)
    noisy.clean[dtype][RANKS].max = 0.6 * POLICY[dtype]
    (above,) = problems(noisy, thresholds())
    assert "2 times the clean maximum" in above
    few = record.model_copy(update={"seeds": 29})
    assert "30 are required" in problems(few, thresholds())[0]


def test_a_measurement_is_written_as_it_was_read(tmp_path: Path) -> None:
    Calibration.model_validate_json(RECORD.read_text()).write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == RECORD.read_text()


def test_ring_order_is_another_order_of_the_same_sum() -> None:
    torch.manual_seed(0)
    parts = [{"a": torch.randn(7, 3), **({"b": torch.ones(2)} if r else {})} for r in range(3)]
    total = ring_fold(0, parts)
    left = parts[0]["a"] + parts[1]["a"] + parts[2]["a"]
    assert torch.allclose(total["a"], left, atol=1e-6)
    assert not torch.equal(total["a"], left)
    assert torch.equal(total["b"], torch.full((2,), 2.0))
    assert 0 < ring_error("float64", 0, 3) < 1e-14
