"""An estimate equals what the memory ledger counts here: state exactly, activations within 5 %."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from commands import here
from torch import nn

from shardproof import estimate, strategies, workloads
from shardproof.case import Case
from shardproof.cases.runner import run_cases
from shardproof.contract import MicroBatch
from shardproof.costs.accounting import accounting_of
from shardproof.errors import SelectionError
from shardproof.estimate import activations, figures, own, shapes
from shardproof.estimate.command import memory_of
from shardproof.estimate.shapes import Batch, Shape
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

TEXT = """\
name: asked
about: estimates against the ledger
sees: [nothing]
workload: {name: charnames_gpt, global_batch: 48, micro_batches: 1, params: {width: 64, seq: 32}}
matrix:
  implementation: [reference/ddp, reference/naive_ddp]
  backend: in_memory
  mesh: {replicate: [1, 2, 4]}
  optimizer: adamw
  lane: working_precision
  precision: [{label: A32, built: float32}, {label: B8, built: bfloat16}]
include:
  - reason: shards
    implementation: [reference/zero1, reference/zero2, reference/zero3, reference/fsdp]
    mesh: {shard: [2, 3]}
    precision: {label: A32, built: float32}
checks: [memory]
steps: 2
"""


class WithLoss(nn.Module):
    """A model and its loss: all that a step computes forward."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        work = workloads.for_case(case)
        self.model = work.skeleton.to(getattr(torch, case.dtype))
        self.loss = work.build_for(0).loss

    def forward(self, inputs: Any, targets: Any, weights: Any) -> Any:
        return self.loss(self.model(inputs), MicroBatch(inputs, targets, weights, targets))


@pytest.mark.timeout(900)
def test_20_cases_hold_what_is_estimated() -> None:
    cases = expand(load_text(TEXT, "asked.yaml"), installed())
    assert len(cases) == 20
    results, _ = run_cases(cases, 2, lambda result: None)
    for result in results:
        assert result.verdict == "pass", result.reason
        case, measured = result.case, result.checks[0].figures
        micro = workloads.for_case(case).batch(0, case.data_coordinates)[0].windows[0][0]
        given = (micro.inputs, micro.targets, micro.weights)
        found = estimate(
            WithLoss(case), "adamw", impl=case.implementation, mesh=case.mesh, inputs=given
        )
        assert found.state == measured["bytes_held"], case.id
        assert found.whole == measured["bytes_whole"], case.id
        peak = max(phase.get("activations", 0) for phase in measured["peaks"]["0"].values())
        assert found.activations == pytest.approx(peak, rel=0.05), (case.id, found.notes)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("seq", [16, 48])
def test_the_formula_of_a_layer_is_what_autograd_keeps(heads: int, seq: int) -> None:
    """Of a block of the suite's GPT, which writes its attention out and has no dropout."""
    family = workloads.WORKLOADS["charnames_gpt"]
    params = {"width": 64, "heads": heads, "kv_heads": None, "norm": "layer", "layout": "rows"}
    block = family.block({**params, "passes": "tensor"}, None, {"device": "meta"})
    given = torch.empty(3, seq, 64, requires_grad=True)
    facts = own.facts_of_module(block, "adamw", {"shard": 1}, {})
    kept, why_not = own.counted(block, (given,), facts)
    assert kept is not None, why_not
    shape = Shape("block", layers=1, hidden=64, heads=heads, seq=seq, attention="math")
    # The input is the layer's before; means of norms and the mask of the future are small.
    formula = activations.of_layer(shape, Batch(3), activations.Setting(item=4))
    assert formula == pytest.approx(kept + given.nbytes, rel=0.05)


def test_published_shapes_have_the_published_number_of_parameters() -> None:
    for shape in shapes.models().values():
        counted = sum(t.numel for t in shapes.tensors(shape, "float32"))
        assert counted == (shape.parameters or counted), shape.name


@pytest.mark.parametrize("name", [n for n in shapes.accountings() if n != "P4"])
def test_accountings_are_those_of_the_check(name: str) -> None:
    facts = shapes.facts_of(shapes.model("7b"), {"shard": 1}, {}, name, Batch())
    assert accounting_of(facts).id == name


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", [2, 64])
def test_what_is_estimated_is_what_the_cost_model_says(strategy: str, ranks: int) -> None:
    """The ranks that are looked at hold as much as any other."""
    shape = shapes.model("gpt2")
    found = figures.of_shape(shape, strategy, {"shard": ranks}, "A32")
    facts = shapes.facts_of(shape, {"shard": ranks}, {}, "A32", Batch())
    cost_model = figures.cost_model_class(strategy)(facts)
    assert found.state == cost_model.total()
    assert found.sent == float(cost_model.payload() / ranks)


def test_a_module_without_inputs_has_no_activations_and_one_that_cannot_run_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert estimate(model).activations is None
    found = estimate(model, inputs=(torch.empty(2, 3),))
    assert found.activations is None and "activations not counted: its forward" in found.notes[0]
    assert found.strategy == strategies.REPLICATION and "bytes a parameter" in str(found)


def test_an_optimizer_of_torch_is_taken_as_it_is() -> None:
    model = nn.Linear(8, 8)
    adam = estimate(model, torch.optim.Adam(model.parameters()))
    sgd = estimate(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    assert adam.optimizer_state == 2 * 72 * 4 + 2 * 4 and sgd.optimizer_state == 72 * 4
    with pytest.raises(SelectionError, match="no formula covers this optimizer"):
        estimate(model, torch.optim.Adagrad(model.parameters()))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lama-7b"], "did you mean llama-7b?"),
        (["7b", "--gpus", "6", "--mesh", "tensor=4", "--impl", "hybrid"], "multiple of 4: 4, 8"),
        (["7b", "--mesh", "tensor=3", "--impl", "tensor"], "valid: 1, 2, 4"),
        (["7b", "--mesh", "tensr=4"], "did you mean tensor?"),
        (["7b", "--memory", "80"], "write 80GB (10^9 bytes) or 80GiB"),
        (["7b", "--impl", "reference/zero9"], "did you mean reference/zero"),
        (["7b", "--accounting", "A15"], "did you mean A16?"),
        (["7b", "--recompute", "often"], "selective"),
        (["7.5b", "--mesh", "tensor=2", "--impl", "tensor"], "name a model"),
    ],
)
def test_bad_input_ends_with_2_and_a_remedy(words: list[str], says: str) -> None:
    done = here("estimate", *words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


def test_memory_has_a_unit() -> None:
    assert (memory_of("80GB"), memory_of("1.5 GiB")) == (80 * 10**9, 3 * 2**29)


def test_the_command_prints_tables_and_json() -> None:
    done = here("estimate", "7b", "--gpus", "64", "--memory", "80GB")
    assert done.returncode == 0 and "too large" in done.stdout and "fits" in done.stdout
    told = json.loads(here("estimate", "7b", "--gpus", "4", "--impl", "zero1", "--json").stdout)
    assert told
    assert "gpt3-175b" in here("estimate", "--models").stdout
