"""Workloads: real data by digest, batches that no cut changes, traits that really take effect."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof import OwnWorkload
from shardproof.case import WorkloadSpec, split
from shardproof.contract import Batch, CrossEntropy, MicroBatch, OptimizerSpec, Role, ScalerSpec
from shardproof.oracle.training import train
from shardproof.workloads import (
    TRAITS,
    Workload,
    WorkloadError,
    check,
    data,
    make,
    suggested_groups,
)
from shardproof.workloads.draws import counter_mask, read_draws, restore_draws
from shardproof.workloads.layers import seed_number
from shardproof.workloads.traits import FLAGS, KEY_SHIFT, SPIKES

OVERFLOW = "overflow_on_one_rank"

REAL = ("charnames_gpt", "digits_cnn")
ODD = [name for name, trait in TRAITS.items() if trait.place in ("front", "inner", "final")]
WORLDS = (1, 2, 3, 4, 5)


def carried(name: str) -> list[str]:
    """The traits that the workload can carry."""
    return [trait for trait, about in TRAITS.items() if name in about.applies_to]


def spec(name: str = "charnames_gpt", *traits: str, **values: Any) -> WorkloadSpec:
    return WorkloadSpec(name, traits=traits, **values)


def aliases(workload: Workload) -> dict[str, str]:
    """Further names of tied parameters -> the name that counts."""
    module = workload.model("meta")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: names[id(p)] for name, p in every if name != names[id(p)]}


def joined(batches: list[Batch], field: str) -> Tensor:
    return torch.cat([getattr(m, field) for batch in batches for m in batch.micro_batches])


# ------------------------------------------------------------------------------------------ data


def test_data_is_the_recorded_data() -> None:
    names = data.character_names()
    assert len(names) == 7952
    assert names[33] == "LATIN CAPITAL LETTER A"
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    assert digest == data.CHARACTER_NAMES_DIGEST == make(spec()).digest
    images, labels = data.digits()
    assert images.shape == (1797, 8, 8)
    assert labels.shape == (1797,)
    assert int(images[:, 0, 0].max()) == 0  # the pixel that carries the flags
    assert make(spec("digits_cnn")).digest == data.DIGITS_DIGEST


def test_digits_from_a_file_and_without_any_source(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = data.digits()
    data.write_digits(tmp_path / "share" / "digits.npz")
    read = data.digits.__wrapped__
    monkeypatch.setattr(data, "DIGITS_FILES", (tmp_path / "share" / "digits.npz",))
    monkeypatch.setattr(data, "_scikit_learn_digits", lambda: pytest.fail("not from the file"))
    again = read()
    assert torch.equal(again[0], images)
    assert torch.equal(again[1], labels)
    monkeypatch.undo()
    monkeypatch.setattr(data, "DIGITS_FILES", (tmp_path / "absent.npz",))
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DataError, match=r"install scikit-learn.*absent\.npz"):
        read()


def test_other_digits_are_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    images, labels = data.digits()
    np.savez(tmp_path / "digits.npz", images=images.numpy()[::-1], labels=labels.numpy())
    monkeypatch.setattr(data, "DIGITS_FILES", (tmp_path / "digits.npz",))
    with pytest.raises(data.DataError, match="digits: expected SHA-256"):
        data.digits.__wrapped__()


def test_scikit_learn_is_not_imported() -> None:
    code = (
        "import sys; from shardproof.workloads import data; data.character_names(); data.digits(); "
        "assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ----------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("name", REAL)
def test_state_is_seeded_rounded_and_not_trivial(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    state = make(spec(name)).state()
    make(spec(name)).build_for(0)()
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is not touched
    again, other = make(spec(name)).state(), make(spec(name, seed=1)).state()
    for key, value in state.items():
        assert torch.equal(value, again[key])
        if value.is_floating_point():
            assert not torch.equal(value, other[key]), key
            assert torch.equal(value, value.float().double()), key
            assert value.dtype == torch.float64
            assert bool((value != 0).all()), key
            assert bool((value != 1).all()), key
    single = make(spec(name), "float32").state()
    assert all(torch.equal(single[key].to(value.dtype), value) for key, value in state.items())
    twin = make(spec(name), "float64", rounded_to="bfloat16").state()
    low = make(spec(name), "bfloat16").state()
    assert all(torch.equal(low[key].to(value.dtype), value) for key, value in twin.items())


def test_traits_leave_the_other_values_as_they_were() -> None:
    bare, full = make(spec()).state(), make(spec("charnames_gpt", *ODD)).state()
    assert all(torch.equal(full[key], value) for key, value in bare.items())


@pytest.mark.parametrize("name", REAL)
def test_every_rank_starts_perturbed(name: str) -> None:
    workload = make(spec(name, *ODD))
    starts = [dict(workload.state())]
    for rank in range(3):
        module = workload.build_for(rank)()
        starts.append(dict(module.named_parameters()) | dict(module.named_buffers()))
    assert set(starts[0]) == set(starts[1])
    for key in starts[0]:
        values = [start[key] for start in starts]
        assert all(bool(torch.isfinite(value).all()) for value in values)
        for i, one in enumerate(values):
            for two in values[:i]:
                if one.numel():
                    assert float((one - two).detach().abs().max()) > 1e-3, key


@pytest.mark.parametrize("name", REAL)
def test_meta_build(name: str) -> None:
    workload = make(spec(name, "tied", "tied_over_units", "non_contiguous", "frozen"))
    meta, real = workload.build_for(0)("meta"), workload.build_for(0)()
    assert all(p.is_meta for p in meta.parameters())
    for (key, one), (other, two) in zip(
        meta.named_parameters(), real.named_parameters(), strict=True
    ):
        assert key == other
        assert one.shape == two.shape
        assert one.stride() == two.stride()
        assert one.requires_grad == two.requires_grad
    micro = make(spec(name)).batch(0, 1)[0].micro_batches[0]
    assert workload.build_for(0)("meta")(micro.inputs.to("meta")).shape[0] == len(micro.inputs)
    assert [n for n, _ in real.named_children()] == [
        n for n in ("front", "embed", "blocks", "norm", "final", "head", "tail") if hasattr(real, n)
    ]
    assert all(real.get_submodule(unit) is not None for unit in workload.units)


def test_models_say_what_their_layers_are_for() -> None:
    assert make(spec(params={"layers": 1})).build_for(0).roles == {
        "embed.token": "embedding",
        "embed.position": "positions",
        "blocks.0.attention": "attention",
        "blocks.0.attention.core": "core",
        "blocks.0.attention.qkv": "heads",
        "blocks.0.attention.out": "row",
        "blocks.0.mlp.up": "column",
        "blocks.0.mlp.down": "row",
        "head": "classes",
    }
    assert make(spec("digits_cnn")).roles == {"head": "classes"}


def test_a_model_of_ones_own_is_given_roles_or_has_those_of_its_names() -> None:
    def roles(given: Mapping[str, Role] | None) -> Mapping[str, Role]:
        net = nn.ModuleDict({"up": nn.Linear(4, 8), "head": nn.Linear(8, 2)})
        own = OwnWorkload(lambda: net, F.cross_entropy, lambda size, generator: (), roles=given)
        return own.roles(net)

    assert roles(None) == {"head": "classes"}
    assert roles({"up": "column", "head.weight": "row"}) == {"up": "column", "head.weight": "row"}
    with pytest.raises(WorkloadError, match="no module or parameter 'down' in the model"):
        roles({"down": "row"})
    with pytest.raises(WorkloadError, match=r"unknown role 'wide' of 'up'; valid: embedding, "):
        roles({"up": "wide"})  # type: ignore[dict-item]


def test_attention_is_causal() -> None:
    module = make(spec()).build_for(0)()
    inputs = make(spec()).batch(0, 1)[0].micro_batches[0].inputs
    changed = inputs.clone()
    changed[:, 9:] = 90
    one, two = module(inputs), module(changed)
    assert torch.equal(one[:, :9], two[:, :9])
    assert not torch.allclose(one[:, 9:], two[:, 9:])


# --------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("every", [False, True], ids=["bare", "all"])
def test_the_global_batch_is_independent_of_the_cut(name: str, every: bool) -> None:
    traits = [t for t in carried(name) if t != "variable_lengths"] if every else []
    for size, micro, windows in ((24, 2, 1), (23, 3, 2), (7, 2, 2)):
        workload = make(
            spec(name, *traits, global_batch=size, micro_batches=micro, windows=windows)
        )
        for step in range(2):
            reference: dict[str, Tensor] = {}
            for world in (1, 2, 3, 4, 5, 9):
                batches = workload.batch(step, world)
                assert len(batches) == world
                ids = joined(batches, "sample_ids")
                order = ids.argsort()
                assert torch.equal(ids[order], torch.arange(size) + step * size)
                for field in ("inputs", "targets", "weights"):
                    value = joined(batches, field)[order]
                    assert torch.equal(reference.setdefault(field, value), value)
            weights = reference["weights"]
            count = int((weights > 0).sum())
            exact = [Fraction(float(w)) for w in weights.flatten() if w > 0]
            assert set(exact) == {Fraction(1 / count)}
            assert abs(sum(exact) - 1) <= Fraction(1, 2**52)
        one, two = workload.batch(0, 1), workload.batch(1, 1)
        assert not torch.equal(joined(one, "inputs"), joined(two, "inputs"))


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("size", [1, 2, 7, 24])
def test_short_epochs_go_through_the_data_again_in_another_order(name: str, size: int) -> None:
    """Two batches an epoch, and half a one is left out; the next epoch is another permutation."""
    workload = make(spec(name, "short_epochs", global_batch=size))
    epochs = [workload._index(2 * e) + workload._index(2 * e + 1) for e in range(40)]
    data = {sample for epoch in epochs for sample in epoch}
    assert len(data) == max(3, 5 * size // 2)
    for epoch in epochs:
        assert len(epoch) == len({*epoch}) == 2 * size
    if size == 24:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
        other = make(WorkloadSpec(name, ("short_epochs",), seed=1))
        assert other._index(0) != workload._index(0)
    one, three = (workload.batch(step, 1)[0].micro_batches for step in (0, 2))
    assert [m.sample_ids.tolist() for m in one] != [m.sample_ids.tolist() for m in three]


@pytest.mark.parametrize("traits", [(), ("short_epochs",)])
def test_progress_in_the_data_tells_the_step(traits: tuple[str, ...]) -> None:
    workload = make(spec("charnames_gpt", *traits, global_batch=6))
    told = [workload.progress(step) for step in range(7)]
    assert [workload.step_at(progress) for progress in told] == list(range(7))
    assert told[3] == ({"epoch": 1, "taken": 6} if traits else {"epoch": 0, "taken": 18})
    assert told[4] == ({"epoch": 2, "taken": 0} if traits else {"epoch": 0, "taken": 24})


@pytest.mark.parametrize("world", WORLDS)
def test_shares_are_cut_contiguously(world: int) -> None:
    import numpy as np

    batches = make(spec(global_batch=23, micro_batches=2, windows=2)).batch(0, world)
    expected = np.array_split(np.arange(23), world)
    for batch, share in zip(batches, expected, strict=True):
        assert len(batch.windows) == 2
        pieces = np.array_split(share, 4)
        found = [micro.sample_ids.tolist() for micro in batch.micro_batches]
        assert found == [piece.tolist() for piece in pieces if len(piece)]
        micro = batch.micro_batches[0]
        assert micro.inputs.shape == micro.targets.shape == micro.weights.shape
    assert split(7, 3) == [3, 2, 2]


def test_token_counts_are_unequal_by_nature() -> None:
    counts = [int((b.micro_batches[0].weights > 0).sum()) for b in make(spec()).batch(0, 4)]
    assert len(set(counts)) > 1


def test_weights_in_low_precision_are_fp32() -> None:
    micro = make(spec(), "bfloat16").batch(0, 1)[0].micro_batches[0]
    twin = make(spec(), "float64", rounded_to="bfloat16").batch(0, 1)[0].micro_batches[0]
    assert micro.weights.dtype == torch.float32
    assert torch.equal(micro.weights.double(), twin.weights)


# ---------------------------------------------------------------------------------------- traits


def uses(workload: Workload, micro: MicroBatch) -> set[str]:
    """Parameters that have a gradient after this micro-batch alone."""
    build = workload.build_for(0)
    module = build()
    workload.load(module)
    build.loss(module(micro.inputs), micro).backward()
    return {name for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("trait", [*ODD, "tied_over_units"])
def test_trait_adds_parameters_with_an_effect(name: str, trait: str) -> None:
    workload = make(spec(name, trait))
    record = train(workload, OptimizerSpec(lr=0.05, scaler=ScalerSpec()), 2, 2).to_dict()
    bare = train(make(spec(name)), OptimizerSpec(lr=0.05), 2, 2).to_dict()
    own = [key for key in workload.parameter_names if trait in key.split(".")]
    found = record["steps"][0 if trait in (OVERFLOW, "conditional_early_step") else 1]["gradients"]
    if trait == OVERFLOW:
        broken = record["steps"][min(SPIKES)]["gradients"]
        sick = {key for key, gradient in broken.items() if not bool(gradient.isfinite().all())}
        assert set(own) < sick < set(broken)
    if trait == "rebound_buffer":
        key = "front.rebound_buffer.average"
        first, second = (step["buffers"][0][key] for step in record["steps"])
        assert not torch.equal(first, second)
        assert not torch.equal(first, record["steps"][0]["buffers"][1][key])
        return
    if trait == "unused":
        assert workload.unused == set(own)
        assert len(own) == 4
        assert workload.parameter_names[0] in own
        assert workload.parameter_names[-1] in own
        assert not set(own) & set(found)
        return
    if trait == "frozen":
        frozen = set(workload.parameter_names) - set(workload.trainable_names)
        assert len(frozen) == 2
        assert "front.frozen.layer.weight" in frozen
        assert not frozen & set(found)
        own = ["front.frozen.layer.bias"]
    if trait == "tied_over_units":
        (pair,) = aliases(workload).items()
        assert pair[0] not in found
        own = [pair[1]]
    assert own
    for key in own:
        assert key in found
        if trait == "empty":
            assert found[key].numel() == 0
        else:
            assert float(found[key].abs().max()) > 1e-6, key
    if trait != "empty":
        assert record["steps"][1]["loss"] != bare["steps"][1]["loss"]


def test_shapes_of_the_odd_parameters() -> None:
    workload = make(spec("charnames_gpt", *ODD))
    inner = "blocks.1.odd"
    assert workload.shapes["final.scalar.factor"] == ()
    assert workload.shapes["final.one_element.factor"] == (1,)
    assert workload.shapes[f"{inner}.empty.weight"] == (0, 32)
    assert workload.shapes[f"{inner}.prime_sized.down.bias"] == (13,)
    assert workload.shapes[f"{inner}.smaller_than_world.up"] == (2, 32)
    module = workload.build_for(0)()
    strided = module.get_parameter(f"{inner}.non_contiguous.weight")
    assert not strided.is_contiguous()
    workload.load(module)
    assert not module.get_parameter(f"{inner}.non_contiguous.weight").is_contiguous()
    assert aliases(workload) == {f"{inner}.tied.second.weight": f"{inner}.tied.first.weight"}


@pytest.mark.parametrize("name", REAL)
def test_conditional_branches_follow_the_data(name: str) -> None:
    workload = make(spec(name, *FLAGS, micro_batches=3))

    def used(step: int, world: int) -> list[list[set[str]]]:
        batches = workload.batch(step, world)
        return [
            [
                {key.split(".")[1] for key in uses(workload, m) if key.startswith("front.")}
                for m in b.micro_batches
            ]
            for b in batches
        ]

    for world in WORLDS:
        first, second = used(0, world), used(1, world)
        for shares in (first, second):
            if world > 1:
                by_rank = ["conditional_by_rank" in set().union(*share) for share in shares]
                assert by_rank[0]
                assert not by_rank[-1]
                assert all("conditional_by_rank" in micro for micro in shares[0])
            for share in shares:
                early = ["conditional_by_micro_batch" in micro for micro in share]
                late = ["conditional_last_micro_batch" in micro for micro in share]
                assert not any(early[1:])
                assert not any(late[:-1])
            every = [micro for share in shares for micro in share]
            assert any("conditional_by_micro_batch" in micro for micro in every)
            assert any("conditional_last_micro_batch" in micro for micro in every)
        assert all("conditional_late_step" not in m for share in first for m in share)
        assert all("conditional_late_step" in m for share in second for m in share)
        assert all("conditional_early_step" in m for share in first for m in share)
        assert all("conditional_early_step" not in m for share in second for m in share)


@pytest.mark.parametrize("name", REAL)
def test_traits_of_the_batch(name: str) -> None:
    def tokens(batch: Batch) -> int:
        return sum(int((m.weights > 0).sum()) for m in batch.micro_batches)

    for world in (2, 3, 4, 5):
        counts = [tokens(b) for b in make(spec(name, "unequal_tokens")).batch(0, world)]
        assert counts[-1] >= 2 * counts[0] > 0
        counts = [tokens(b) for b in make(spec(name, "one_rank_without_tokens")).batch(0, world)]
        assert counts[-1] == 0 < counts[0]
        uneven = make(spec(name, "unequal_micro_batches")).batch(0, world)
        assert {len(b.micro_batches) for b in uneven} == {2, 3}
    both = make(spec(name, "unequal_tokens", "one_rank_without_tokens", global_batch=1))
    assert tokens(both.batch(0, 1)[0]) >= 1
    for windows, expected in ((1, [4, 2]), (2, [4, 2]), (3, [4, 4, 2])):
        cut = make(spec(name, "incomplete_window", micro_batches=4, windows=windows)).batch(0, 1)
        assert [len(window) for window in cut[0].windows] == expected


@pytest.mark.parametrize("traits", [("unequal_tokens",), ("dropout_counter", "unequal_tokens")])
def test_lengths_vary_and_the_numbers_do_not(traits: tuple[str, ...]) -> None:
    def record(*more: str) -> dict[str, Any]:
        workload = make(spec("charnames_gpt", *traits, *more, micro_batches=4))
        return train(workload, OptimizerSpec(), 2, 1).to_dict()["steps"][0]

    batch = make(spec("charnames_gpt", *traits, "variable_lengths", micro_batches=4)).batch(0, 2)
    lengths = {micro.targets.shape[1] for share in batch for micro in share.micro_batches}
    assert len(lengths) > 1
    plain, trimmed = record(), record("variable_lengths")
    assert trimmed["loss"] == pytest.approx(plain["loss"], rel=1e-13)
    for name, gradient in plain["gradients"].items():
        if "qkv.bias" not in name:
            torch.testing.assert_close(trimmed["gradients"][name], gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("name", REAL)
def test_ignored_targets_are_no_class_and_change_no_gradient(name: str) -> None:
    def record(*traits: str) -> dict[str, Any]:
        sizes = {"label_smoothing": 0.1} if name == "charnames_gpt" else {}
        workload = make(spec(name, "unequal_tokens", *traits, params=sizes))
        return train(workload, OptimizerSpec(), 2, 1).to_dict()["steps"][0]

    for batch in make(spec(name, "unequal_tokens", "ignore_index")).batch(0, 2):
        for micro in batch.micro_batches:
            assert torch.equal(micro.targets == -100, micro.weights == 0)
    plain, ignored = record(), record("ignore_index")
    assert plain["losses"] == ignored["losses"]
    for key, gradient in plain["gradients"].items():
        assert torch.equal(gradient, ignored["gradients"][key]), key


def test_label_smoothing_is_the_loss_of_torch() -> None:
    workload = make(spec(params={"label_smoothing": 0.3}))
    build = workload.build_for(0)
    assert build.cross_entropy == CrossEntropy(label_smoothing=0.3)
    assert make(spec("dyadic_mlp")).build_for(0).cross_entropy is None
    micro = workload.batch(0, 1)[0].micro_batches[0]
    outputs = torch.randn(*micro.targets.shape, 128, dtype=torch.float64)
    chances = outputs.log_softmax(-1)
    right = chances.gather(-1, micro.targets[..., None])[..., 0]
    expected = -(micro.weights * (0.7 * right + 0.3 * chances.mean(-1))).sum()
    torch.testing.assert_close(build.loss(outputs, micro), expected)


def test_shards_of_the_heads_attend_like_the_whole() -> None:
    """2 KV heads for 8 query heads over 2 and 4 ranks: a KV head with its group, or half of it."""
    workload = make(spec(params={"heads": 8, "kv_heads": 2, "layers": 1}))
    module = workload.build_for(0)()
    workload.load(module)
    whole = module.get_submodule("blocks.0.attention")
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    expected = whole(hidden)
    qkv, out = whole.get_submodule("qkv"), whole.get_submodule("out")
    weight, bias = qkv.weight.detach(), qkv.bias.detach()
    mix, shift = out.weight.detach(), out.bias.detach()
    for ranks in (2, 4):
        total = shift.clone()
        for rank in range(ranks):
            first, size = rank * 32 // ranks, 32 // ranks
            kv = rank * 2 // ranks * 4
            rows = [
                *range(first, first + size),
                *range(32 + kv, 36 + kv),
                *range(40 + kv, 44 + kv),
            ]
            qkv.weight, qkv.bias = nn.Parameter(weight[rows]), nn.Parameter(bias[rows])
            out.weight = nn.Parameter(mix[:, first : first + size])
            out.bias = nn.Parameter(torch.zeros_like(shift))
            total = total + whole(hidden)
        torch.testing.assert_close(total, expected)


def test_weather_traits_are_those_of_the_backends() -> None:
    from shardproof.backends.disturbances import TRAITS as WEATHER

    assert {name for name, trait in TRAITS.items() if trait.place == "backend"} == set(WEATHER)
    bare, bad = make(spec()), make(spec("charnames_gpt", *WEATHER))
    assert torch.equal(joined(bare.batch(1, 2), "inputs"), joined(bad.batch(1, 2), "inputs"))
    assert bare.shapes == bad.shapes


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_counter_dropout_is_a_function_of_the_sample(name: str, dtype: str) -> None:
    traits = ("dropout_counter", *FLAGS)
    workload = make(spec(name, *traits, params={"norm": "group"} if "cnn" in name else {}), dtype)
    module = workload.build_for(0)()
    workload.load(module)
    (batch,) = workload.batch(0, 1)
    inputs = torch.cat([m.inputs for m in batch.micro_batches])
    keys = module._flags(inputs) >> KEY_SHIFT
    assert len(set(keys.tolist())) == len(inputs)
    ids = torch.cat([m.sample_ids for m in batch.micro_batches])
    expected = [seed_number(f"0/key/0/{i}") >> 32 for i in ids.tolist()]
    assert keys.tolist() == expected  # exact in every dtype
    layer = module.get_submodule("front.dropout_counter")
    hidden = torch.randn(len(inputs), 3, layer.layer.in_features, dtype=workload._dtype)
    whole = layer(hidden, keys)
    assert torch.equal(whole, layer(hidden, keys))
    assert torch.equal(whole[5:9], layer(hidden[5:9], keys[5:9]))
    dropped = whole == 0
    assert 0.4 < float(dropped.double().mean()) < 0.6
    assert len({tuple(row.flatten().tolist()) for row in dropped}) == len(inputs)
    module.eval()
    assert not bool((layer(hidden, keys) == 0).any())


def test_dropout_draws_differ_by_step_seed_and_place() -> None:
    keys = torch.tensor([5, 6])
    masks = [counter_mask(keys, site, (8, 32)) for site in (0, 1)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0][0], masks[0][1])
    assert not torch.equal(masks[0][0, 0], masks[0][0, 1])
    one = make(spec("charnames_gpt", "dropout_counter"))
    other = make(spec("charnames_gpt", "dropout_counter", seed=1))
    last = [
        w.batch(s, 1)[0].micro_batches[0].inputs[:, -1] for w, s in ((one, 0), (one, 1), (other, 0))
    ]
    assert len({tuple(keys.tolist()) for keys in last}) == 3


def test_stateful_dropout_is_seeded_by_coordinate_not_by_rank() -> None:
    workload = make(spec("charnames_gpt", "dropout_stateful"))
    first, same, other = (
        read_draws(workload.build_for(rank, coordinate)())
        for rank, coordinate in ((0, 0), (3, 0), (0, 1))
    )
    (name,) = first
    assert name == "blocks.1.odd.dropout_stateful"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    module = workload.build_for(0)()
    restore_draws(module, other)
    assert torch.equal(read_draws(module)[name], other[name])


def test_two_groups_are_interleaved() -> None:
    workload = make(spec("charnames_gpt", "two_groups"))
    optimizer = OptimizerSpec(weight_decay=0.1, groups=suggested_groups(workload.traits))
    (one, names), (two, others) = optimizer.assign(workload.trainable_names)
    assert (one.lr_scale, one.weight_decay) != (two.lr_scale, two.weight_decay)
    member = [name in names for name in workload.trainable_names]
    assert sum(a != b for a, b in itertools.pairwise(member)) > 10
    assert "blocks.0.norm1.weight" in names
    assert "head.weight" in others
    assert suggested_groups(make(spec()).traits) == ()


@pytest.mark.parametrize(
    ("name", "params"), [*((name, {}) for name in REAL), ("charnames_gpt", {"kv_heads": 2})]
)
def test_zero_gradient_slices_are_declared_and_only_those(
    name: str, params: dict[str, Any]
) -> None:
    workload = make(spec(name, params=params))
    gradients = train(workload, OptimizerSpec(), 1, 1).to_dict()["steps"][0]["gradients"]
    scale = max(float(g.square().mean().sqrt()) for g in gradients.values())
    for key, gradient in gradients.items():
        rest = gradient.clone()
        for region in workload.zero_gradient.get(key, []):
            index = tuple(slice(start, stop) for start, stop in region)
            assert float(gradient[index].abs().max()) < 1e-15 * scale
            rest[index] = 0
        assert float(rest.square().mean().sqrt()) > 1e-4 * scale, key
        # No further row of noise: every element is exactly 0 or well above round-off.
        noise = (rest != 0) & (rest.abs() < 1e-13 * scale)
        assert not bool(noise.any()), key


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", REAL)
def test_every_dtype_trains(name: str, dtype: str) -> None:
    record = train(make(spec(name), dtype), OptimizerSpec(lr=0.02), 2, 2).to_dict()
    truth = train(make(spec(name), rounded_to=dtype), OptimizerSpec(lr=0.02), 2, 2).to_dict()
    bound = {"float64": 0.0, "float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert abs(record["steps"][0]["loss"] - truth["steps"][0]["loss"]) <= bound


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (spec("charname_gpt"), "did you mean 'charnames_gpt'"),
        (spec("charnames_gpt", "untied"), "unknown trait 'untied'"),
        (spec(params={"widht": 8}), "did you mean 'width'.*known: vocab, width, heads"),
        (spec(params={"layers": 0}), "layers = 0: must be an integer >= 1"),
        (spec(params={"layers": True}), "must be an integer"),
        (spec(params={"seq": 2.0}), "must be an integer"),
        (spec(params={"vocab": 64}), "vocab = 64: must be an integer >= 91"),
        (spec(params={"tied": 1}), "must be one of False, True"),
        (spec(params={"width": 30}), "width = 30 is not divisible by heads = 4"),
        (spec(params={"kv_heads": 3}), "heads = 4 is not divisible by kv_heads = 3"),
        (spec(params={"kv_heads": 0}), "kv_heads = 0: must be an integer >= 1"),
        (spec(params={"label_smoothing": 0.5}), "must be one of 0.0, 0.1, 0.3"),
        (spec("digits_cnn", params={"norm": "layer"}), "must be one of 'batch', 'group'"),
        (spec(global_batch=0), "global_batch = 0"),
        (spec(micro_batches=0), "micro_batches = 0"),
        (spec("charnames_gpt", "incomplete_window", micro_batches=1), "needs micro_batches >= 2"),
    ],
)
def test_bad_specs_are_refused_in_words(bad: WorkloadSpec, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        check(bad)
    with pytest.raises(WorkloadError, match=message):
        make(bad)


def test_bad_dtype_and_lane() -> None:
    with pytest.raises(WorkloadError, match="did you mean 'float64'"):
        make(spec(), "float65")
    with pytest.raises(WorkloadError, match="no dyadic form"):
        make(spec(), lane="dyadic")


def test_other_sizes() -> None:
    params = {"layers": 4, "width": 24, "heads": 3, "seq": 8, "vocab": 97, "tied": True}
    workload = make(spec(params=params))
    assert len(workload.units) == 4
    assert workload.shapes["embed.token.weight"] == (97, 24)
    assert aliases(workload) == {"head.weight": "embed.token.weight"}
    micro = workload.batch(0, 1)[0].micro_batches[0]
    assert workload.build_for(0)()(micro.inputs).shape == (12, 8, 97)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("world", [1, 3])
def test_all_traits_together_still_have_an_effect(name: str, world: int) -> None:
    workload = make(spec(name, *carried(name)))
    gradients = train(workload, OptimizerSpec(lr=0.01), world, 2).to_dict()["steps"][1]["gradients"]
    idle = {key for key in workload.trainable_names if workload.last_use(key) == 0}
    assert set(gradients) == set(workload.trainable_names) - workload.unused - idle
    silent = [key for key, gradient in gradients.items() if not bool(gradient.any())]
    assert silent == ["blocks.1.odd.empty.weight"]


@pytest.mark.parametrize("traits", [(), ("incomplete_window",), ("unequal_micro_batches",)])
@pytest.mark.parametrize("coordinates", [1, 2, 3, 5])
def test_a_batch_is_cut_as_its_specification_says(
    traits: tuple[str, ...], coordinates: int
) -> None:
    spec = WorkloadSpec("charnames_gpt", traits, global_batch=11, micro_batches=3, windows=2)
    batches = make(spec, "float32").batch(0, coordinates)
    cut = [[[len(micro.inputs) for micro in w] for w in batch.windows] for batch in batches]
    assert cut == spec.cut(coordinates)
