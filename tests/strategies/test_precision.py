"""Mixed precision: policies are read, masters do their work, and faults in them are seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.runner import run_cases
from shardproof.checks import working_precision
from shardproof.contract import OptimizerSpec, Piece, Refused
from shardproof.impls.reference.engine.choices import Training
from shardproof.impls.reference.engine.masters import Masters, gradient_dtype
from shardproof.impls.reference.engine.offload import HostMemory
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.precision import Precision
from shardproof.oracle.training import Way, train
from shardproof.registry.declaration import Declaration
from shardproof.workloads import make

HERE = Path(__file__).parents[1] / "support"
BF16, FP32 = torch.bfloat16, torch.float32
WORKLOAD = WorkloadSpec("charnames_gpt", params={"layers": 1, "width": 16})
A16 = {"parameters": "bfloat16"}
M18 = {"parameters": "bfloat16", "reduce": "float32"}


def case(name: str, **changes: Any) -> Case:
    """One case in working precision of two ranks under a policy (A16 unless given)."""
    values: dict[str, Any] = {
        "precision": A16,
        "optimizer": OptimizerSpec(lr=0.1),
        "lane": "working_precision",
        "dtype": "float32",
        "mesh": {"shard": 2},
        "workload": WORKLOAD,
        "checks": ("equivalence", "replicas"),
        "steps": 3,
    } | changes
    values["options"] = {"precision": dict(values["precision"])}
    label = "::".join(str(value) for value in changes.values())
    return Case(
        id=f"precision::{name}::{label}",
        scenario="precision",
        implementation=name,
        backend="in_memory",
        **values,
    )


def verdicts(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Results in the order of ``cases``."""
    results: dict[str, dict[str, Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE))
        run_cases(list(cases), 2, lambda result: results.update({result.id: result}))
    return [results[item.id] for item in cases]


# -------------------------------------------------------------------------------------- the policy


def test_a_policy_is_read_from_names_of_dtypes() -> None:
    options = {"precision": {"parameters": "bfloat16", "reduce": "float32", "output": None}}
    policy = parse_options(Training, options).precision
    assert policy == Precision(parameters=BF16, reduce=FP32)
    assert policy.compute(FP32) == BF16
    assert policy.reduction(FP32) == FP32
    assert Precision(parameters=BF16).reduction(FP32) == BF16
    assert parse_options(Training, {}).precision.as_built


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"precision": {"parameters": "bf16"}},
            "'bf16' is not a dtype; valid: float64, float32, bf",
        ),
        ({"precision": {"paramters": "bfloat16"}}, "did you mean 'precision.parameters'"),
        ({"precision": "bfloat16"}, "must be of type mapping"),
        ({"precision": {"reduce": 16}}, "type dtype"),
        ({"offload": "disk"}, "valid: none, optimizer, parameters"),
        ({"recompute_every": -1}, "at least 0"),
    ],
)
def test_bad_policies_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        parse_options(Training, options)


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        (Precision(parameters=BF16), "bfloat16"),
        (Precision(buffers=BF16), "float32"),
        (Precision(parameters=torch.float16, buffers=BF16), "float16"),
    ],
)
def test_batch_norms_want_one_dtype(policy: Precision, given: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(Refused, match=rf"'1' \(BatchNorm1d\).*buffers to {given}"):
        policy.check_norms(model)
    dtype = getattr(torch, given)
    Precision(parameters=dtype, buffers=dtype, reduce=FP32).check_norms(model)
    Precision(reduce=BF16).check_norms(model)
    policy.check_norms(torch.nn.BatchNorm1d(2, affine=False))
    policy.check_norms(torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.InstanceNorm1d(2)))


def test_only_floating_point_is_cast() -> None:
    policy = Precision(parameters=BF16, output=FP32, buffers=BF16)
    assert policy.cast_inputs(torch.tensor([3])).dtype == torch.int64
    assert policy.cast_inputs(torch.ones(1)).dtype == BF16
    assert policy.cast_outputs(torch.ones(1, dtype=BF16)).dtype == FP32
    norm = torch.nn.BatchNorm1d(2)
    policy.cast_buffers(norm)
    assert norm.running_mean is not None and norm.running_mean.dtype == BF16
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.dtype == torch.int64


# ----------------------------------------------------------------------------------- the masters


def masters_of(working: torch.Tensor) -> Masters:
    groups = [{"params": [("w", working)], "lr": 1.0}]
    assert Masters.wanted(groups, {"w": FP32})
    return Masters(groups, {"w": FP32})


def test_small_updates_add_up_in_the_master() -> None:
    working = torch.ones(3, dtype=BF16)
    masters = masters_of(working)
    optimizer = torch.optim.SGD(masters.groups, foreach=False)
    for _ in range(8):
        working.grad = torch.full((3,), 2.0**-10, dtype=BF16)
        masters.copy_down()
        assert working.grad is None
        optimizer.step()
        masters.copy_up()
        masters.after_step()
    # One such step is a quarter of bf16's distance between numbers below 1: alone it rounds away.
    assert torch.equal(working, torch.full((3,), 1 - 2.0**-7, dtype=BF16))
    (piece,) = masters.master_pieces(lambda name, slot, t: Piece.whole(f"{name}.{slot}", t))
    assert piece.name == "w.master" and piece.tensor.dtype == FP32
    assert float(piece.tensor[0]) == 1 - 2.0**-7


def test_factors_are_applied_where_gradients_are_wide() -> None:
    working = torch.ones(1, dtype=torch.float16)
    masters = masters_of(working)
    working.grad = torch.full((1,), 2.0**-20, dtype=torch.float16)
    masters.scale_gradients(torch.tensor(2.0**-10))
    (seen,) = masters.gradient_pieces([Piece.whole("w", working.grad)])
    assert float(seen.tensor) == 2.0**-30  # fp16 has nothing between 0 and 2 ** -24
    assert seen.source is working.grad
    masters.copy_down()
    ((_, master),) = masters.groups[0]["params"]
    assert float(master.grad) == 2.0**-30
    masters.after_step()
    assert float(masters.factor) == 1.0


@pytest.mark.parametrize("reduced", [FP32, BF16])
def test_gradients_may_have_another_dtype_than_their_tensor(reduced: torch.dtype) -> None:
    working = torch.ones(2, dtype=BF16 if reduced == FP32 else FP32)
    working.grad_dtype = reduced
    assert gradient_dtype(working) == reduced
    masters = masters_of(working)
    optimizer = torch.optim.SGD(masters.groups, foreach=False)
    working.grad = torch.full((2,), 0.5, dtype=reduced)
    masters.copy_down()
    optimizer.step()
    masters.copy_up()
    assert working.tolist() == [0.5, 0.5]


def test_loaded_parameters_restart_only_masters_that_do_not_round_to_them() -> None:
    working = torch.ones(2, dtype=BF16)
    masters = masters_of(working)
    _, master = masters.pairs["w"]
    master.copy_(torch.tensor([1 + 2.0**-12, 1 + 2.0**-12]))
    working[1] = 3.0
    masters.restart()
    assert master.tolist() == [1 + 2.0**-12, 3.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="host and device are one without a GPU")
def test_masters_on_the_host_restart_from_parameters_on_the_gpu() -> None:
    working = torch.ones(2, dtype=BF16, device="cuda")
    groups = [{"params": [("w", working)], "lr": 1.0}]
    masters = Masters(groups, {"w": FP32}, HostMemory("cuda"))
    _, master = masters.pairs["w"]
    master.copy_(torch.tensor([1 + 2.0**-12, 1 + 2.0**-12]))
    working[1] = 3.0
    masters.restart()
    assert master.device.type == "cpu" and master.tolist() == [1 + 2.0**-12, 3.0]


def test_no_masters_where_nothing_is_narrow() -> None:
    groups = [{"params": [("w", torch.ones(2))]}]
    assert not Masters.wanted(groups, {"w": FP32})


# ------------------------------------------------------------------------------------ the judge


def test_one_device_follows_the_policy() -> None:
    item = make(WORKLOAD, "float32", "working_precision", "bfloat16")
    runs = {
        name: train(item, OptimizerSpec(lr=1e-4), 2, 2, way=Way(policy)).to_dict()
        for name, policy in (("a16", A16), ("m18", M18))
    }
    plain = train(item, OptimizerSpec(lr=1e-4), 2, 2).to_dict()
    for run in runs.values():
        first, second = run["steps"]
        assert all(t.dtype == FP32 for t in first["gradients"].values())
        # An update is kept in more bits than what is computed with has.
        kept = first["parameters"]["head.weight"]
        assert not torch.equal(kept.to(BF16).to(FP32), kept)
        assert not torch.equal(kept, second["parameters"]["head.weight"])
    name = "head.weight"
    gradients = {key: run["steps"][0]["gradients"][name] for key, run in runs.items()}
    assert torch.equal(gradients["a16"], gradients["a16"].to(BF16).to(FP32))
    assert not torch.equal(gradients["m18"], gradients["m18"].to(BF16).to(FP32))
    error = {
        k: float((g - plain["steps"][0]["gradients"][name]).norm()) for k, g in gradients.items()
    }
    assert 0 < error["m18"] < error["a16"]


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        ({}, 3.0),
        (A16, 4.0),
        (M18, 2.0),
        ({"reduce": "bfloat16"}, 4.0),
        ({"output": "float16"}, 4.0),
    ],
)
def test_the_coarsest_dtype_sets_the_bound(policy: dict[str, str], bound: float) -> None:
    figures = SimpleNamespace(case=case("plain", precision=policy), declaration=Declaration())
    assert working_precision.factor(figures) == bound  # type: ignore[arg-type]


def test_clean_policies_pass_and_faulty_masters_do_not() -> None:
    adamw = OptimizerSpec("adamw", lr=1e-3)
    late = replace(WORKLOAD, traits=("conditional_late_step",))
    cases = [
        case("reference/zero1", precision=M18),
        case("reference/zero1", precision={"parameters": "float16"}, optimizer=adamw),
        # A parameter that nobody has updated yet has a master and no moments.
        case("reference/zero1", precision=A16, optimizer=adamw, workload=late),
        case("faulty_precision:TruncatesMasters", optimizer=adamw),
        case("faulty_precision:ForgetsMasters", optimizer=adamw),
    ]
    *sound, cut, forgotten = verdicts(cases)
    for clean in sound:
        assert clean.verdict == "pass (working precision only)", clean.reason
    assert cut.verdict == "fail" and "replay" in cut.reason, cut.reason
    assert forgotten.verdict == "fail" and ".master" in forgotten.reason, forgotten.reason


@pytest.mark.parametrize("policy", [M18, {"parameters": "float16"}])
def test_a_policy_that_is_ignored_is_no_pass(policy: dict[str, str]) -> None:
    [found] = verdicts([case("faulty_precision:IgnoresThePolicy", precision=policy)])
    assert found.verdict == "fail"
    told = f"no gradient shows the rounding of {policy['parameters']}, which 'precision' asks for"
    assert told in found.reason


def test_policies_agree_bit_for_bit_with_one_device() -> None:
    one = WorkloadSpec("charnames_gpt", params=WORKLOAD.params, micro_batches=1)
    cases = [
        case("reference/zero1", lane="bitwise", workload=one, precision=policy)
        for policy in (A16, M18)
    ]
    for result in verdicts(cases):
        assert result.verdict == "pass", result.reason


def test_the_errors_of_small_tensors_are_judged_together() -> None:
    large, small = torch.linspace(1, 2, 64), torch.tensor([1.0, 2.0])
    truth = {"weight": large, "bias": small, "scale": 3 * small}
    one = {name: value * (1 + 1e-7) for name, value in truth.items()}
    chance = one | {"bias": small * (1 + 5e-7)}
    ratios = working_precision.ratios(chance, one, truth)
    assert ratios["bias"] == ratios["scale"] < 3, "by chance five times the error of one device"
    wrong = one | {"bias": small * (1 + 1e-4)}
    assert working_precision.ratios(wrong, one, truth)["bias"] > 100
    swapped = one | {"bias": small.flip(0)}
    assert working_precision.ratios(swapped, one, truth)["bias"] > 1e5


def test_a_matrix_of_two_columns_is_judged_with_the_small_ones() -> None:
    truth = {"weight": torch.linspace(1, 2, 96), "thin": torch.linspace(1, 2, 64).view(32, 2)}
    truth |= {"scale": torch.tensor([3.0, 4.0, 5.0]), "shift": torch.linspace(1, 2, 64)}
    one = {name: value * (1 + 1e-7) for name, value in truth.items()}
    column = torch.tensor([1 + 6e-7, 1 + 1e-7])
    chance = one | {"thin": truth["thin"] * column}
    ratios = working_precision.ratios(chance, one, truth)
    assert ratios["thin"] == ratios["scale"] < 2, "by chance: one of 64 ways"
    assert ratios["shift"] == 1, "it joins them, and is judged alone"
    wide = one | {"weight": truth["weight"] * (1 + 6e-7)}
    more = working_precision.ratios(wide, one, truth)["weight"]
    assert more > 4, "a vector errs in as many directions as it has elements"
    swapped = one | {"thin": truth["thin"].flip(1)}
    assert working_precision.ratios(swapped, one, truth)["thin"] > 1e4


def test_a_large_tensor_that_joins_does_not_hide_a_small_one() -> None:
    truth = {"bias": torch.tensor([1.0, 2.0]), "weight": torch.linspace(1, 2, 1024).view(32, 32)}
    one = {name: value * (1 + 1e-7) for name, value in truth.items()}
    chance = one | {"bias": truth["bias"] * (1 + 5e-7)}
    assert working_precision.ratios(chance, one, truth)["bias"] < 2
    wrong = one | {"bias": truth["bias"] * (1 + 2e-6)}
    assert working_precision.ratios(wrong, one, truth)["bias"] > 3, "20 times the error"
    long = {"bias": torch.linspace(1, 2, 63), "weight": truth["weight"]}
    one = {name: value * (1 + 1e-7) for name, value in long.items()}
    wrong = one | {"weight": long["weight"] * (1 + 2e-6)}
    assert working_precision.ratios(wrong, one, long)["weight"] > 15, "nor is it hidden by them"


def test_few_ways_to_err_do_not_outweigh_those_that_join_them() -> None:
    """Two columns of large gradients, alone in their pool, were six times as wrong by chance."""
    truth = {"thin": 100 * torch.linspace(1, 2, 128).view(64, 2), "bias": torch.linspace(1, 2, 64)}
    truth |= {"weight": torch.linspace(1, 2, 256)}
    one = {name: value * (1 + 1e-7) for name, value in truth.items()}
    chance = one | {"thin": truth["thin"] * (1 + 6e-7)}
    assert working_precision.ratios(chance, one, truth)["thin"] < 3
    for name in truth:
        wrong = one | {name: truth[name] * (1 + 1e-5)}
        assert working_precision.ratios(wrong, one, truth)[name] > 10, name


def test_a_lost_contribution_that_rounding_may_hide_is_undecidable() -> None:
    """A part that a tenth of its tensor is, and one that is a thousandth of another."""
    large, zeros = torch.linspace(1, 2, 64), torch.zeros(64)
    given = [{"even": large, "uneven": large}] * 9
    given += [{"even": large, "uneven": large / 100}, {"even": zeros, "uneven": zeros}]
    truth = {name: sum(part[name] for part in given) for name in ("even", "uneven")}

    def hidden(error: float) -> set[str]:
        allowed = dict.fromkeys(working_precision.errors(truth, truth, {}), error)
        return working_precision.hides(truth, given, allowed, {})

    assert hidden(1e-6) == set(), "what contributes nothing cannot be lost"
    assert hidden(2e-3) == {"uneven"}
    assert hidden(0.2) == {"even", "uneven"}


def test_gradients_that_bf16_cannot_judge_are_listed() -> None:
    """One of 24 micro-batches is a smaller part of a tensor than what bf16 may err by."""
    work = replace(WORKLOAD, global_batch=24)
    cases = [
        case("reference/fsdp", workload=replace(work, micro_batches=count), precision=policy)
        for count, policy in ((12, A16), (1, {}))
    ]
    narrow, wide = [
        next(check for check in result.checks if check.check == "equivalence").figures
        for result in verdicts(cases)
    ]
    assert any(name.startswith("gradients_final: ") for name in narrow["undecidable"])
    assert wide["undecidable"] == [], "a half of a sum in fp32"
