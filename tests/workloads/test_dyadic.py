"""The dyadic lane: exact sums at any world, in any dtype with room, and a budget that notices."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from shardproof.case import WorkloadSpec
from shardproof.contract import GroupSpec, OptimizerSpec
from shardproof.oracle.exactness import MANTISSA, Budget, _Meter, budget
from shardproof.oracle.training import train
from shardproof.workloads import TRAITS, Workload, WorkloadError, make
from shardproof.workloads.dyadic import DyadicMLP

SGD = OptimizerSpec("sgd", lr=0.125, momentum=0.5)
CARRIED = tuple(name for name, trait in TRAITS.items() if DyadicMLP.name in trait.applies_to)


def workload(*traits: str, dtype: str = "float64", **values: int) -> Workload:
    return make(WorkloadSpec("dyadic_mlp", traits=traits, **values), dtype, "dyadic")


@pytest.mark.parametrize("traits", [(), *((name,) for name in CARRIED), CARRIED], ids="+".join)
def test_every_cut_and_dtype_gives_equal_bits(traits: tuple[str, ...]) -> None:
    whole = train(workload(*traits, micro_batches=2, global_batch=21), SGD, 1, 3).to_dict()["steps"]
    assert not budget(workload(*traits, global_batch=21), SGD, 3).problem("float32", 5)
    for world in (2, 3, 5):
        other = train(
            workload(*traits, dtype="float32", micro_batches=3, global_batch=21), SGD, world, 3
        ).to_dict()["steps"]
        for one, two in zip(whole, other, strict=True):
            assert one["loss"] == two["loss"]
            for kind in ("gradients", "parameters", "optimizer"):
                assert one[kind].keys() == two[kind].keys()
                for name, value in one[kind].items():
                    assert torch.equal(two[kind][name].double(), value), (kind, name)


def test_gradients_reach_every_tensor_and_training_learns() -> None:
    item = workload()
    record = train(item, dataclasses.replace(SGD, momentum=0.0), 1, 12).to_dict()
    first = record["steps"][0]["gradients"]
    assert set(first) == set(item.parameter_names)
    assert all(float((g != 0).double().mean()) > 0.3 for g in first.values())
    assert sum(s["loss"] for s in record["steps"][8:]) / 4 < 0.5 * record["steps"][0]["loss"]
    assert sum(p.numel() for p in item.build_for(0)().parameters()) * 4 > 2 * 16384


@pytest.mark.parametrize("size", [1, 7, 24, 32])
def test_weights_are_dyadic_and_sum_to_exactly_one(size: int) -> None:
    micro = workload("unequal_tokens", dtype="float32", global_batch=size).whole_batch(0)
    parts = [Fraction(float(w)) for w in micro.weights.flatten() if w]
    assert sum(parts) == 1
    assert all(part.denominator & (part.denominator - 1) == 0 for part in parts)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (dataclasses.replace(SGD, clip_norm=0.1), "clipping divides"),
        (OptimizerSpec("adamw"), "square root"),
        (dataclasses.replace(SGD, lr=0.1), "exact sums need"),
        (dataclasses.replace(SGD, warmup_steps=2), "exact sums need"),
        (dataclasses.replace(SGD, groups=(GroupSpec("bias", 0.3),)), "exact sums need"),
    ],
)
def test_optimizers_that_round_exceed_the_budget(spec: OptimizerSpec, says: str) -> None:
    assert says in budget(workload(), spec, 3).problem("float32", 2)


def test_models_that_round_exceed_the_budget() -> None:
    spec = WorkloadSpec("charnames_gpt")
    with pytest.raises(WorkloadError, match="no dyadic form"):
        make(spec, lane="dyadic")
    assert "not exact in any dtype" in budget(make(spec), SGD, 1).problem("float64", 1)


def test_ranks_cost_bits() -> None:
    edge = Budget(MANTISSA["float32"] - 2, "here")
    assert not edge.problem("float32", 4)
    assert "3 for 5 ranks" in edge.problem("float32", 5)
    assert not edge.problem("float64", 5)


def metered(function: object, *tensors: Tensor) -> int:
    meter = _Meter()
    with meter:
        function(*tensors)  # type: ignore[operator]
    return meter.bits


def test_the_meter_counts_partial_sums_that_cancel() -> None:
    row = torch.tensor([2.0**20, -(2.0**20), 1.0], dtype=torch.float64)
    assert float(row.sum()) == 1.0
    assert metered(torch.sum, row) == 22
    assert metered(torch.mm, row[None], torch.ones(3, 1, dtype=torch.float64)) == 22
    assert metered(torch.add, row, torch.full_like(row, 2.0**-10)) == 31
    assert metered(torch.div, row, row) > 1000
    assert metered(torch.sum, torch.arange(5)) == 0


def test_a_larger_vocabulary_takes_each_character_for_itself() -> None:
    def symbols(vocab: int) -> set[int]:
        spec = WorkloadSpec("dyadic_mlp", global_batch=64, params={"vocab": vocab})
        return {int(symbol) for symbol in make(spec, "float64").whole_batch(0).inputs.unique()}

    assert max(symbols(32)) < 32
    assert {ord("A"), ord(" ")} <= symbols(128)
    with pytest.raises(WorkloadError, match="vocab = 31: must be an integer >= 32"):
        make(WorkloadSpec("dyadic_mlp", params={"vocab": 31}), "float64")


def test_the_size_of_a_row_counts_whatever_its_sign() -> None:
    meter = _Meter()
    with meter:
        torch.nn.functional.embedding(torch.tensor([0]), torch.tensor([[-8.0, -1.0]]))
    assert meter.bits == 4
