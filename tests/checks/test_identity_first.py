"""Simpler causes come first: what is wrong already explains what follows from it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from made_case import made_case

from shardproof.case import CheckpointPlan, WorkloadSpec
from shardproof.cases.leader import judge_case
from shardproof.checks import traffic
from shardproof.checks.causes import fits, scalars
from shardproof.contract import OptimizerSpec
from shardproof.costs import Flow
from shardproof.evidence.assembled import Evidence

SUPPORT = Path(__file__).parents[1] / "support"
GPT = WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16, "seq": 8}, global_batch=12)


def test_a_norm_of_replicas_that_differ_is_no_norm_over_other_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica clips by what it holds, and gradients were not reduced over replicas."""
    case = made_case(
        "reference/hybrid",
        {"replicate": 2, "tensor": 2},
        workload=GPT,
        optimizer=OptimizerSpec(clip_norm=0.05),
        checks=("equivalence", "norm"),
    )
    account, result = judge_case(case, tmp_path, tmp_path / "oracles")
    evidence = account.figures
    assert isinstance(evidence, Evidence) and result.verdict == "pass", result.reason
    norm = float(evidence.truth.steps[0].norm)
    shown = dict(fits.pieces(evidence, 0, "gradients_final", "gradients"))
    second = [rank for rank, at in evidence.data_coordinate.items() if at == 1]
    apart = [
        (rank, [replace(p, tensor=p.tensor * (3 if rank in second else 1)) for p in own])
        for rank, own in shown.items()
    ]
    monkeypatch.setattr(scalars.fits, "pieces", lambda *_: iter(apart))
    said = scalars.of_norm(evidence, 0, second[0], 3 * norm, norm)
    assert said == "the norm is right for the reported gradients: they are wrong, not the norm"
    # What is not summed over an axis that cuts gradients is told as before.
    own = sum(float(p.tensor.double().square().sum()) for p in shown[0]) ** 0.5
    said = scalars.of_norm(evidence, 0, 0, own, norm)
    assert "of the part that rank 0 holds itself" in said or "not over 'tensor'" in said, said


@pytest.mark.parametrize(
    ("others_of", "says"),
    [(True, "as many calls, 2 times wider, as another dtype would be"), (False, "2 times as many")],
)
def test_twice_the_bytes_are_of_another_dtype_only_where_one_was_sent(
    others_of: bool, says: str
) -> None:
    key = "shard", "all_gather"
    flow = Flow(*key, Fraction(100), (2, 8))
    sent = {key: (4, Fraction(200))}
    told = traffic._flow_differs(0, "fsdp", sent, [flow], lambda *_: others_of)
    assert told.endswith(f": {says}"), told


@pytest.mark.parametrize("name", ["odd_checkpoints:MeetsAnew", "reference/local_sgd"])
def test_a_meeting_at_the_wrong_step_is_no_other_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    case = made_case(
        name,
        {"replicate": 2},
        workload=GPT,
        options={"every": 2},
        optimizer=OptimizerSpec("sgd", momentum=0.9),
        checks=("equivalence", "checkpoint"),
        checkpoint=CheckpointPlan(save_at=1),
        steps=4,
    )
    _, result = judge_case(case, tmp_path, tmp_path / "oracles")
    if name.startswith("reference"):
        assert result.verdict == "pass", result.reason
    else:
        assert "the ranks did not synchronize" in result.reason, result.reason
        assert "rate" not in result.reason


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("LeavesSample", "sample 3 is not in the loss"),
        ("LeavesPosition", "position 7 of every sample is not in the loss"),
    ],
)
def test_a_wrong_loss_names_samples_and_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    own = {"workload": GPT, "checks": ("equivalence",), "steps": 2}
    case = made_case(f"lossy_losses:{name}", {"replicate": 2}, **own)
    _, result = judge_case(case, tmp_path, tmp_path / "oracles")
    assert result.reason.startswith(f"equivalence: {says}: "), result.reason
