"""The oracle: invariant under the cut, right against torch's own loop, cached safely."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_case import made_case
from torch import Tensor

from shardproof import tensor_bytes
from shardproof.case import Case, WorkloadSpec
from shardproof.contract import BufferRule, OptimizerSpec, ScalerSpec
from shardproof.oracle import training
from shardproof.oracle.training import load_or_train, train
from shardproof.workloads import TRAITS, Workload, make, suggested_groups
from shardproof.workloads.layers import load_state

GPT, CNN = "charnames_gpt", "digits_cnn"
#: Without batch statistics, the gradient is a function of the global batch alone.
UNCUT = {GPT: {}, CNN: {"norm": "group"}}
UNCUT_TRAITS = tuple(name for name, trait in TRAITS.items() if not trait.by_cut)


def workload(name: str, *traits: str, **values: Any) -> Workload:
    return make(WorkloadSpec(name, traits=traits, **values))


def error(actual: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error."""
    return float((actual - truth).norm() / truth.norm()) if bool(truth.any()) else 0.0


def without_noise(item: Workload, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """``gradients`` with the declared zero slices set to 0."""
    result = {name: value.clone() for name, value in gradients.items()}
    for name, regions in item.zero_gradient.items():
        for region in regions:
            if name in result:
                result[name][tuple(slice(a, b) for a, b in region)] = 0
    return result


# ---------------------------------------------------------------------------------- it is right


def test_gradients_stand_in_the_order_in_which_backwards_were_done_with_them() -> None:
    """The first layer that is built is used after the embedding, and again behind the blocks."""
    orders = []

    def fold(step: int, parts: Any) -> dict[str, Tensor]:
        orders.extend(list(part) for part in parts)
        return training.left_fold(parts)

    item = workload(CNN, "tied_over_units", global_batch=12, micro_batches=2)
    train(item, OptimizerSpec(), 2, 1, way=training.Way(fold=fold))
    built = [name for name, p in item.build_for(0)("meta").named_parameters() if p.requires_grad]
    tied = "front.tied_over_units.layer.weight"
    assert built[0] == tied
    for order in orders:
        assert sorted(order) == sorted(built)
        assert order.index("blocks.0.conv.weight") < order.index(tied)
        assert order.index(tied) < order.index("embed.weight")


@pytest.mark.parametrize("name", UNCUT)
def test_the_loss_falls_visibly(name: str) -> None:
    item = workload(name)
    record = train(item, OptimizerSpec("adamw", lr=0.01, warmup_steps=4), 2, 40).to_dict()
    losses = [step["loss"] for step in record["steps"]]
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < 0.75 * first, f"{first:.2f} -> {last:.2f}"
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_one_coordinate_is_the_plain_loop(kind: Any, clip: float | None) -> None:
    """Written out once more, with torch's own optimizer and clipping: equal bit for bit."""
    item = workload(GPT)
    spec = OptimizerSpec(kind, lr=0.01, weight_decay=0.1, warmup_steps=2, clip_norm=clip)
    record = train(item, spec, 1, 3).to_dict()
    build = item.build_for(3)
    module = build()
    module.load_state_dict(item.state())
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, foreach=False
        )
    else:
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
        )
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1, (step + 1) / 3)
        total = 0.0
        for micro in item.batch(step, 1)[0].micro_batches:
            loss = build.loss(module(micro.inputs), micro)
            loss.backward()
            total += float(loss.detach())
        found = record["steps"][step]
        assert found["loss"] == total
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        assert all(torch.equal(found["gradients"][n], g) for n, g in gradients.items())
        squares = sum(float(g.square().sum()) for g in gradients.values())
        assert float(found["norm"]) == pytest.approx(math.sqrt(squares), rel=1e-14)
        if clip is None:
            assert found["clipped"] is None
        else:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip, foreach=False)
            norm = math.sqrt(sum(float(g.square().sum()) for g in found["clipped"].values()))
            assert norm == pytest.approx(clip, rel=1e-4)
            for name, p in module.named_parameters():
                assert torch.equal(found["clipped"][name], p.grad)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in module.named_parameters():
            assert torch.equal(found["parameters"][name], p)
    slot = "momentum_buffer" if kind == "sgd" else "exp_avg"
    assert f"head.weight.{slot}" in record["steps"][0]["optimizer"]


@pytest.mark.parametrize("name", UNCUT)
@pytest.mark.parametrize("trait", [(), *((t,) for t in UNCUT_TRAITS), UNCUT_TRAITS], ids="+".join)
def test_the_gradient_does_not_depend_on_the_cut(name: str, trait: tuple[str, ...]) -> None:
    carried = [t for t in trait if name in TRAITS[t].applies_to]
    item = workload(name, *carried, params=UNCUT[name])
    spec = OptimizerSpec(
        lr=0.05, weight_decay=0.01, groups=suggested_groups(item.traits), scaler=ScalerSpec()
    )
    whole = train(item, spec, 1, 2).to_dict()["steps"]
    for world in (2, 3, 4, 5):
        for one, other in zip(whole, train(item, spec, world, 2).to_dict()["steps"], strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-14)
            assert len(other["losses"]) == world
            assert other["skipped"] == one["skipped"]
            if one["skipped"]:
                continue
            assert list(one["gradients"]) and set(one["gradients"]) == set(other["gradients"])
            truth = without_noise(item, one["gradients"])
            found = without_noise(item, other["gradients"])
            for key, value in truth.items():
                assert error(found[key], value) < 5e-14, key


def test_two_coordinates_are_added_in_rank_order() -> None:
    item = workload(GPT)
    record = train(item, OptimizerSpec(), 3, 1).to_dict()["steps"][0]
    build = item.build_for(0)
    sums: dict[str, Tensor] = {}
    for batch in item.batch(0, 3):
        module = build()
        item.load(module)
        for micro in batch.micro_batches:
            build.loss(module(micro.inputs), micro).backward()
        for name, p in module.named_parameters():
            assert p.grad is not None
            sums[name] = sums[name] + p.grad if name in sums else p.grad
    assert all(torch.equal(record["gradients"][name], value) for name, value in sums.items())


def test_parameters_that_nobody_used_are_left_alone() -> None:
    item = workload(GPT, "unused", "conditional_late_step", "frozen")
    spec = OptimizerSpec(lr=0.1, weight_decay=0.1)
    first, second = train(item, spec, 2, 2).to_dict()["steps"]
    state = item.state()
    late = "front.conditional_late_step.layer.weight"
    for name in [*item.unused, *{*item.parameter_names}.difference(item.trainable_names)]:
        assert name not in second["gradients"]
        assert torch.equal(second["parameters"][name], state[name])
        assert f"{name}.momentum_buffer" not in second["optimizer"]
    assert late not in first["gradients"]
    assert torch.equal(first["parameters"][late], state[late])
    assert late in second["gradients"]
    assert set(first["parameters"]) == set(item.parameter_names)


def test_what_goes_out_of_use_is_left_alone_and_keeps_its_state() -> None:
    item = workload(GPT, "conditional_early_step")
    first, second = train(item, OptimizerSpec(lr=0.1, weight_decay=0.1), 2, 2).to_dict()["steps"]
    early = "front.conditional_early_step.layer.weight"
    assert early in first["gradients"] and early not in second["gradients"]
    assert not torch.equal(first["parameters"][early], item.state()[early])
    for kind, key in (("parameters", early), ("optimizer", f"{early}.momentum_buffer")):
        assert torch.equal(first[kind][key], second[kind][key])


def test_groups_have_their_own_rate_and_decay() -> None:
    item = workload(GPT, "two_groups")
    spec = OptimizerSpec(
        lr=0.1, momentum=0.0, weight_decay=0.2, groups=suggested_groups(item.traits)
    )
    record = train(item, spec, 1, 1).to_dict()["steps"][0]
    state = item.state()
    for name, rate, decay in (("head.weight", 0.1, 0.2), ("head.bias", 0.05, 0.05)):
        expected = state[name] - rate * (record["gradients"][name] + decay * state[name])
        assert torch.allclose(record["parameters"][name], expected, rtol=0, atol=1e-15)


def test_more_coordinates_than_samples() -> None:
    item = workload(GPT, global_batch=3, micro_batches=2)
    wide, whole = (
        train(item, OptimizerSpec(), 5, 1).to_dict(),
        train(item, OptimizerSpec(), 1, 1).to_dict(),
    )
    assert wide["steps"][0]["losses"][3:] == [0.0, 0.0]
    assert wide["steps"][0]["loss"] == pytest.approx(whole["steps"][0]["loss"], rel=1e-14)


# --------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("name", UNCUT)
def test_stateful_dropouts_go_on_per_coordinate(name: str) -> None:
    """The oracle's draws are those of ranks that each seed once and never look back."""
    item = workload(name, "dropout_stateful", "unequal_micro_batches", params=UNCUT[name])
    spec = OptimizerSpec(lr=0.05, momentum=0.0)
    record = train(item, spec, 3, 2).to_dict()
    modules = [item.build_for(rank, rank)() for rank in range(3)]
    for module in modules:
        item.load(module)
    for step in range(2):
        sums: dict[str, Tensor] = {}
        for module, batch in zip(modules, item.batch(step, 3), strict=True):
            for micro in batch.micro_batches:
                item.build_for(0).loss(module(micro.inputs), micro).backward()
            for key, p in module.named_parameters():
                assert p.grad is not None
                sums[key] = sums[key] + p.grad if key in sums else p.grad
                p.grad = None
        found = record["steps"][step]
        assert all(torch.equal(found["gradients"][key], value) for key, value in sums.items())
        for module in modules:
            load_state(module, found["parameters"] | found["buffers"][0])
    assert item.depends_on_cut


def test_synced_buffers_and_stateful_dropout_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="different dropout mask for each rank"):
        train(workload(CNN, "dropout_stateful"), OptimizerSpec(), 2, 1, "synced").to_dict()


# --------------------------------------------------------------------------------------- buffers


def running_mean(record: dict[str, Any], step: int, coordinate: int) -> Tensor:
    return record["steps"][step]["buffers"][coordinate]["blocks.0.norm.running_mean"]


def test_rule_rank0_and_per_rank() -> None:
    item = workload(CNN, micro_batches=1)
    rank0 = train(item, OptimizerSpec(), 2, 2, "rank0").to_dict()
    own = train(item, OptimizerSpec(), 2, 2, "per_rank").to_dict()
    for record in (rank0, own):
        assert not torch.equal(running_mean(record, 0, 0), running_mean(record, 0, 1))
        count = record["steps"][1]["buffers"][0]["blocks.0.norm.num_batches_tracked"]
        assert int(count) == 2
    for step in range(2):
        # Batch statistics do not feed back into training: only the buffers differ.
        assert rank0["steps"][step]["loss"] == own["steps"][step]["loss"]
        assert torch.equal(running_mean(rank0, step, 0), running_mean(own, step, 0))
    assert torch.equal(running_mean(rank0, 0, 1), running_mean(own, 0, 1))
    # 0.9 x what the step began with + 0.1 x the batch's mean: only the starts differ.
    gap = running_mean(rank0, 1, 1) - running_mean(own, 1, 1)
    start = running_mean(rank0, 0, 0) - running_mean(own, 0, 1)
    assert torch.allclose(gap, 0.9 * start, rtol=0, atol=1e-15)
    assert float(start.abs().max()) > 1e-3


def test_rule_synced_equals_one_coordinate_with_the_same_micro_batches() -> None:
    item = workload(CNN, micro_batches=1)
    synced = train(item, OptimizerSpec(), 3, 2, "synced").to_dict()
    whole = train(item, OptimizerSpec(), 1, 2, "rank0").to_dict()
    for one, other in zip(whole["steps"], synced["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-14)
        for name, value in one["gradients"].items():
            assert error(other["gradients"][name], value) < 1e-13, name
        for buffers in other["buffers"]:
            for name, value in one["buffers"][0].items():
                assert torch.allclose(buffers[name], value, rtol=1e-14), name
    uneven = workload(CNN, "unequal_micro_batches")
    with pytest.raises(ValueError, match="different micro-batch counts"):
        train(uneven, OptimizerSpec(), 2, 1, "synced").to_dict()


def test_evaluation_uses_the_running_statistics() -> None:
    item = workload(CNN)
    micro_batches = item.batch(0, 1)[0].micro_batches
    state = item.state()
    before = {name: value.clone() for name, value in state.items()}
    whole = training.evaluator(item)(state, micro_batches)
    cut = training.evaluator(item)(state, [m for b in item.batch(0, 3) for m in b.micro_batches])
    assert whole == pytest.approx(cut, rel=1e-14)
    assert all(torch.equal(state[name], value) for name, value in before.items())


# ----------------------------------------------------------------------------------------- cache


def case(**values: Any) -> Case:
    base = made_case(
        "plain",
        {"replicate": 2},
        workload=WorkloadSpec(CNN),
        checks=("equivalence",),
        steps=2,
    )
    return replace(base, **values)


def same(one: Any, two: Any) -> bool:
    """Deep equality with tensors."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    return one == two


def test_cache_returns_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "deep" / "cache"
    first = load_or_train(case(), "rank0", cache).to_dict()
    (file,) = cache.iterdir()
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    assert same(load_or_train(case(), "rank0", cache).to_dict(), first)
    other = case(id="d", implementation="reference/ddp", backend="gloo", label="x")
    assert same(load_or_train(other, "rank0", cache).to_dict(), first)
    monkeypatch.undo()
    load_or_train(case(), "per_rank", cache).to_dict()
    load_or_train(case(optimizer=OptimizerSpec(clip_norm=0.1)), "rank0", cache).to_dict()
    load_or_train(case(mesh={"replicate": 3}), "rank0", cache).to_dict()
    assert len(list(cache.iterdir())) == 4
    assert file.exists()


def test_a_damaged_cache_file_is_trained_anew(tmp_path: Path) -> None:
    first = load_or_train(case(), "rank0", tmp_path).to_dict()
    (file,) = tmp_path.iterdir()
    for content in (b"", b"nonsense", file.read_bytes()[:-100]):
        file.write_bytes(content)
        assert same(load_or_train(case(), "rank0", tmp_path).to_dict(), first)
        assert same(tensor_bytes.load(file), first)


@pytest.mark.parametrize("rule", ["rank0", "per_rank", "synced"])
def test_training_is_deterministic(rule: BufferRule) -> None:
    item = workload(CNN)
    one = train(item, OptimizerSpec("adamw", lr=0.01), 2, 2, rule).to_dict()
    assert same(one, train(workload(CNN), OptimizerSpec("adamw", lr=0.01), 2, 2, rule).to_dict())
