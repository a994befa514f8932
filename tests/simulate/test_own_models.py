"""Models of the user's own are simulated like published ones, or the line at fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import here
from torch import nn

from shardproof import OwnWorkload, registry, simulate
from shardproof.costs import cost_model_of, shapes
from shardproof.costs.model import JUDGED
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.errors import SelectionError
from shardproof.simulate import figures, own

MODELS = """
import torch
from torch import nn

WIDTH, LAYERS, VOCABULARY = 32, 2, 61


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        qkv = self.qkv(self.norm1(hidden)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        attended = nn.functional.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm2(hidden))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        hidden = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Reading(GPT):
    def forward(self, tokens):
        if tokens.max().item() > 3:
            return super().forward(tokens)


class Scaled(GPT):
    def __init__(self):
        super().__init__()
        self.scales = [scale.item() for scale in torch.linspace(0, 1, LAYERS)]


def build():
    return GPT()


def images():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 5)
    return nn.Sequential(*layers), torch.empty(4, 3, 8, 8)


def a_number():
    return 3


def large():
    wide = 1 << 20
    return nn.Sequential(nn.Linear(wide, wide), nn.Linear(wide, 8)), torch.empty(1, wide)


LIMIT = 3
"""


def line_of(text: str) -> int:
    return MODELS[: MODELS.index(text)].count("\n") + 1


#: The shape of ``GPT``, whose layers are registered in the same order.
SHAPE = Shape("own", layers=2, hidden=32, heads=4, vocab=61, seq=16, positions=16, bias="all",
              tied=True)  # fmt: skip
COUNT = shapes.elements(SHAPE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all models of these tests."""
    file = tmp_path_factory.mktemp("models") / "models.py"
    file.write_text(MODELS)
    return file


def kept(found: figures.Figures) -> dict[str, int]:
    return {kind: found.kept.get(kind, 0) for kind in JUDGED}


def test_an_own_gpt_holds_and_sends_what_the_formulas_say_of_its_shape(models: Path) -> None:
    """The model has no list of units; its repeated blocks are found."""
    found = simulate(f"{models}:build", mesh={"shard": 4}, work={"positions": 16})
    facts = shapes.facts_of(SHAPE, {"shard": 4}, {}, "A32", BatchSize(1, 16))
    model = cost_model_of("fsdp", facts)
    assert model is not None
    assert [one.rank for one in found.ranks] == [0, 3]
    for one in found.ranks:
        assert kept(one) == model.resident(one.rank, 0, 0) | model.at_point(
            one.rank, "after_update", 0
        )
    numbers = sum(size for (_, _, _), size in found.fullest.sent.items())
    assert float(numbers) == pytest.approx(float(model.payload() / 4), rel=0.01)
    assert f"{COUNT:,} parameters, 2 repeated blocks, inputs of 1 x 16 a micro-batch" in str(found)


@pytest.mark.parametrize("impl", ["pytorch/fsdp2", "reference/zero1"])
def test_the_command_takes_the_path_of_an_own_model(models: Path, impl: str) -> None:
    words = ("--impl", impl, "--mesh", "shard=8", "--seq", "16", "--batch", "2")
    done = here("simulate", "models.py:build", *words, cwd=models.parent)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"models.py:build on shard 8, {impl}: rank ")
    assert f"{COUNT:,} parameters, 2 repeated blocks, inputs of 2 x 16 a micro-batch" in lines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "models.py:Reading --seq 16",
            f"models.py:{line_of('tokens.max')}: models.py:Reading cannot run on tensors without "
            "values: operator aten._local_scalar_dense.default in forward - rewrite it to",
        ),
        (
            "models.py:Scaled --seq 16",
            f"models.py:{line_of('self.scales')}: models.py:Scaled cannot run on tensors without "
            "values: operator aten._local_scalar_dense.default in <listcomp>",
        ),
        ("models.py:build", "models.py:build are not known - return (module, inputs), or"),
        ("models.py:build --seq 16 --layers 3", "--layers and --attention belong to the models"),
        ("models.py:a_number", "returned neither a module nor a workload (3) - return a module"),
        ("models.py:LIMIT", "models.py:LIMIT is not a model (3) - name a function that returns"),
        ("models.py:bild", "models.py:bild has no 'bild' in models.py"),
        ("nowhere.model:build", "nowhere.model:build cannot be imported: ModuleNotFoundError"),
        (
            "models.py:build --seq 16 --impl reference/pipeline --mesh pipe=2",
            "models.py:build is a GPT, which cannot be cut into stages (pipe=2) - return an nn.Seq",
        ),
        (
            "models.py:images --impl reference/pipeline --mesh pipe=8",
            "the model has 2 repeated blocks, too few for 8 stages (pipe=8)",
        ),
        (
            "models.py:images --impl reference/tensor --mesh tensor=2",
            "reference/tensor refuses this training (",
        ),
    ],
)
def test_what_cannot_be_simulated_is_bad_input(models: Path, words: str, says: str) -> None:
    mesh = () if "--mesh" in words else ("--mesh", "shard=8")
    done = here("simulate", *words.split(), *mesh, cwd=models.parent)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not done.stdout


def test_inputs_next_to_a_module_and_stages_of_a_chain(models: Path) -> None:
    found = simulate(f"{models}:images", impl="reference/pipeline", mesh={"pipe": 2})
    first, last = (one.kept["parameters"] for one in found.ranks)
    assert (first, last) == (4 * (8 * 27 + 8), 4 * (5 * 288 + 5))
    sent = {key[0]: float(size) for key, size in found.ranks[0].sent.items() if size > 64}
    assert sent == {"send": 4.0 * 4 * 288}


def test_values_are_never_allocated(models: Path) -> None:
    """The model has 4 TB of parameters; each of 64 ranks holds 64 GB, and as much of gradients."""
    found = simulate(f"{models}:large", mesh={"shard": 64})
    held = found.fullest.kept
    assert held["parameters"] >= 4 * 2**40 // 64 and held["gradients"] == held["parameters"]


def test_a_module_a_function_a_workload_and_a_path_are_alike(tmp_path: Path) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(size, 6, generator=generator)
        return inputs, (inputs.sum(1) > 0).long()

    workload = OwnWorkload(made, own.cross_entropy, batch)
    module, inputs = made(), torch.randn(3, 6)
    layers = "nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)"
    (file := tmp_path / "net.py").write_text(
        f"from torch import nn\n\n\ndef build():\n    return nn.Sequential({layers})\n"
    )
    found = [
        simulate(f"{file}:build", mesh={"shard": 2}, inputs=inputs),
        simulate(module, mesh={"shard": 2}, inputs=inputs),
        simulate(made, mesh={"shard": 2}, inputs=(inputs,)),
        simulate(workload, mesh={"shard": 2}, work=BatchSize(3)),
    ]
    first, *others = ((kept(one.fullest), one.peak, one.fullest.sent) for one in found)
    assert others == [first] * 3 and first[1] > 0
    # Nothing of the module itself has changed.
    assert module(inputs).shape == (3, 2)
    bf16 = simulate(made, mesh={"shard": 2}, inputs=inputs, accounting="B8")
    assert 2 * bf16.fullest.kept["parameters"] == first[0]["parameters"]


def test_registered_names_only(models: Path) -> None:
    with pytest.raises(SelectionError, match="reference/fsdp has no axis tensor"):
        simulate(f"{models}:build", mesh={"tensor": 2}, work={"positions": 16})
    with pytest.raises(ValueError, match="inputs= belongs to a model of your own"):
        simulate("gpt2", mesh={"shard": 2}, inputs=torch.empty(1))
    assert shapes.USUAL in registry.names()
