"""What a plan says to fit, an exact simulation confirms, and published meshes are candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import yaml
from commands import here

from shardproof.costs import shapes
from shardproof.costs.shapes import Shape
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed
from shardproof.simulate import figures
from shardproof.simulate.machines import machine
from shardproof.simulate.plan import folded, search
from shardproof.simulate.plan.candidates import Candidate, Job, Rejected, candidates
from shardproof.simulate.plan.command import count_of, size_of
from shardproof.simulate.plan.formulas import Estimated, Formulas
from shardproof.simulate.plan.placement import placement
from shardproof.simulate.plan.scenario import command, scenario
from shardproof.simulate.rank import simulate

SMALL = Shape("small", layers=6, hidden=64, heads=4, vocab=128, seq=32, mlp="swiglu", norm="rms")
JOB = Job(SMALL, "M18", gpus=4, node=2, tokens=512, positions=32)
#: Model, GPUs, tokens of a batch, and the mesh with which it was trained: Llama-3 (arXiv
#: 2407.21783, table 4), GPT-3 (2104.04473, table 2: 175B on 1,024), MT-NLG (2201.11990, section 3).
PUBLISHED = [
    ("llama3-405b", 16384, 2**24, 8192, {"pipe": 16, "shard": 128, "tensor": 8}),
    ("gpt3-175b", 1024, 1536 * 2048, 2048, {"pipe": 16, "shard": 8, "tensor": 8}),
    ("mt-nlg-530b", 2240, 1920 * 2048, 2048, {"pipe": 35, "shard": 8, "tensor": 8}),
]


def found(job: Job, memory: int, show: int) -> search.Found:
    return search.search(job, memory, machine("h100", job.node), show)


@pytest.fixture(scope="module")
def plans() -> search.Found:
    """Of a memory that some candidates exceed."""
    return found(JOB, 2_000_000, 2)


def exact(job: Job, plan: Candidate) -> int:
    """Most bytes of the ranks at the ends of each axis, all layers and micro-batches run."""
    source = search.source(job, plan)
    made = simulate(source, figures.looked_at(source.axes))
    return max(figures.figures(one, source.axes).peak for one in made)


def test_an_exact_simulation_apart_confirms_each_plan_that_fits(plans: search.Found) -> None:
    assert len(plans.plans) == 2
    for plan in plans.plans:
        size = exact(JOB, plan.candidate)
        assert size <= plan.bytes <= plans.memory
        # The law is a bound from above, and no loose one.
        assert plan.bytes <= 1.1 * size


def test_candidates_are_counted_and_each_rejection_has_a_reason(plans: search.Found) -> None:
    told = len(plans.rejected) + len(plans.plans)
    assert plans.looked_at == told and all(plans.rejected.examples)
    seconds = [plan.estimated.seconds for plan in plans.plans]
    assert seconds == sorted(seconds)


def test_a_formula_that_underestimates_makes_nothing_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: all candidates need a byte, by the formula; one is simulated, and none fits."""
    right = Formulas.estimated

    def wrong(self: Formulas, plan: Candidate) -> Estimated:
        return replace(right(self, plan), bytes=1.0)

    monkeypatch.setattr(Formulas, "estimated", wrong)
    monkeypatch.setattr(search, "_TRIES", 1)
    refuted = found(JOB, 100_000, 1)
    assert not refuted.plans and refuted.simulated == 1
    (text,) = refuted.rejected.examples["simulated, and a rank needs more memory"]
    assert "estimated 0.0" in text


def test_a_plan_that_was_not_simulated_does_not_fit() -> None:
    plan = search.Plan(Candidate("reference/fsdp", {"shard": 4}, {}, 1, 1), Estimated(1, 1, 0, 0))
    assert not plan.fits(10**12)
    with pytest.raises(ValueError, match="not simulated"):
        _ = plan.bytes


def traces(*sizes: Sequence[int]) -> list[folded.Trace]:
    """Of one run each: begin, peak, end."""
    return [folded.Trace((folded.Run("forward", *size),)) for size in sizes]


def test_the_law_takes_what_grows_fastest_and_refuses_what_does_not_repeat() -> None:
    three = traces((0, 50, 10), (0, 60, 30), (0, 70, 50))
    # The end grows by 20 a layer and will pass the peak: 70 + 4 x 20.
    assert folded.extended(three, 4) == 150
    with pytest.raises(folded.DoesNotFold, match="differ from those of a third"):
        folded.extended(traces((0, 50, 10), (0, 60, 30), (0, 81, 50)), 4)


@pytest.mark.parametrize(("name", "gpus", "tokens", "positions", "mesh"), PUBLISHED)
def test_published_meshes_are_candidates(
    name: str, gpus: int, tokens: int, positions: int, mesh: dict[str, int]
) -> None:
    assert prod(mesh.values()) == gpus
    job = Job(shapes.model(name), "M18", gpus, 8, tokens, positions)
    among = {
        tuple((axis, size) for axis, size in one.mesh.items() if size > 1)
        for one in candidates(job, Rejected())
    }
    assert tuple(mesh.items()) in among


def test_the_placement_collapses_nodes_that_are_alike() -> None:
    table = placement({"pipe": 2, "shard": 4, "context": 1, "tensor": 8}, 8)
    assert table.headings == ("node", "ranks", "pipe", "shard", "tensor")
    assert table.rows == [("0-3", "0-31", "0", "0-3", "0-7"), ("4-7", "32-63", "1", "0-3", "0-7")]
    (row,) = placement({"shard": 8}, 8).rows
    assert row == ("0", "0-7", "0-7")


@pytest.mark.parametrize(
    "plan",
    [
        Candidate("reference/fsdp", {"shard": 4}, {"sharding_strategy": "FULL_SHARD"}, 1, 4),
        Candidate("reference/hybrid", {"pipe": 2, "shard": 1, "tensor": 2},
                  {"data": "zero1", "schedule": "1f1b", "sequence_parallel": True}, 1, 16),
    ],
    ids=["shards", "grid"],
)  # fmt: skip
def test_the_scenario_is_valid_and_has_the_mesh_and_options(plan: Candidate) -> None:
    text = scenario(JOB, plan, "best")
    (case,) = expand(load_text(text, "best.yaml"), installed())
    assert case.mesh == plan.mesh and case.implementation == plan.implementation
    assert case.options == plan.options
    assert yaml.safe_load(text)["name"] == "best"
    assert "--nnodes 2 --node-rank N" in command(JOB, "best.yaml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "MODEL is missing - name a model"),
        ("llama-7b", "--gpus is missing - give --gpus 1 to 65,536"),
        ("7.5b --gpus 8", "a number of parameters has no layers that could be planned (7.5b)"),
        ("gpt2 --gpus 8 --memory 80", "--memory needs a number with a unit (80) - write --memory"),
        ("gpt2 --gpus 8 --intra fast", "--intra needs a number with a unit (fast)"),
        ("gpt2 --gpus 8 --batch-tokens many", "--batch-tokens needs a number of tokens (many)"),
        ("gpt2 --gpus 8 --batch-tokens 1000", "not a whole number of samples of 1,024 tokens"),
        ("gpt2 --gpus 8 --sequence 2048", "gpt2 has 1,024 learned positions"),
        ("gpt2 --gpus 8 --accounting P4", "this accounting trains nothing (P4)"),
        ("gpt2 --gpus 8 --machine h101", "unknown machine (h101)"),
    ],
)
def test_bad_input_ends_with_2_and_a_remedy(words: str, says: str) -> None:
    done = here("plan", *words.split())
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


def test_sizes_and_counts() -> None:
    assert size_of("450GB/s", "--intra", "") == 450e9 and size_of("74.5GiB", "", "") == 74.5 * 2**30
    assert count_of("4M") == 4 * 2**20 and count_of("4194304") == 4 * 2**20
