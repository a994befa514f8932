"""Published models: their parameters, and what simulated ranks of them hold and send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from shardproof import registry
from shardproof.contract import OptimizerSpec, Options
from shardproof.costs import CostModel, cost_model_of, shapes
from shardproof.costs.model import JUDGED
from shardproof.costs.shapes import BatchSize, ImageShape, LatentShape, MixtureShape, Shape
from shardproof.simulate import figures
from shardproof.simulate.model import ShapeModel
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.sources import ShapeSource

#: Elements of published checkpoints, as their model cards, papers and tables of results have them.
PUBLISHED = {
    "gpt2": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
    "vit-l-16": 304_326_632,
}
#: Models whose publications round the count: billions, and digits after the point.
DIGITS = {"gpt3-175b": (175, 0), "mt-nlg-530b": (530, 0), "gpt-1t": (1008.0, 1)}


def module_of(name: str) -> torch.nn.Module:
    """The module that is simulated, on meta."""
    return ShapeModel(shapes.model(name), torch.float32)("meta")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_module_has_the_elements_of_the_published_checkpoint(name: str) -> None:
    module = module_of(name)
    buffers = [b for b in module.buffers() if b.is_floating_point()]
    assert sum(t.numel() for t in (*module.parameters(), *buffers)) == PUBLISHED[name]
    assert shapes.elements(shapes.model(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", DIGITS)
def test_the_module_has_the_published_digits(name: str) -> None:
    billions, digits = DIGITS[name]
    assert round(sum(p.numel() for p in module_of(name).parameters()) / 1e9, digits) == billions


@pytest.mark.parametrize("name", shapes.models())
def test_formulas_and_the_module_have_the_same_tensors(name: str) -> None:
    """In the same order, on which layouts of shards depend; with the same roles."""
    # The elements that fill a round model up to its name are not built.
    shape = replace(shapes.model(name), rounded=False, parameters=0)
    build = ShapeModel(shape, torch.float32)
    module = build("meta")
    facts = shapes.facts_of(shape, {"shard": 1}, {}, "A32", BatchSize())
    told = {t.name: t.shape for t in facts.parameters if t.numel}
    assert [*told.items()] == [(n, tuple(p.shape)) for n, p in module.named_parameters()]
    assert {b.name: (b.shape, f"torch.{b.dtype}") for b in facts.buffers} == {
        n: (tuple(b.shape), str(b.dtype)) for n, b in module.named_buffers()
    }
    owners = {owner for t in facts.parameters if t.numel for owner in t.owners}
    assert {n: r for n, r in facts.roles.items() if n in owners} == {
        n: r for n, r in build.roles.items() if n in owners
    }


def test_the_three_forms_of_deepseek_v3_are_those_of_its_report() -> None:
    """arXiv 2412.19437, section 4.2: 671B parameters, 37B of which a token uses."""
    module = module_of("deepseek-v3")
    named = dict(module.named_parameters())
    assert named["blocks.2.mlp.up.weight"].shape == (2 * 18432, 7168)
    assert named["blocks.3.mlp.experts.up"].shape == (256, 2 * 2048, 7168)
    assert named["blocks.60.attention.kv_down.weight"].shape == (512 + 64, 7168)
    experts = sum(p.numel() for n, p in named.items() if ".experts." in n)
    used = sum(p.numel() for p in named.values()) - experts + experts * 8 // 256
    assert round(used / 1e9) in (37, 38)


# ------------------------------------------------------------------------------- simulated ranks

MIXED = Shape("mixed", layers=2, hidden=32, heads=4, kv_heads=2, vocab=61, seq=16, mlp="swiglu",
              norm="rms", mixture=MixtureShape(8, 2, 24, shared=1, dense=1))  # fmt: skip
NARROW = replace(
    MIXED,
    name="narrow",
    latent=LatentShape(query=12, kv=8, content=8, rotary=4, value=6),
    mixture=MixtureShape(8, 2, 24, shared=2, dense=1, balanced=True),
)
IMAGES = Shape("images", layers=2, hidden=32, heads=4, vocab=10, seq=5, positions=5, bias="all",
               image=ImageShape(side=8, patch=4))  # fmt: skip


class World(NamedTuple):
    """A system on a mesh."""

    implementation: str
    mesh: Mapping[str, int]
    options: Options = MappingProxyType({})
    micro_batches: int = 1


def source_of(shape: Shape, world: World) -> ShapeSource:
    work = BatchSize(1, shape.seq, world.micro_batches)
    adam = OptimizerSpec("adamw", momentum=0.0)
    return ShapeSource(shape, world.implementation, world.mesh, adam, dict(world.options), work)


def in_turn(shape: Shape, times: int) -> dict[str, tuple[int, ...]]:
    """Layer -> rows of each expert, where all choices go through the experts in turn, ``times``."""
    given = shape.mixture
    assert given is not None
    rows, left = divmod(shape.seq * given.top_k, given.experts)
    counts = tuple(times * (rows + (number < left)) for number in range(given.experts))
    return {f"blocks.{n}.mlp": counts for n in range(given.dense, shape.layers)}


def formulas(shape: Shape, world: World) -> CostModel:
    source = source_of(shape, world)
    facts = shapes.facts_of(shape, world.mesh, source.options, "A32", source.work)
    if shape.mixture:
        rows = in_turn(shape, world.micro_batches)
        facts = replace(facts, routed=((rows,) * len(facts.micro_batches),))
    found = cost_model_of(registry.load(world.implementation).strategy, facts)
    assert found is not None
    return found


def sent(made: list[SimulatedRank], mesh: Mapping[str, int]) -> dict[tuple[str, str], Fraction]:
    """Bytes of numbers by axis and operation, over all ranks."""
    total: dict[tuple[str, str], Fraction] = {}
    for call in (call for rank in made for call in rank.calls[-1]):
        if call.floating and call.phase != "observe" and call.logical_bytes:
            key = figures.axis_of(call.group, mesh), call.operation
            total[key] = total.get(key, Fraction()) + call.logical_bytes
    return total


@pytest.mark.parametrize(
    ("shape", "world"),
    [
        (MIXED, World("reference/fsdp", {"shard": 2})),
        (MIXED, World("reference/expert", {"expert": 4})),
        (NARROW, World("reference/ddp", {"replicate": 2})),
        (NARROW, World("reference/expert", {"replicate": 2, "expert": 2}, {"balance_rate": 0.001})),
        (NARROW, World("reference/expert", {"expert": 4}, {"recompute_every": 1})),
        (NARROW, World("reference/hybrid", {"pipe": 2, "shard": 2}, {"experts": {"ranks": 2}}, 2)),
        (IMAGES, World("reference/zero1", {"shard": 3})),
        (IMAGES, World("reference/pipeline", {"pipe": 2}, {}, 4)),
    ],
    ids=lambda each: each.name if isinstance(each, Shape) else each.implementation,
)
def test_simulated_ranks_hold_and_send_what_the_formulas_say(shape: Shape, world: World) -> None:
    model = formulas(shape, world)
    made = simulate(source_of(shape, world), range(model.facts.world))
    for rank in made:
        wanted = model.resident(rank.rank, 0, 0) | model.at_point(rank.rank, "after_update", 0)
        kept = figures.figures(rank, world.mesh).kept
        assert {k: kept.get(k, 0) for k in JUDGED} == {k: wanted.get(k, 0) for k in JUDGED}
    promised: dict[tuple[str, str], Fraction] = {}
    for flow in model.sent():
        if not flow.integers and flow.bytes:
            key = flow.axis, flow.operation
            promised[key] = promised.get(key, Fraction()) + flow.bytes
    assert sent(made, world.mesh) == promised and promised
