"""Triples of conditions: what can act, what is possible, and which share the scenarios meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_pairs import case, shipped

from shardproof.campaign import conditions
from shardproof.case import Case, CheckpointPlan, WorkloadSpec
from shardproof.contract import OptimizerSpec, ScalerSpec
from shardproof.coverage import features, pairs, triggers

TRAINED = OptimizerSpec(name="sgd", momentum=0.9, weight_decay=0.1, warmup_steps=2)


def conditioned() -> Case:
    traits = ("tied", "unequal_tokens", "overflow_on_one_rank")
    return case(
        workload=WorkloadSpec("charnames_gpt", traits, windows=2),
        optimizer=replace(TRAINED, scaler=ScalerSpec(2.0**80)),
        options={"checkpoint": {"format": "asynchronous"}, "bucket_bytes": 4096},
        checkpoint=CheckpointPlan(2, into={"mesh": {"replicate": 3}}),
    )


def test_conditions_are_of_five_kinds() -> None:
    assert conditions.of(conditioned()) == [
        *("event asynchronous-save", "event resume", "event resume-elsewhere"),
        *("event several-micro-batches", "event several-windows", "event skipped-update"),
        *("feature bucket_bytes", "feature strategy reference/ddp"),
        *("optimizer decay", "optimizer large-scale", "optimizer loss-scale", "optimizer warm-up"),
        *("state momentum", "state tied", "trait unequal_tokens"),
    ]


def test_a_triple_takes_three_kinds() -> None:
    met = conditions.triples(conditioned())
    assert ("event resume", "optimizer warm-up", "state momentum") in met
    assert ("event resume", "event several-windows", "state tied") not in met
    assert all(len({name.partition(" ")[0] for name in three}) == 3 for three in met)


@pytest.mark.parametrize(
    ("options", "mesh", "inert"),
    [
        ({"compress": {"method": "topk"}}, {"pipe": 2, "shard": 1}, "compress topk"),
        ({"all_reduce": "ring"}, {"replicate": 1, "tensor": 2}, "all_reduce ring"),
        ({"schedule": "zb_v"}, {"pipe": 1, "shard": 2}, "schedule zb_v"),
        ({"sequence_parallel": True}, {"shard": 2, "tensor": 1}, "sequence_parallel"),
        ({"data": "zero2"}, {"pipe": 2, "shard": 1}, "data zero2"),
    ],
)
def test_a_feature_of_an_axis_of_one_rank_does_not_act(
    options: dict[str, object], mesh: dict[str, int], inert: str
) -> None:
    one = case(implementation="reference/hybrid", options=options, mesh=mesh)
    assert inert in features.of(one)
    assert inert not in features.acting(one)
    assert ("mesh axis-of-one", inert) in pairs.of(one)
    assert ("batch several-micro-batches", inert) not in pairs.of(one)
    several = replace(one, mesh=dict.fromkeys(mesh, 2))
    assert inert in features.acting(several)
    assert ("batch several-micro-batches", inert) in pairs.of(several)


def test_one_rank_has_no_condition_and_meets_its_own_trigger_alone() -> None:
    alone = replace(conditioned(), mesh={"replicate": 1})
    assert not conditions.of(alone)
    assert {trigger for trigger, _ in pairs.of(alone)} == {"mesh one-rank"}


def test_traits_that_nothing_of_the_mesh_can_show_are_no_triggers() -> None:
    traits = ("rotating_shares", "unequal_micro_batches", "late_results", "tied")
    one = case(workload=WorkloadSpec("charnames_gpt", traits), mesh={"pipe": 2})
    assert triggers.of(one) & {f"trait {name}" for name in traits} == {
        *("trait late_results", "trait tied")
    }
    assert "trait late_results" not in triggers.of(replace(one, mesh={"pipe": 1}))
    both = replace(one, mesh={"replicate": 2})
    assert {f"trait {name}" for name in traits} <= triggers.of(both)


def test_a_triple_is_possible_where_each_two_of_it_stand_together() -> None:
    plain = WorkloadSpec("charnames_gpt", ("tied",), micro_batches=1)
    decays = case(workload=plain, optimizer=replace(TRAINED, warmup_steps=0))
    resumes = case(workload=plain, checkpoint=CheckpointPlan(2), optimizer=OptimizerSpec("adamw"))
    both = replace(decays, checkpoint=CheckpointPlan(2), workload=replace(plain, traits=()))
    three = ("event resume", "optimizer decay", "state tied")
    assert three not in conditions.possible([decays, resumes])
    assert three in conditions.possible([decays, resumes, both])
    assert not any(three in conditions.triples(one) for one in (decays, resumes, both))


def test_most_triples_of_the_scenarios_are_met() -> None:
    sentence = conditions.sentence(shipped())
    share = int(sentence.partition("(")[2].partition("%")[0])
    assert share >= SHARE, f"{sentence}: run `python -m tools.cover --arrays`"


#: Percent.
SHARE = 80
