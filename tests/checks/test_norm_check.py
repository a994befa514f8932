"""The norm before clipping against the true one: the oracle's, or that of the gradients shown."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import get_total_norm

from shardproof.checks import norm
from shardproof.contract import OptimizerSpec
from shardproof.evidence.records import OracleStep


def figures(lane: str, reported: float, shown: float, oracle: float) -> Any:
    """One rank, one step, two equal gradients that are told by two replicas each."""
    rows = [
        SimpleNamespace(
            step=0, point=point, kind="gradients", name=name, replica=replica, norm=shown / 2**0.5
        )
        for point in ("gradients_final", "after_clip")
        for name in ("a", "b")
        for replica in (0, 1)
    ]
    step = SimpleNamespace(present=True, norm=reported, share=0)
    dtype = "bfloat16" if lane == "working_precision" else "float64"
    return SimpleNamespace(
        case=SimpleNamespace(optimizer=OptimizerSpec(clip_norm=0.1), lowest_dtype=dtype, lane=lane),
        steps=range(1),
        oracle=SimpleNamespace(steps=[OracleStep(1.0, oracle, 1.0, False)]),
        records=[SimpleNamespace(rank=0, steps=[step])],
        tensors=rows,
        compared={},
    )


@pytest.mark.parametrize(
    ("lane", "reported", "shown", "oracle", "status"),
    [
        ("fp64", 1.0, 1.0, 1.0, "pass"),
        ("fp64", 1.0, 1.0, 1.1, "fail"),
        # Trajectories part in bfloat16: the step is judged by what it started from.
        ("working_precision", 1.0, 1.01, 1.1, "pass"),
        ("working_precision", 1.1, 1.0, 1.1, "fail"),
    ],
)
def test_what_is_true_of_a_norm(
    lane: str, reported: float, shown: float, oracle: float, status: str
) -> None:
    outcome = norm.decide(figures(lane, reported, shown, oracle))
    assert outcome.status == status, outcome.message


def test_the_first_wrong_step_is_named_and_not_the_worst() -> None:
    told = figures("fp64", 1.0, 1.0, 1.1)
    of = lambda norm: SimpleNamespace(present=True, norm=norm, share=0)  # noqa: E731
    told.steps = range(3)
    told.oracle.steps = [OracleStep(1.0, 1.0, 1.0, False)] * 3
    told.records = [
        SimpleNamespace(rank=0, steps=[of(1.0), of(1.0), of(9.0)]),
        SimpleNamespace(rank=1, steps=[of(1.0), of(1.1), of(9.0)]),
    ]
    message = norm.decide(told).message
    assert "at step 1, gradients_final, rank 1: error 0.1 against" in message
    assert message.endswith("(wrong: on 1 of 2 ranks)")


def test_norms_that_torch_gives_for_shards_may_be_added_up_in_fp32() -> None:
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for _ in range(300):
        scales = 10 ** (3 * torch.rand(2, 6, generator=generator) - 1.5)
        shards = [
            [(torch.randn(50, generator=generator) * scale).bfloat16() for scale in own]
            for own in scales
        ]
        total = math.hypot(*(float(get_total_norm(own, foreach=False)) for own in shards))
        true = math.hypot(*(float(one.double().norm()) for own in shards for one in own))
        outcome = norm.decide(figures("working_precision", total / true, 1.0, 1.0))
        assert outcome.status == "pass", outcome.message
        worst = max(worst, abs(total / true - 1))
    assert worst > 0.004  # more than one rounding explains


@pytest.mark.parametrize(
    ("reported", "status"),
    [
        (1.0078125, "pass"),  # a number of bfloat16, one unit in the last place off
        (1.015625, "pass"),  # four roundings
        (1.0234375, "fail"),
        (1.0075, "pass"),  # no number of bfloat16: at worst norms of shards were rounded twice
        (1.01, "fail"),
    ],
)
def test_a_norm_in_low_precision_is_held_to_the_roundings_of_correct_runs(
    reported: float, status: str
) -> None:
    outcome = norm.decide(figures("working_precision", reported, 1.0, 1.0))
    assert outcome.status == status, outcome.message
