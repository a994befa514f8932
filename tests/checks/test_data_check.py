"""The check of samplers: sound ones pass at any length and world, and each fault is named."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof import registry
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kills import pair
from shardproof.cases.kinds.samples import check as data
from shardproof.cases.kinds.samples import workload as epochs
from shardproof.cases.kinds.samples.rank_program import SamplesProgram
from shardproof.checks import Outcome
from shardproof.contract import OptimizerSpec
from shardproof.evidence.records import ComparisonRow, Drawn, RankRecord

TORCH = "pytorch/distributed_sampler"


@pytest.fixture(scope="module", autouse=True)
def draws_put_back() -> Iterator[None]:
    """Programs of ranks seed global generators, here those of the tests."""
    before = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.random.set_rng_state(before[0])
    random.setstate(before[1])
    numpy.random.set_state(before[2])


def case(system: str, world: int, seed: int = 0, **knobs: Any) -> Case:
    return Case(
        id=f"samplers::{system}{world}",
        scenario="samplers",
        implementation=system,
        backend="in_memory",
        mesh={"replicate": world},
        workload=WorkloadSpec("epochs", seed=seed, params=knobs),
        optimizer=OptimizerSpec(),
        lane="bitwise",
        checks=("data",),
        steps=0,
    )


def asked(of: Case) -> list[list[RankRecord]]:
    """What the ranks of each leg note, asked one after the other in this process."""
    legs: list[list[RankRecord]] = []
    for leg, mesh in enumerate(epochs.meshes(of)):
        program = SamplesProgram(of, leg, tuple(r.told_state for r in legs[-1]) if legs else ())
        ranks = epochs.coordinates(mesh)
        legs.append([RankRecord.from_dict(program(rank, len(ranks))) for rank in ranks])
    return legs


def judged(of: Case, legs: list[list[RankRecord]] | None = None) -> Outcome:
    legs = asked(of) if legs is None else legs
    evidence: Any = SimpleNamespace(case=of, records=legs[0], later_legs=legs[1:], compared={})
    evidence.compared["data"] = data.measure(evidence)
    return data.decide(evidence)


knobs = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 90),
        "batch": st.integers(1, 5),
        "tail": st.sampled_from(["pad", "drop", "uneven"]),
        "shuffle": st.booleans(),
    }
)
resumed = st.fixed_dictionaries(
    {
        "resume_at": st.integers(1, 12),
        "resume_epoch": st.integers(0, 2),
        "resumes": st.integers(1, 3),
        "into": st.integers(0, 5),
        "read_ahead": st.integers(0, 3),
    }
)
worlds, seeds = st.integers(1, 5), st.integers(0, 2**31 - 1)


@settings(max_examples=300, deadline=None)
@given(knobs, resumed | st.just({}), worlds, seeds)
def test_the_reference_passes_at_any_length_world_and_stop(
    asks: dict[str, Any], stops: dict[str, Any], world: int, seed: int
) -> None:
    outcome = judged(case("reference/sampler", world, seed, **asks, **stops))
    assert outcome.status == "pass", outcome.message


@settings(max_examples=100, deadline=None)
@given(knobs, worlds, seeds)
def test_torchs_own_passes_at_any_length_and_world(
    asks: dict[str, Any], world: int, seed: int
) -> None:
    tail = "drop" if asks["tail"] == "drop" else "pad"
    outcome = judged(case(TORCH, world, seed, **{**asks, "tail": tail}))
    assert outcome.status == "pass", outcome.message


@settings(max_examples=50, deadline=None)
@given(st.integers(5, 90), worlds)
def test_torchs_elastic_one_passes_where_nothing_stops_it(samples: int, world: int) -> None:
    outcome = judged(case("pytorch/elastic_distributed_sampler", world, samples=samples))
    assert outcome.status == "pass", outcome.message


#: The one that asks the default group who it is needs ranks: `shardproof mutants` plants it.
FAULTS = [
    name
    for name in registry.mutant_names()
    if registry.load_mutant(name).killed_by == ("data",) and not name.endswith("rank_of_the_world")
]


def test_there_are_enough_faults_of_samplers() -> None:
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_killed_by_its_name(name: str) -> None:
    fault = registry.load_mutant(name)
    both = pair(fault)
    assert both.case.checks == both.parent.checks == ("data",)
    clean, spoilt = judged(both.parent), judged(both.case)
    assert clean.status == "pass", clean.message
    assert spoilt.status == "fail"
    assert re.search(fault.says, spoilt.message), spoilt.message


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FAULTS), seeds)
def test_a_fault_is_killed_whatever_the_seed(name: str, seed: int) -> None:
    own = pair(registry.load_mutant(name)).case
    spec = WorkloadSpec("epochs", seed=seed, params=own.workload.params)
    assert judged(Case.from_dict({**own.to_dict(), "workload": spec.__dict__})).status == "fail"


@pytest.mark.parametrize("name", ["Random", "Numpy"])
def test_every_global_generator_is_left_alone(name: str) -> None:
    """Where ranks are threads nobody could say who moved it."""
    of = case(f"bad_samplers:Seeds{name}", 2)
    assert judged(of).status == "pass"
    outcome = judged(Case.from_dict({**of.to_dict(), "backend": "gloo"}))
    assert outcome.message.startswith(
        f"the sampler of rank 0 draws from the global generator of {name.lower()}, which differs"
    )


def whole(*shares: list[int], **knobs: Any) -> str:
    """What is said of shares of epoch 0, by rank."""
    of = case("reference/sampler", len(shares), epochs=1, **knobs)
    records: Any = [
        SimpleNamespace(rank=rank, drawn=[Drawn("whole", 0, samples)], told_state="")
        for rank, samples in enumerate(shares)
    ]
    return judged(of, [records]).message


@pytest.mark.parametrize(
    ("shares", "knobs", "says"),
    [
        ([[0, 3], [1, 7], [2, 4]], {"samples": 5}, "rank 1 takes sample 7 in epoch 0: there are"),
        ([[0, -1], [1, 2]], {"samples": 4}, "rank 0 takes sample -1"),
        (
            [[0, 3], [1, 4], [2, 2]],
            {"samples": 5, "tail": "pad"},
            "",
        ),
        (
            [[0, 3], [1, 4], [2, 3]],
            {"samples": 6},
            "sample 3 is seen twice in epoch 0: by ranks 0,2; "
            "sample 5 is seen by no rank in epoch 0, the last of the data set",
        ),
        ([[0, 0], [1, 2]], {"samples": 4}, "sample 0 is seen twice in epoch 0: both times by rank"),
        ([[0, 1], [0, 1]], {"samples": 4}, "ranks 0-1 take the same samples in epoch 0"),
        ([[0, 1, 2], [3]], {"samples": 4}, "shares are unequal in epoch 0: shares of 3 and 1"),
        (
            [[0, 1], [2, 3]],
            {"samples": 5},
            "1 of 5 samples are seen by no rank in epoch 0: 2 shares of 2, expected 2 shares of 3",
        ),
        (
            [[0, 1, 4], [2, 3, 0]],
            {"samples": 5, "tail": "drop"},
            "the tail is not dropped in epoch 0: 2 shares of 3, expected 2 shares of 2",
        ),
        ([[0], [1], [0], [1], [0]], {"samples": 2}, ""),
        ([[0], [0], [0], [0], [1]], {"samples": 2}, "sample 0 is seen twice"),
        ([[], [], []], {"samples": 2, "tail": "drop"}, ""),
        ([[0], [1], []], {"samples": 2, "tail": "uneven"}, ""),
        ([[2, 0], [3, 1]], {"samples": 4, "shuffle": False}, "sample 0 comes after 2, though"),
    ],
)
def test_shares_are_told_by_what_is_wrong_with_them(
    shares: list[list[int]], knobs: dict[str, Any], says: str
) -> None:
    message = whole(*shares, **knobs)
    assert message.startswith(says) if says else message.endswith("comparisons"), message


def decided(*rows: ComparisonRow) -> Outcome:
    return data.decide(SimpleNamespace(compared={"data": list(rows)}))  # type: ignore[arg-type]


def test_the_first_thing_that_is_wrong_is_told_and_the_others_are_counted() -> None:
    right = ComparisonRow(0, "whole", "order", "all ranks", 0.0, 0.0)
    wrong = ComparisonRow(1, "whole", "order", "all ranks", 1.0, 0.0, problem="it is wrong")
    outcome = decided(right, wrong, wrong)
    assert (outcome.status, outcome.message) == (
        "fail",
        "it is wrong (and 1 more of 3 comparisons)",
    )
    assert decided(right).status == "pass"
    assert decided().status == "skip"
    assert ComparisonRow.from_dict(wrong.to_dict()) == wrong


def test_orders_that_may_be_equal_by_chance_are_not_compared() -> None:
    """Of 4 samples two epochs of 24 are equal; of 13 one in 6 billion."""
    for samples, status in ((4, "pass"), (13, "fail")):
        of = case("reference/sampler", 2, samples=samples, epochs=2)
        legs = asked(of)
        for record in legs[0]:
            record.drawn = [
                d if d.epoch == 0 else Drawn("whole", 1, record.drawn[0].samples)
                for d in record.drawn
            ]
        assert judged(of, legs).status == status
