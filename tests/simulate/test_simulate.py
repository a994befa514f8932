"""Simulated ranks hold and send what the closed formulas say, and cost no more in a large world."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from commands import here

from shardproof import registry
from shardproof.contract import OptimizerSpec, Options
from shardproof.costs import CostModel, cost_model_of, shapes
from shardproof.costs.model import JUDGED
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.simulate import figures
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.sources import ShapeSource

SMALL = Shape("small", layers=4, hidden=32, heads=4, kv_heads=2, vocab=61, seq=16, positions=16,
              bias="all", tied=True, attention="math")  # fmt: skip
#: A published width with few layers: 7B's embedding, head and blocks.
WIDE = replace(shapes.model("llama-7b"), layers=2, parameters=0)


class World(NamedTuple):
    """A system on a mesh."""

    implementation: str
    mesh: Mapping[str, int]
    micro_batches: int = 1
    options: Options = MappingProxyType({})


WORLDS = [
    World("reference/ddp", {"replicate": 2}),
    World("reference/zero1", {"shard": 2}),
    World("reference/zero3", {"shard": 3}, 2),
    World("reference/fsdp", {"shard": 2}),
    World("reference/tensor", {"tensor": 2}),
    World("reference/pipeline", {"pipe": 2}, 4),
]


def source_of(shape: Shape, world: World) -> ShapeSource:
    work = BatchSize(1, shape.seq, world.micro_batches)
    adam = OptimizerSpec("adamw", momentum=0.0)
    return ShapeSource(
        shape, world.implementation, world.mesh, adam, dict(world.options), work, torch.float32
    )


def model_of(source: ShapeSource) -> CostModel:
    given = source.shape, source.axes, source.options, "A32", source.work
    strategy = registry.load(source.implementation).strategy
    found = cost_model_of(strategy, shapes.facts_of(*given))
    assert found is not None
    return found


def ranks(shape: Shape, world: World) -> tuple[CostModel, list[SimulatedRank]]:
    """The cost model, and all ranks simulated."""
    source = source_of(shape, world)
    model = model_of(source)
    return model, simulate(source, range(model.facts.world))


@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=lambda shape: shape.name)
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.implementation)
def test_a_simulated_rank_holds_and_sends_what_the_formulas_say(shape: Shape, world: World) -> None:
    model, made = ranks(shape, world)
    sent: dict[tuple[str, str], Fraction] = {}
    for rank in made:
        wanted = model.resident(rank.rank, 0, 0) | model.at_point(rank.rank, "after_update", 0)
        kept = figures.figures(rank, world.mesh).kept
        # Here and there a class has nothing: the ledger lists no zeros.
        assert {k: kept.get(k, 0) for k in JUDGED} == {k: wanted.get(k, 0) for k in JUDGED}
        for call in rank.calls[-1]:
            if call.floating and call.phase != "observe":
                key = figures.axis_of(call.group, world.mesh), call.operation
                sent[key] = sent.get(key, Fraction()) + call.logical_bytes
    promised: dict[tuple[str, str], Fraction] = {}
    for flow in model.sent():
        if not flow.integers:
            key = flow.axis, flow.operation
            promised[key] = promised.get(key, Fraction()) + flow.bytes
    assert sum(sent.values()) > 0
    assert {k: n for k, n in sent.items() if n} == {k: n for k, n in promised.items() if n}


def test_what_is_in_memory_at_the_peak_adds_up_to_it() -> None:
    _, made = ranks(SMALL, World("reference/fsdp", {"shard": 2}))
    for rank in made:
        found = figures.figures(rank, {"shard": 2})
        last = rank.log.peaks()[1, found.phase]
        assert found.peak == last.bytes == sum(one.bytes for one in found.held) > 0
        by_class = {kind: size for kind, size in last.classes.items() if size}
        for kind, size in by_class.items():
            assert size == sum(one.bytes for one in found.held if one.kind == kind)
        assert {one.kind for one in found.held} == {*by_class}
        assert all(one.made_by and one.made_by != "aten" for one in found.held)


def test_another_attention_and_recomputation_change_activations_only() -> None:
    """Recomputation keeps the inputs of the four layers, and flash attention keeps no scores."""
    world = World("reference/fsdp", {"shard": 2})
    again = world._replace(options={"recompute_every": 1})
    flash = replace(SMALL, attention="flash")
    found = [
        figures.figures(simulate(source_of(shape, of), [0])[0], world.mesh)
        for shape, of in ((SMALL, world), (flash, world), (SMALL, again))
    ]
    math, *others = (one.peaks["forward", "activations"] for one in found)
    scores = SMALL.layers * SMALL.heads * SMALL.seq**2 * 4
    assert math - others[0] >= scores and math - others[1] > scores
    assert len({one.kept["parameters"] + one.kept["optimizer_state"] for one in found}) == 1


def test_a_large_world_costs_no_more_than_a_small_one() -> None:
    """Counted, not timed: ranks that are simulated, their calls, storages and events."""
    assert len(figures.looked_at({"shard": 4096})) == len(figures.looked_at({"shard": 8})) == 2
    large, small = ({"pipe": n, "shard": n, "tensor": n} for n in (16, 4))
    assert len(figures.looked_at(large)) == len(figures.looked_at(small)) == 7
    counts = []
    for size in (8, 4096):
        (made,) = simulate(source_of(WIDE, World("reference/fsdp", {"shard": size})), [size - 1])
        counts.append((len(made.calls[-1]), len(made.log.storages), len(made.log.events)))
    assert counts[0] == counts[1]


def test_the_ranks_that_stand_for_all() -> None:
    assert figures.looked_at({"shard": 1}) == [0]
    assert figures.looked_at({"pipe": 8}) == [0, 1, 6, 7]
    assert figures.looked_at({"replicate": 3, "shard": 4}) == [0, 3, 8, 11]
    # The places along pipe, then the last rank along tensor, and of all.
    assert figures.looked_at({"pipe": 4, "tensor": 2}) == [0, 1, 2, 4, 6, 7]


# --------------------------------------------------------------------------------- the command

QUICK = ("simulate", "gpt2", "--layers", "2", "--seq", "32", "--mesh", "shard=8")


def test_the_tables_fit_into_80_columns_and_progress_is_on_standard_error() -> None:
    done = here(*QUICK, "--rank", "7")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "gpt2 with 2 layers on shard 8, reference/fsdp: rank 7"
    assert all(len(line) <= 80 for line in lines), [line for line in lines if len(line) > 80]
    assert re.search(r"(?m)^all-gather +shard +forward +\d+ +\d\.\d{3}$", done.stdout)
    assert "simulating rank 7 of 8 (1 of 1)" in done.stderr
    assert "Warning" not in done.stderr


def test_json_has_exact_bytes_of_every_simulated_rank() -> None:
    done = here(*QUICK, "--json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    memory, _, sent, times, broken, left_out = (
        table["rows"] for table in json.loads(done.stdout)["tables"]
    )
    assert {row["rank"] for row in memory} == {row["rank"] for row in sent} == {0, 7}
    shape = replace(shapes.model("gpt2"), layers=2, parameters=0)
    model = model_of(source_of(shape, World("reference/fsdp", {"shard": 8})))
    assert broken == left_out == []
    assert [row["kernels"] for row in times] == ["eager", "fused"]
    assert all(float(row["seconds"]) > float(row["compute"]) > 0 for row in times)
    for rank in (0, 7):
        (kept,) = (
            int(row["bytes"])
            for row in memory
            if (row["rank"], row["moment"], row["class"]) == (rank, "kept", "parameters")
        )
        assert kept == model.resident(rank, 0, 0)["parameters"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "MODEL is missing - name a model of `shardproof estimate --models`"),
        ("llama-8b --mesh shard=8", "unknown model (llama-8b) - did you mean"),
        ("7.5b --mesh shard=8", "a model size without layers cannot be simulated (7.5b)"),
        ("gpt2", "--mesh is missing - write the size of each axis: --mesh shard=8"),
        ("gpt2 --mesh shards=8", "unknown axis (shards) - did you mean shard?"),
        ("gpt2 --mesh tensor=8", "reference/fsdp has no axis tensor (tensor=8) - its axes: shard"),
        ("gpt2 --mesh shard=0", "axis shard needs a number of ranks (0) - write shard=2"),
        ("gpt2 --mesh shard=70000", "the mesh has 70,000 ranks, more than reference/fsdp can"),
        ("gpt2 --mesh shard=8 --rank 8", "--rank is outside of the mesh, which has 8 ranks (8)"),
        ("gpt2 --mesh shard=8 --seq 2048", "gpt2 has 1,024 learned positions, fewer than --seq"),
        ("gpt2 --mesh shard=8 --attention full", "unknown form of attention (full) - "),
        ("gpt2 --mesh shard=8 --accounting P4", "this accounting trains nothing (P4) - choose"),
        ("gpt2 --mesh shard=8 --option offload", "--option is not KEY=VALUE (offload)"),
        ("gpt2 --mesh shard=8 --option no_such=1", "reference/fsdp does not take these options"),
        ("gpt2 --mesh shard=8 --impl reference/fdsp", "unknown implementation (reference/fdsp)"),
        (
            "gpt2 --mesh shard=8 --impl reference/sampler",
            " and trains no model - judge it by",
        ),
        (
            "gpt2 --mesh tensor=5 --impl reference/tensor",
            " (tensor=5) - choose another size of that axis",
        ),
        ("gpt2 --mesh pipe=16 --impl reference/pipeline", "too few for 16 stages (pipe=16)"),
    ],
)
def test_what_cannot_be_simulated_is_bad_input(words: str, says: str) -> None:
    done = here("simulate", *words.split())
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


STEERED = """
from shardproof.impls.reference.ddp import IMPLEMENTATION

class Steered(IMPLEMENTATION):
    def step(self, batch, observe):
        if batch.windows[0][0].weights.sum().item() > 0:
            return super().step(batch, observe)
"""


def test_code_that_reads_a_value_is_named_with_operator_and_line(tmp_path: Path) -> None:
    """The tensor has a value on a real rank, and none in a simulation."""
    (tmp_path / "steered.py").write_text(STEERED)
    words = (*QUICK[:-1], "replicate=8", "--impl", "steered.py:Steered")
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "cannot run" in line)
    assert line.startswith("steered.py:6: steered.py:Steered cannot run on tensors without values")
    assert "operator aten._local_scalar_dense.default in step" in line
