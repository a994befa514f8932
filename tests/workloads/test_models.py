"""A gradient in the loss, state along the sequence, no layer norm, strided hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardproof.case import WorkloadSpec
from shardproof.contract import OptimizerSpec, Refused
from shardproof.impls.reference.engine.recompute import recompute_units
from shardproof.impls.reference.engine.state import refuse_second_derivatives
from shardproof.oracle.training import train
from shardproof.workloads import TRAITS, Workload, WorkloadError, check, make
from shardproof.workloads.rnn import Recurrence

SMALL: Mapping[str, Any] = {"layers": 2, "width": 16, "seq": 6}
PENALTY: Mapping[str, Any] = {"layers": 2, "channels": 4}
ODD = [name for name, trait in TRAITS.items() if trait.place in ("front", "inner", "final")]


def workload(name: str, *traits: str, **params: Any) -> Workload:
    sizes = PENALTY if name.startswith("digits") else SMALL
    return make(WorkloadSpec(name, traits, global_batch=6, params={**sizes, **params}))


def loss_of(work: Workload, module: nn.Module) -> Tensor:
    micro = work.whole_batch(0)
    return work.build_for(0).loss(module(micro.inputs), micro)


def loaded(work: Workload) -> nn.Module:
    module = work.build_for(0)()
    work.load(module)
    return module


@pytest.mark.parametrize("name", ["charnames_rnn", "digits_penalty"])
def test_every_trait_has_an_effect_there_and_no_cut_changes_a_gradient(name: str) -> None:
    able = [trait for trait in ODD if name in TRAITS[trait].applies_to]
    assert ("overflow_on_one_rank" in able) == (name != "digits_penalty")
    finite = [t for t in able if not TRAITS[t].by_cut and t != "overflow_on_one_rank"]
    work = workload(name, *finite)
    spec = OptimizerSpec(lr=0.05)
    one, three = (train(work, spec, shares, 2).to_dict()["steps"] for shares in (1, 3))
    for step, other in zip(one, three, strict=True):
        for key, gradient in step["gradients"].items():
            torch.testing.assert_close(gradient, other["gradients"][key], rtol=1e-9, atol=1e-12)
    found = set(one[1]["gradients"]) | set(one[0]["gradients"])
    assert found == set(work.trainable_names) - work.unused


def test_the_penalty_is_the_square_of_a_gradient_and_is_differentiated() -> None:
    work = workload("digits_penalty")
    module, micro = loaded(work), work.whole_batch(0)
    outputs = module(micro.inputs)
    images = micro.inputs.clone().requires_grad_()
    logits = module.eval()(images)[:, :10]
    assert not module(images)[:, 10].any()  # no penalty in evaluation
    [slopes] = torch.autograd.grad(logits.logsumexp(-1).sum(), [images])
    torch.testing.assert_close(outputs[:, 10], slopes.flatten(1).square().sum(1))
    assert float(outputs[:, 10].detach().min()) > 1e-3
    module.train()
    loss_of(work, module).backward()
    weight = module.get_parameter("blocks.1.conv.weight")
    assert weight.grad is not None
    step, place = 1e-6, (0, 1, 1, 1)
    with torch.no_grad():
        weight[place] += step
    above = float(loss_of(work, module).detach())
    with torch.no_grad():
        weight[place] -= 2 * step
    below = float(loss_of(work, module).detach())
    assert (above - below) / (2 * step) == pytest.approx(float(weight.grad[place]), rel=1e-5)


def test_second_derivatives_are_refused_where_parameters_go_in_between() -> None:
    module = workload("digits_penalty").model("meta")
    with pytest.raises(Refused, match=r"recompute_every' = 1: the model \(Penalised\) takes"):
        recompute_units(module, ["blocks.0", "blocks.1"], 1)
    said = r"'0' takes a gradient in its forward \(declined 'second_derivative'\), but so; do that"
    with pytest.raises(Refused, match=said):
        refuse_second_derivatives(nn.Sequential(module), "asked", "so", "do that")
    assert recompute_units(module, ["blocks.0"], 0) == []
    with pytest.raises(ValueError, match="through the whole model"):
        workload("digits_penalty").build_for(0).stage(module, 0, 1)


def test_a_cell_goes_along_the_positions() -> None:
    torch.manual_seed(0)
    recurrence = Recurrence(4, 5, {"dtype": torch.float64})
    with torch.no_grad():
        for parameter in recurrence.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) / 2)
    hidden = torch.randn(2, 5, 4, dtype=torch.float64)
    first, later = hidden.clone(), hidden.clone()
    first[:, 0] += 1
    later[:, 3] += 1
    states = recurrence(hidden)
    assert not torch.allclose(recurrence(first)[:, 4], states[:, 4])
    assert torch.equal(recurrence(later)[:, :3], states[:, :3])
    assert dict(recurrence.calls) == {"cell": 5}


def test_a_recurrent_model_has_no_heads() -> None:
    with pytest.raises(WorkloadError, match="unknown parameter of charnames_rnn 'heads'"):
        check(WorkloadSpec("charnames_rnn", params={"heads": 2}))
    assert not workload("charnames_rnn").zero_gradient


@pytest.mark.parametrize(("norm", "shows"), [("rms", True), ("layer", False)])
def test_a_constant_on_the_hidden_state_shows_without_layer_norms(norm: str, shows: bool) -> None:
    work = workload("charnames_gpt", norm=norm)
    module = loaded(work)
    right = float(loss_of(work, module).detach())
    block = module.get_submodule("blocks.0")
    block.register_forward_hook(lambda _, __, output: output + 1)
    wrong = float(loss_of(work, module).detach())
    assert (abs(wrong - right) > 1e-3) == shows == (abs(wrong - right) > 1e-12)


@pytest.mark.parametrize("name", ["charnames_gpt", "charnames_rnn"])
def test_hidden_states_may_lie_feature_by_feature(name: str) -> None:
    rows, columns = (workload(name, layout=layout) for layout in ("rows", "columns"))
    seen: list[tuple[int, ...]] = []
    module = loaded(columns)
    module.get_submodule("blocks.0").register_forward_hook(lambda *a: seen.append(a[2].stride()))
    up = module.get_submodule("blocks.1.mlp.up")
    up.register_forward_pre_hook(lambda *a: seen.append(a[1][0].stride()))
    loss = loss_of(columns, module)
    assert seen == [(96, 1, 6), (96, 1, 6)]  # of (6, 6, 16)
    torch.testing.assert_close(loss, loss_of(rows, loaded(rows)), rtol=1e-12, atol=0.0)
