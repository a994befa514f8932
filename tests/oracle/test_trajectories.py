"""As many trajectories on one process: they part, they meet, and with a meeting in every step and
plain SGD they are data parallelism."""

from __future__ import annotations

import pytest
import torch

from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec, Refused
from shardproof.impls.reference import diloco, local_sgd
from shardproof.oracle.training import train
from shardproof.oracle.trajectories import train_apart
from shardproof.workloads import make

SMALL = make(WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16, "seq": 8}), "float64")
SGD = OptimizerSpec()


def test_trajectories_part_and_meet_where_the_meeting_says() -> None:
    meeting = local_sgd.ReferenceLocalSGD.meeting({"every": 3})
    steps = train_apart(SMALL, SGD, 2, 4, meeting).steps
    assert [step.met for step in steps[0].apart] == [False, False]
    assert [step.apart[0].met for step in steps] == [False, False, True, False]
    assert [step.parted for step in steps] == [True, True, False, True]


@pytest.mark.parametrize(
    "meeting",
    [
        local_sgd.ReferenceLocalSGD.meeting({"every": 1}),
        diloco.ReferenceDiLoCo.meeting({"every": 1, "outer_lr": 1, "outer_momentum": 0}),
    ],
)
def test_a_meeting_in_every_step_is_data_parallelism(meeting: diloco.Meeting) -> None:
    alone, together = train_apart(SMALL, SGD, 3, 3, meeting), train(SMALL, SGD, 3, 3)
    for one, other in zip(alone.steps, together.steps, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-12)
        for name, want in other.parameters.items():
            torch.testing.assert_close(one.parameters[name], want, rtol=1e-12, atol=1e-13)


def test_the_outer_step_by_hand() -> None:
    """Ranks that found 3 and 5 from 8: d = 4, m = 4, a step of 0.5 (4 + 1); then from 5.5."""
    options = {"every": 1, "outer_lr": 0.5, "outer_momentum": 0.25}
    meeting = diloco.ReferenceDiLoCo.meeting(options)
    at = lambda value: {"w": torch.tensor([value], dtype=torch.float64)}  # noqa: E731
    kept = meeting.begin(at(8.0))
    found, kept = meeting.meet([at(3.0), at(5.0)], kept)
    assert found["w"].item() == 8 - 0.5 * (4 + 0.25 * 4) == 5.5
    found, kept = meeting.meet([at(4.5), at(4.5)], kept)
    momentum = 0.25 * 4 + 1
    assert kept["w.outer_momentum"].item() == momentum
    assert found["w"].item() == 5.5 - 0.5 * (1 + 0.25 * momentum)


@pytest.mark.parametrize("momentum", [-0.1, 1, float("nan")])
def test_a_momentum_that_never_ends_is_refused(momentum: float) -> None:
    with pytest.raises(Refused, match="outer_momentum"):
        diloco.ReferenceDiLoCo.capabilities({"outer_momentum": momentum})
