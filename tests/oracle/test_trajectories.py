"""As many trajectories on one process: they part, they meet, and with a meeting in every step and
plain SGD they are data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from own_models import SLOT_LIKE
from torch import Tensor

from shardproof import prove
from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec, Refused, is_outer
from shardproof.evidence.records import OracleFacts
from shardproof.impls.reference import diloco, local_sgd
from shardproof.impls.reference.parts.alone import Meeting, Meets, Tensors
from shardproof.oracle import asked
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


class Careless(local_sgd.ReferenceLocalSGD):
    """Its meeting works in what it is given, and returns that."""

    @classmethod
    def meeting(cls, options: Mapping[str, Any]) -> Meeting:
        class Counts(Meeting):
            def begin(self, parameters: Tensors) -> dict[str, Tensor]:
                return {f"{next(iter(parameters))}.outer_count": torch.zeros(1)}

            def meet(
                self, ends: Sequence[Tensors], kept: Tensors
            ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
                for count in kept.values():
                    count.add_(1)
                return super().meet(ends, kept)[0], {**kept}

        return Counts(Meets(every=1))


def test_a_meeting_that_works_in_place_changes_nothing_that_is_recorded() -> None:
    steps = train_apart(SMALL, SGD, 2, 3, asked.Meets(Careless, {})).steps
    slot = next(name for name in steps[0].optimizer if name.endswith("outer_count"))
    assert [step.apart[1].optimizer[slot].item() for step in steps] == [1, 2, 3]


def test_a_number_that_one_trajectory_alone_loses_is_told() -> None:
    truth = train_apart(SMALL, SGD, 2, 2, local_sgd.ReferenceLocalSGD.meeting({"every": 2}))
    assert OracleFacts.of(truth).diverges() == ""
    lost = truth.steps[0].apart[1].gradients
    assert lost
    next(iter(lost.values()))[:] = float("nan")
    assert "the oracle itself diverges" in OracleFacts.of(truth).diverges()


def test_a_layer_may_be_called_as_slots_are() -> None:
    assert is_outer("net.weight.outer_start") and not is_outer("net.outer_one.weight.exp_avg")
    rows = prove(
        "reference/ddp", worlds=(2,), optimizer="adamw", workload=SLOT_LIKE, backends=("in_memory",)
    )
    assert list(rows["verdict"]) == ["pass"], list(rows["reason"])


def test_a_case_in_which_ranks_never_meet_proves_nothing() -> None:
    rows = prove("reference/local_sgd", worlds=(2,), options={"every": 9}, backends=("in_memory",))
    assert list(rows["verdict"]) == ["precondition"], list(rows["reason"])
    assert "never synchronize in the 3 steps" in rows["reason"][0]
