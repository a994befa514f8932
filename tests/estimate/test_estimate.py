"""An estimate equals what the memory ledger counts here: state exactly, activations within 5 %."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import here
from torch import nn

from shardproof import estimate, registry, strategies, workloads
from shardproof.by_path import import_module
from shardproof.cases.runner import run_cases
from shardproof.costs import shapes
from shardproof.costs.accounting import accounting_of
from shardproof.costs.model import JUDGED
from shardproof.costs.model_facts import ModelFacts
from shardproof.costs.shapes import BatchSize, Shape, activations
from shardproof.errors import SelectionError
from shardproof.estimate import figures, own
from shardproof.estimate.command import memory_of
from shardproof.estimate.counted import Forward
from shardproof.workloads.gpt import Block
from shardproof.workloads.layers import Span

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1800)
def test_cases_hold_what_is_estimated() -> None:
    """Every class of state exactly, activations within 5 %; the page has these figures."""
    script, page = (
        import_module(str(ROOT / "docs/make_estimates.py")),
        (ROOT / "docs/estimate.md").read_text(encoding="utf-8"),
    )
    cases = script.cases()
    assert len(cases) >= 20
    results, _ = run_cases(cases, 2, lambda result: None)
    again: dict[int, int] = {}
    for result in results:
        case = result.case
        assert result.verdict == "pass", (case.id, result.reason)
        found, held = script.estimated(case), script.measured(result)
        state = {kind: getattr(found, kind) for kind in JUDGED}
        assert (state, found.host) == (held.state, held.host), case.id
        assert found.whole == result.checks[0].figures["bytes_whole"], case.id
        assert found.kept == pytest.approx(held.activations, rel=0.05), (case.id, found.notes)
        assert script.ledger_table([result]).splitlines()[-1] in page, "run docs/make_estimates.py"
        if every := case.options.get("recompute_every"):
            phases = result.checks[0].figures["peaks"]["0"]
            again[every] = phases["backward"]["temporary"]
            again[-every] = found.activations - found.kept
    # The ledger calls temporary what backward computes again: two blocks are one more than one.
    assert again[2] - again[1] == pytest.approx(again[-2] - again[-1], rel=0.05)


def test_the_page_has_our_figures() -> None:
    script, page = (
        import_module(str(ROOT / "docs/make_estimates.py")),
        (ROOT / "docs/estimate.md").read_text(encoding="utf-8"),
    )
    for line in script.sizes_table().splitlines():
        assert line in page, "run docs/make_estimates.py"
    for row in script.ROWS:
        figures, _ = script.ours(row)
        (line,) = (x for x in page.splitlines() if x.startswith(f"| {row.model} | {row.what} |"))
        assert figures == line.split(" | ")[6], "run docs/make_estimates.py --estimators"


def test_activations_of_groups_that_are_computed_again() -> None:
    unit = activations.UnitBytes(kept=10, input=2)
    assert activations.of_units(1, [unit] * 4, 3) == activations.KeptBytes(44, 44)
    # Forward keeps 4 inputs and both ends; backward has freed the last end when it computes one.
    assert activations.of_units(1, [unit] * 4, 3, 1) == activations.KeptBytes(12, 17)
    assert activations.of_units(1, [unit] * 4, 3, 2) == activations.KeptBytes(8, 23)
    assert activations.of_units(1, [unit] * 4, 30, 2) == activations.KeptBytes(35, 35)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("seq", [16, 48])
def test_the_formula_of_a_layer_is_what_autograd_keeps(heads: int, seq: int) -> None:
    """Of a block of the suite's GPT, which writes its attention out and has no dropout."""
    family = workloads.WORKLOADS["charnames_gpt"]
    params = family.resolve({"width": 64, "heads": heads})
    place: dict[str, Any] = {"device": "meta"}
    block = Block(family.mixer(params, (), Span(), place), params, None, place)
    given = torch.empty(3, seq, 64, requires_grad=True)
    facts = own.facts_of_module(block, "adamw", {"shard": 1}, {})
    forward = Forward(block, (given,), facts)
    assert not forward.problem
    units, ends = forward.units()
    kept = sum(unit.kept for unit in units) + sum(ends)
    shape = Shape("block", layers=1, hidden=64, heads=heads, seq=seq, attention="math")
    # The input is the layer's before; means of norms and the mask of the future are small.
    formula = activations.of_layer(shape, BatchSize(3), activations.LayerSetting(item=4))
    assert formula == pytest.approx(kept + given.nbytes, rel=0.05)


def test_published_shapes_have_the_published_number_of_parameters() -> None:
    for shape in shapes.models().values():
        counted = shapes.elements(shape)
        assert counted == (shape.parameters or counted), shape.name


def test_models_without_a_formula_for_activations_say_where_these_are_counted() -> None:
    for name in ("mixtral-8x7b", "deepseek-v3"):
        found = figures.of_shape(shapes.model(name), "fsdp", {"shard": 64})
        assert found.activations is None and "shardproof simulate counts them" in found.notes[0]
    found = figures.of_shape(shapes.model("vit-l-16"), "ddp", {"replicate": 8})
    # One class of each of 1,000 for an image, not for each of its 197 positions.
    assert found.activations and found.activations < 24 * 197 * 1024 * 34


@pytest.mark.parametrize("name", [n for n in shapes.accountings() if n != "P4"])
def test_accountings_are_those_of_the_check(name: str) -> None:
    facts = shapes.facts_of(shapes.model("7b"), {"shard": 1}, {}, name, BatchSize())
    assert accounting_of(facts).id == name


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", [2, 64])
def test_what_is_estimated_is_what_the_cost_model_says(strategy: str, ranks: int) -> None:
    """The ranks that are looked at hold as much as any other."""
    shape = shapes.model("gpt2")
    found = figures.of_shape(shape, strategy, {"shard": ranks}, "A32")
    facts = shapes.facts_of(shape, {"shard": ranks}, {}, "A32", BatchSize())
    cost_model = figures.cost_model_class(strategy)(facts)
    assert found.state == cost_model.total()
    assert found.sent == float(cost_model.payload() / ranks)


def test_a_module_without_inputs_has_no_activations_and_one_that_cannot_run_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert estimate(model).activations is None
    found = estimate(model, inputs=(torch.empty(2, 3),))
    assert found.activations is None and "activations not counted: its forward" in found.notes[0]
    assert "correct inputs=" in found.notes[0]
    compiled = torch.compile(model)
    for given in (torch.empty(2, 8), (torch.empty(2, 8),)):
        for one in (model, compiled):
            assert estimate(one, inputs=given).activations == 64  # what the ReLU gives
    assert found.strategy == strategies.REPLICATION and "bytes a parameter" in str(found)


def test_an_optimizer_of_torch_is_taken_as_it_is() -> None:
    model = nn.Linear(8, 8)
    adam = estimate(model, torch.optim.Adam(model.parameters()))
    sgd = estimate(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    assert adam.optimizer_state == 2 * 72 * 4 + 2 * 4 and sgd.optimizer_state == 72 * 4
    assert estimate(model, torch.optim.SGD).optimizer_state == 0
    with pytest.raises(SelectionError, match="no formula covers this optimizer"):
        estimate(model, torch.optim.Adagrad(model.parameters()))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("lama-7b", "did you mean llama-7b?"),
        ("0b", "write 7.5b, for example"),
        ("7b --gpus 6 --mesh tensor=4 --impl hybrid", "multiple of 4: 4, 8"),
        ("7b --mesh tensor=3 --impl tensor", "valid: 1, 2, 4"),
        ("7b --mesh tensr=4", "did you mean tensor?"),
        ("7b --mesh tensor=0 --impl tensor", "write tensor=2"),
        ("7b --gpus -4", "greater than or equal to 1"),
        ("7b --gpus 99999999999", "give 1 to 1,000,000"),
        ("7b --gpus 64 --impl pipeline", "write fewer stages"),
        ("7b --memory 80", "write 80GB (10^9 bytes) or 80GiB"),
        ("7b --memory eighty", "write 80GB"),
        ("7b --memory -80GB", "not an amount of memory (-80GB) - write 80GB"),
        ("7b --memory 0GB", "write 80GB"),
        ("7b --memory 1e3GB", "write 80GB"),
        (f"7b --memory {'9' * 400}TB", "write 80GB"),
        ("7b --mesh shard=4,shard=2", "--mesh has shard twice (shard=2) - give it once"),
        ("7b --mesh 4x2", "write shard=8"),
        ("7b --mesh tensor=3", "(tensor=3) - choose another size of that axis"),
        ("7b --mesh replicate=2,tensor=3 --gpus 8", "give a multiple of 6"),
        ("7b --option x=1", "name one strategy with --impl to see why it does not fit"),
        ("7b --impl zero2,zero3", "repeat the option, or call again: zero2 zero3"),
        ("7b --impl reference/zero2,reference/zero3", "repeat the option, or call again"),
        ("7b --impl zzz*", "this system has no formulas"),
        ("7b --impl async_sgd", "did you mean reference/async_sgd?"),
        ("7b --batch 1000001", "give a whole number from 1 to 1,000,000"),
        ("7b --seq 1000001", "give a whole number from 0 to 1,000,000"),
        ("7b --micro-batches 1000001", "give a whole number from 1 to 1,000,000"),
        (f"{'9' * 400}b", "parameter count out of range"),
        ("7e9", "write a size such as 7.5b"),
        ("--gpus 4", "MODEL is missing"),
        ("7.5b --recompute 1", "name a model from --models, e.g. 7b"),
        ("7b --impl reference/zero9", "did you mean reference/zero"),
        ("7b --impl collectives", "this system has no formulas"),
        ("7b --accounting A15", "did you mean A16?"),
        ("7b --recompute often", "selective"),
        ("7b --impl zero3 --gpus 8 --recompute 40", "a number up to 32"),
        ("7.5b --mesh tensor=2 --impl tensor", "name a model"),
        ("7b --impl zero2 --gpus 8 --option offlod=optimizer", "did you mean 'offload'?"),
        ("7b --impl zero2 --gpus 8 --option offload=optimiser", "did you mean 'optimizer'?"),
        ("7b --impl tensor --gpus 8 --option sequence_parallel=maybe", "must be of type bool"),
        ("7b --impl zero2 --option offload", "write offload=optimizer"),
        ("7b --impl pipeline --gpus 8 --option schedule=zigzag", "1f1b"),
        ("7b --impl deepspeed/zero0 --gpus 8", "choose the accounting A32"),
        ("7b --impl deepspeed/zero3 --gpus 8 --accounting B8", "choose the accounting A32"),
        ("7b --impl deepspeed/pipeline --gpus 8", "count parameters as built, in float32"),
        (
            "7b --impl reference/async_sgd --gpus 8 --accounting M18",
            "choose the accounting A32 or B8 or S4",
        ),
    ],
)
def test_bad_input_ends_with_2_and_a_remedy(words: str, says: str) -> None:
    done = here("estimate", *words.split())
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


def test_a_size_is_the_round_model_of_that_size_or_says_what_it_lacks() -> None:
    for name in ("7.0b", "7B", "7000m", "0.007t"):
        assert estimate(name, gpus=8) == estimate("7b", gpus=8)
    assert "7b: 7,000,000,000 parameters, 32 layers" in here("estimate", "7.0b").stdout
    size = here("estimate", "7.5b", "--gpus", "8").stdout
    assert "no layers, so communication and activations are not counted" in size
    found = estimate("7.5b", impl="fsdp", gpus=8)
    assert (found.communication, found.activations) == (None, None) and found.total == found.state
    assert found.sent == pytest.approx(3 * 7 / 8 * 2 * 7.5e9, rel=1e-6)


def test_strategies_are_chosen_as_by_run() -> None:
    """By globs, several times, and without any: then those that the mesh and the options fit."""

    def shown(words: str) -> list[str]:
        done = here("estimate", "gpt2", *words.split(), "--json")
        assert done.returncode == 0, done.stderr
        return [row["strategy"] for row in json.loads(done.stdout)["tables"][0]["rows"]]

    assert shown("--impl zero2 --impl ddp --impl zero2") == ["zero2", "ddp"]
    assert shown("--impl reference/zero*") == ["zero1", "zero2", "zero3"]
    assert shown("--mesh shard=8 --gpus 64") == ["fsdp"]
    assert shown("--mesh tensor=2 --gpus 8") == ["hybrid"]
    assert shown("--option offload=optimizer") == ["zero1", "zero2", "zero3", "fsdp"]
    told = here("estimate", "gpt2", "--option", "offload=optimizer").stdout
    assert told.startswith("left out: ddp; --impl ddp says why")


class Named(nn.Module):
    """A model whose parts are registered in any order; an embedding, a chain, a head."""

    def __init__(self, order: str, tied: bool = False, unused: bool = False) -> None:
        super().__init__()
        make: dict[str, Callable[[], nn.Module]] = {
            "embed": lambda: nn.Embedding(64, 32),
            "blocks": lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(8)),
            "head": lambda: nn.Linear(32, 64, bias=False),
        }
        for name in order.split():
            self.add_module(name, make[name]())
        if tied:
            self.head.weight = self.embed.weight
        if unused:
            self.spare = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embed(tokens)
        for block in self.blocks:  # type: ignore[union-attr]
            hidden = torch.relu(block(hidden))
        return {"logits": self.head(hidden)}


def test_gradients_in_flight_are_those_that_wait_for_a_late_one() -> None:
    """Under ZeRO-2: three buckets, or a whole copy where a parameter holds all of them back."""

    def moving(model: nn.Module, *inputs: torch.Tensor) -> tuple[int, int]:
        options = {"impl": "zero2", "gpus": 2, "bucket_bytes": 5000}
        found = estimate(model, inputs=inputs, **options)  # type: ignore[arg-type]
        assert found.communication is not None
        return found.communication, 4 * found.elements

    tokens = torch.zeros(2, 5, dtype=torch.long)
    for model in (Named("embed blocks head"), Named("head blocks embed", tied=True)):
        most, whole = moving(model, tokens)
        assert most <= 0.51 * whole
    for model in (
        Named("blocks embed head"),
        Named("blocks embed head", tied=True),
        Named("embed blocks head", unused=True),
    ):
        most, whole = moving(model, tokens)
        assert whole <= most <= 1.12 * whole
    # Without inputs the order of use is not known; a tied parameter may be used anywhere.
    most, whole = moving(Named("blocks embed head", tied=True))
    assert most >= whole


PLAIN = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (PLAIN.state_dict(), {}, "or an nn.Module"),
        (nn.ReLU(), {}, "has no parameters"),
        (nn.LazyLinear(4), {}, "call the model once"),
        (PLAIN, {"gpus": -4}, "give 1 to"),
        (PLAIN, {"gpus": 2.5}, "give 1 to"),
        (PLAIN, {"mesh": {"replicate": 0}}, "write replicate=2"),
        (PLAIN, {"mesh": {"shard": 2}}, "no axis shard"),
        (PLAIN, {"impl": "zero3", "mesh": {"shard": 2}, "gpus": 3}, "multiple of 2"),
        (PLAIN, {"impl": "tensor", "gpus": 2}, "give roles="),
        (
            PLAIN,
            {"impl": "tensor", "gpus": 2, "roles": {"3": "column"}},
            "no module or parameter '3'",
        ),
        (PLAIN, {"impl": "tensor", "gpus": 2, "roles": {"0": "wide"}}, "valid: "),
        (PLAIN, {"impl": "tensor", "gpus": 2, "roles": {"0": "heads"}}, "head_size"),
        (PLAIN, {"impl": "pipeline", "gpus": 4}, "write fewer stages"),
        (PLAIN, {"units": ("blocks.0",)}, "the model has no module 'blocks.0'"),
        (PLAIN, {"impl": "zero2", "offlod": "optimizer"}, "did you mean 'offload'?"),
        (PLAIN, {"recompute": 5}, "a number up to 2"),
        (PLAIN, {"micro_batches": 0}, "a whole number from 1 to"),
        (PLAIN, {"accounting": "A15"}, "did you mean A16?"),
        (PLAIN, {"optimizer": "adamx"}, "did you mean adam"),
        (PLAIN, {"optimizer": None}, "optimizers: adam, adamw, sgd"),
        (PLAIN, {"optimizer": torch.optim.RMSprop}, "optimizers: adam, adamw, sgd"),
        (PLAIN, {"optimizer": torch.optim.Adam([{"params": []}], amsgrad=True)}, "leave amsgrad"),
        (PLAIN, {"impl": ["zero2"]}, 'write impl="zero3"'),
        (PLAIN, {"impl": "zero2,zero3"}, "call again: zero2 zero3"),
        (PLAIN, {"mesh": "shard=2"}, 'write mesh={"shard": 8}'),
        (PLAIN, {"inputs": {"x": 1}}, "write inputs=(TENSOR,)"),
        (PLAIN, {"units": "0"}, "write units=("),
        (PLAIN, {"roles": "column"}, "write roles={"),
        (PLAIN, {"samples": 4}, "give inputs=(TENSOR,) of that size"),
        (PLAIN, {"recompute": "selective"}, "or recompute=N"),
        (PLAIN, {"recompute": "often"}, "selective"),
        (PLAIN, {"accounting": 16}, "did you mean A16?"),
        (PLAIN, {"micro_batches": 10**12}, "a whole number from 1 to 1,000,000"),
        (nn.Linear(8, 8, dtype=torch.complex64), {}, "'weight', of torch.complex64 - convert it"),
        ("7b", {"optimizer": "sgd"}, 'accounting="S4" for SGD'),
        ("7b", {"inputs": (torch.empty(2),)}, "belong to an nn.Module"),
    ],
)
def test_a_module_that_cannot_be_estimated_gets_a_remedy(
    model: Any, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        estimate(model, **given)


def test_memory_has_a_unit() -> None:
    assert (memory_of("80GB"), memory_of("1.5 GiB")) == (80 * 10**9, 3 * 2**29)


@pytest.mark.parametrize("name", registry.names())
def test_every_implementation_has_an_estimate_or_a_reason(name: str) -> None:
    for accounting in ("A16", "A32"):
        try:
            strategy = own.strategy_of(name)
            found = estimate("7b", impl=name, gpus=8, accounting=accounting, micro_batches=8)
        except SelectionError as error:
            assert "did you mean" not in str(error)
            # Only A16 depends on the system; whoever has formulas has them for fp32.
            known = accounting == "A32" and strategies.of(registry.load(name).strategy).is_known
            assert not known or "no formulas" in str(error), error
        else:
            assert found.strategy == strategy and found.state > 0


@pytest.mark.parametrize("mesh", [{"tensor": 2, "pipe": 2}, {"pipe": 2}, {"shard": 8}])
def test_a_tensor_without_elements_is_no_error(mesh: dict[str, int]) -> None:
    """Models without learned positions have a position embedding of 0 rows."""
    assert 0 in [t.numel for t in shapes.tensors(shapes.model("7b"), "float32")]
    found = estimate("7b", impl="pytorch/hybrid", mesh=mesh, gpus=8, micro_batches=8)
    assert found.state == pytest.approx(16 * found.elements / 8, rel=0.2)


def test_deepspeed_holds_what_fp32_takes() -> None:
    found = estimate("7b", impl="deepspeed/zero0", gpus=8, accounting="A32")
    assert found.state == pytest.approx(12 * found.elements, rel=1e-6)  # gradients are freed


def test_the_command_prints_tables_and_json() -> None:
    done = here("estimate", "7b", "--gpus", "64", "--memory", "80GB")
    assert done.returncode == 0 and "too large" in done.stdout and "fits" in done.stdout
    told = json.loads(here("estimate", "7b", "--gpus", "4", "--impl", "zero1", "--json").stdout)
    (row,) = told["tables"][0]["rows"]
    assert row["state"] == pytest.approx(49e9, rel=1e-6)
    assert row["strategy"] == "zero1" and row["activations"] >= row["kept"] > 0
    assert "gpt3-175b" in here("estimate", "--models").stdout


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ranks_that_cut_positions_share_the_activations_of_one_sample(ranks: int) -> None:
    alone = estimate("7b", impl="ddp", gpus=1, accounting="A32")
    found = estimate("7b", impl="context", mesh={"context": ranks}, accounting="A32")
    assert found.activations is not None and found.activations * ranks == alone.activations
    # Around the ring go keys and values, in backward again, and their gradients one hop further.
    keys_and_values = 32 * 2048 * 2 * 4096 * 4
    ring = keys_and_values * (3 - 2 / ranks)
    assert found.sent == 2 * (ranks - 1) / ranks * found.gradients + ring


def test_the_links_of_a_ring_do_not_ask_again_where_a_backward_comes_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 ranks have 64 links for each of 32 attentions and 64 shares."""
    asked, original = list[str](), ModelFacts.is_reached

    def is_reached(facts: ModelFacts, name: str) -> bool:
        asked.append(name)
        return original(facts, name)

    monkeypatch.setattr(ModelFacts, "is_reached", is_reached)
    estimate("7b", impl="context", mesh={"context": 64}, accounting="A32")
    assert 0 < len(asked) <= 64


def test_a_mixed_accounting_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="choose the accounting A32 or B8 or S4"):
        estimate("7b", impl="expert", gpus=8)
    assert estimate("7b", impl="expert", gpus=8, accounting="A32").parameters == 28 * 10**9


def test_inputs_of_whole_samples_do_not_count_for_ranks_that_cut_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    found = estimate(model, impl="context", mesh={"context": 2}, inputs=(torch.ones(2, 4),))
    assert found.activations is None
    assert "2 ranks split each sample" in str(found)
