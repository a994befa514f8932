"""Loss scaling: an overflow on one rank is one on all, and faults in that are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_precision import WORKLOAD, case, verdicts

from shardproof.case import Case, WorkloadSpec
from shardproof.contract import OptimizerSpec, ScalerSpec
from shardproof.errors import ScenarioError
from shardproof.oracle.training import train
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from shardproof.workloads import make

POLICY = ScalerSpec(initial=1024.0, interval=2)
OVERFLOW = WorkloadSpec("charnames_gpt", traits=("overflow_on_one_rank",), params=WORKLOAD.params)


def scaled(name: str, **changes: Any) -> Case:
    """An fp64 case of three ranks, one of which overflows in step 1."""
    values: dict[str, Any] = {
        "precision": {},
        "optimizer": OptimizerSpec("adamw", lr=1e-3, scaler=POLICY),
        "lane": "fp64",
        "dtype": "float64",
        "mesh": {"shard": 3},
        "workload": OVERFLOW,
        "checks": ("equivalence", "replicas", "norm", "loss_scale"),
        "steps": 5,
    }
    return case(name, **(values | changes))


def test_the_oracle_skips_backs_off_and_grows() -> None:
    record = train(make(OVERFLOW), OptimizerSpec("adamw", lr=1e-3, scaler=POLICY), 3, 6).to_dict()
    steps = record["steps"]
    assert [step["skipped"] for step in steps] == [False, True, False, False, True, False]
    assert [step["scale"] for step in steps] == [1024.0, 1024.0, 512.0, 512.0, 1024.0, 512.0]
    for skipped in (1, 4):
        for kind in ("parameters", "optimizer"):
            before, after = steps[skipped - 1][kind], steps[skipped][kind]
            assert all(torch.equal(before[name], after[name]) for name in before)
    broken = [g for g in steps[4]["gradients"].values() if not bool(g.isfinite().all())]
    assert broken and not any(bool(g.isinf().any()) for g in broken)
    assert float(steps[5]["optimizer"]["head.weight.step"]) == 4


def test_a_scale_changes_no_bit_of_a_finite_run() -> None:
    item = make(WORKLOAD)
    plain = train(item, OptimizerSpec(clip_norm=0.05), 2, 2).to_dict()["steps"]
    scale = train(item, OptimizerSpec(clip_norm=0.05, scaler=POLICY), 2, 2).to_dict()["steps"]
    for one, other in zip(plain, scale, strict=True):
        assert one["loss"] == other["loss"]
        for kind in ("gradients", "clipped", "parameters"):
            assert all(torch.equal(t, other[kind][name]) for name, t in one[kind].items())


def test_only_what_comes_before_in_forward_overflows_and_only_on_one_coordinate() -> None:
    item = make(OVERFLOW)
    sick = [
        any(not bool(g.isfinite().all()) for g in _gradients(item, rank).values())
        for rank in range(3)
    ]
    assert sick == [False, False, True]
    finite = {name for name, g in _gradients(item, 2).items() if bool(g.isfinite().all())}
    assert "head.weight" in finite and "embed.token.weight" not in finite


def _gradients(item: Any, rank: int) -> dict[str, torch.Tensor]:
    build = item.build_for(0)
    module = build()
    item.load(module)
    for micro in item.batch(1, 3)[rank].micro_batches:
        loss = build.loss(module(micro.inputs), micro)
        assert bool(loss.isfinite())
        loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


FAULTS = {
    "AsksNobody": ("it made the update, the oracle did not",),
    "KeepsScale": ("its scale was 1024, the oracle's 512",),
    "CountsSkipped": ("changed in step 1, which overflowed", "after_update optimizer"),
    "ForgetsScale": ("differs from the oracle",),
    "TellsNothing": ("miss 'scale'",),
}


def test_clean_scaling_passes_and_faults_in_it_do_not() -> None:
    adamw = OptimizerSpec("adamw", lr=1e-3, scaler=POLICY)
    clipped = OptimizerSpec(scaler=POLICY, clip_norm=0.05)
    half = {"precision": {"parameters": "float16"}, "lane": "working_precision", "dtype": "float32"}
    clean = [
        scaled("reference/zero1"),
        scaled("reference/zero1", optimizer=clipped),
        scaled("reference/zero1", optimizer=adamw, **half),
    ]
    faulty = [scaled(f"faulty_precision:{name}") for name in FAULTS]
    results = verdicts([*clean, *faulty])
    for result in results[: len(clean)]:
        assert result.verdict.startswith("pass"), result.reason
    for result, words in zip(results[len(clean) :], FAULTS.values(), strict=True):
        assert result.verdict == "fail", (result.id, result.verdict, result.reason)
        messages = " ".join(check.message for check in result.checks)
        assert any(word in messages for word in words), messages


def test_the_overflow_needs_a_scaler() -> None:
    text = """
name: lacks-scaler
about: an overflow without a scaler
sees: nothing
workload: {name: charnames_gpt, traits: [overflow_on_one_rank]}
matrix: {implementation: reference/ddp, backend: in_memory, mesh: {replicate: 2}, optimizer: sgd}
checks: equivalence
"""
    with pytest.raises(ScenarioError, match="loss scaler"):
        expand(load_text(text, "lacks-scaler.yaml"), installed())
