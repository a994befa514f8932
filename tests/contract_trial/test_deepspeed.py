"""DeepSpeed ZeRO-1 through the judge: flat fragments, owners of gradients, an engine's own step."""

from __future__ import annotations

import pytest
from trial_cases import case, compared, judged, told

from suite.contract import GroupSpec, OptimizerSpec

pytest.importorskip("deepspeed", reason="the optional extra 'deepspeed' is not installed")

SYSTEM = "trial_systems.deepspeed_zero1:DeepSpeedZero1"
FP32 = {"dtype": "float32", "lane": "native"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fragments_of_flat_partitions_equal_the_oracle() -> None:
    groups = (GroupSpec("norm|bias", lr_scale=0.5, weight_decay=0.0),)
    optimizers = (
        OptimizerSpec(),
        OptimizerSpec(clip_norm=0.05),
        OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1, groups=groups, clip_norm=0.05),
    )
    cases = [
        case(SYSTEM, {"replicate": 2}, backend="gloo", optimizer=optimizer, **FP32)
        for optimizer in optimizers
    ]
    results = judged(cases)
    assert {r["verdict"] for r in results} == {"pass (native only)"}, told(results)
    assert all(compared(r) > 100 for r in results)


def test_ranks_as_threads_are_not_asked_of_it() -> None:
    (result,) = judged([case(SYSTEM, {"replicate": 2}, **FP32)])
    assert (result["verdict"], result["reason"]) == ("skip", "runs on gloo, mpi only")
