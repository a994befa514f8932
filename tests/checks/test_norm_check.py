"""The norm before clipping against the true one: the oracle's, or that of the gradients shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("reported", "status"),
    [
        (1.0078125, "pass"),  # a number of bfloat16, one unit in the last place off
        (1.015625, "pass"),  # four roundings
        (1.0234375, "fail"),
        (1.002, "pass"),  # no number of bfloat16: at worst tensors' norms were rounded
        (1.01, "fail"),
    ],
)
def test_a_norm_in_low_precision_is_held_to_the_roundings_of_correct_runs(
    reported: float, status: str
) -> None:
    outcome = norm.decide(figures("working_precision", reported, 1.0, 1.0))
    assert outcome.status == status, outcome.message
