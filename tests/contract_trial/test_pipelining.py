"""PyTorch's pipeline schedules through the judge: state on the owning stage, loss on the last."""

from __future__ import annotations

import dataclasses

import pytest
from trial_cases import case, compared, judged, told

from suite.contract import GroupSpec, OptimizerSpec

SYSTEM = "trial_systems.pipelining:Pipelining"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_schedules_equal_the_oracle(schedule: str) -> None:
    base = case(SYSTEM, {"pipe": 2}, options={"schedule": schedule})
    windows = dataclasses.replace(base.workload, micro_batches=4, windows=2, global_batch=16)
    clipped = OptimizerSpec(clip_norm=0.05)
    groups = (GroupSpec("norm|bias", lr_scale=0.5, weight_decay=0.0),)
    adamw = OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1, groups=groups, clip_norm=0.05)
    cases = [
        case(SYSTEM, {"pipe": 2}, options={"schedule": schedule}, workload=windows, **changes)
        for changes in (
            {},
            {"optimizer": clipped},
            {"optimizer": adamw},
            {"backend": "gloo"},
            {"lane": "bitwise"},
        )
    ]
    results = judged(cases)
    assert {r["verdict"] for r in results} == {"pass"}, told(results)
    assert all(compared(r) > 100 for r in results)


def test_calls_outside_of_a_step() -> None:
    """Evaluation in mid-run, saved and resumed stage by stage, parameters forced."""
    (result,) = judged(
        [case(SYSTEM, {"pipe": 2}, options={"schedule": "1f1b"})], conduct="trial_calls:conduct"
    )
    assert not result["error"], result["error"]
    first, last = result["ranks"]
    assert first["untrained"] is None
    assert last["untrained"] == pytest.approx(result["truth"], rel=1e-12)
    assert last["forced"] == last["untrained"]
    assert last["trained"] < last["untrained"]
    for rank in (first, last):
        assert rank["resumed"]
        assert rank["extra"] == {"step": 1}
        assert not rank["changed_by_evaluation"]
