"""Coverage by counting: what a case meets, what nobody can meet, and that nothing is left open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardproof.case import Case, CheckpointPlan, WorkloadSpec
from shardproof.commands.main import app
from shardproof.contract import OptimizerSpec, ScalerSpec
from shardproof.coverage import features, pairs, triggers
from shardproof.report.coverage import coverage_map
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

ROOT = Path(__file__).parents[2]


def case(**fields: object) -> Case:
    plain = Case(
        id="a::reference/ddp::in_memory::replicate2::sgd::noclip::fp64::quick",
        scenario="a",
        implementation="reference/ddp",
        backend="in_memory",
        mesh={"replicate": 2},
        workload=WorkloadSpec("charnames_gpt"),
        optimizer=OptimizerSpec(name="sgd"),
        lane="fp64",
        checks=("equivalence",),
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


@cache
def shipped() -> Sequence[Case]:
    """What `shardproof list coverage` counts."""
    files = find([str(ROOT / "scenarios" / name) for name in ("conformance", "checkpoint")])
    return pairs.taken([case for file in files for case in expand(file, installed())])


def test_a_case_that_its_system_declines_is_not_taken() -> None:
    static = case(implementation="pytorch/ddp", options={"static_graph": True})
    traits = WorkloadSpec("charnames_gpt", ("conditional_by_rank",))
    assert pairs.taken([static, replace(static, workload=traits)]) == [static]


def test_triggers_are_traits_and_forms_of_batch_mesh_and_model() -> None:
    spec = WorkloadSpec("charnames_gpt", ("tied",), global_batch=24, micro_batches=2)
    assert triggers.of(case(workload=spec)) == {
        "trait tied",
        "batch several-micro-batches",
        "mesh two-ranks",
    }
    few = WorkloadSpec("digits_cnn", global_batch=15, micro_batches=3, windows=2)
    found = triggers.of(case(workload=few, mesh={"replicate": 3, "shard": 1}))
    assert {"batch several-windows", "batch fewer-samples", "model batch-norm"} <= found
    assert {"mesh odd", "mesh axis-of-one"} <= found
    assert "mesh several-axes" not in found
    staged = case(mesh={"pipe": 4}, workload=WorkloadSpec("charnames_gpt", micro_batches=3))
    assert "batch fewer-than-stages" in triggers.of(staged)
    assert "batch fewer-than-stages" not in triggers.of(replace(staged, mesh={"pipe": 3}))


def test_features_are_what_was_asked_of_the_system() -> None:
    asked = case(
        options={
            "data_options": {"all_reduce": {"algorithm": "hierarchical", "ranks_per_node": 2}},
            "compress": {"method": "powersgd", "feedback": False},
            "checkpoint": {"format": "full"},
            "bucket_bytes": 4096,
            "offload": "none",
            "reshard_after_forward": False,
            "recompute_every": 0,
        },
        optimizer=OptimizerSpec(name="adamw", clip_norm=1.0, scaler=ScalerSpec()),
        checkpoint=CheckpointPlan(1, into={"mesh": {"replicate": 3}}),
    )
    assert features.of(asked) == {
        *("strategy reference/ddp", "backend in_memory", "optimizer adamw"),
        *("clipping", "loss-scaler", "all_reduce hierarchical", "bucket_bytes"),
        *("compress powersgd", "compress without-feedback", "checkpoint full"),
        *("load other-mesh", "no-reshard_after_forward"),
    }


@pytest.mark.parametrize("chosen", [{"keep": 3}, {}, None, True, "full"])
def test_a_format_that_was_not_asked_for_is_no_feature(chosen: object) -> None:
    plain = features.of(case())
    assert features.of(case(options={"checkpoint": chosen})) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"skip": "not here"},
        {"xfail": "known"},
        {"expect": {"refuses": "a word"}},
        {"workload": WorkloadSpec("calls"), "steps": 0},
        {"backend": "nccl"},
    ],
)
def test_a_case_that_need_not_pass_meets_nothing(fields: dict[str, object]) -> None:
    assert pairs.table([case()]).quick
    table = pairs.table([case(**fields)])
    assert not table.quick
    assert not table.full


def test_a_pair_is_impossible_where_nobody_with_the_feature_can_meet_the_trigger() -> None:
    sharded = case(implementation="reference/zero1", mesh={"shard": 2})
    table = pairs.table([sharded])
    several = table.why_empty(("mesh several-axes", "strategy reference/zero1"))
    assert several == "reference/zero1 has one axis: shard"
    assert not table.why_empty(("trait tied", "strategy reference/zero1"))
    together = pairs.table([sharded, case(implementation="reference/hybrid")])
    assert not together.why_empty(("mesh several-axes", "backend in_memory"))
    static = case(implementation="pytorch/ddp", options={"static_graph": True})
    declined = pairs.table([static]).why_empty(("trait conditional_by_rank", "static_graph"))
    assert declined.startswith("pytorch/ddp declines it: ")


def test_a_pair_without_a_case_or_a_reason_is_open() -> None:
    table = pairs.table([case()], [case(options={"bucket_bytes": 4096})])
    assert ("mesh two-ranks", "bucket_bytes") in table.open
    assert ("mesh two-ranks", "clipping") not in table.pairs
    assert "open" in table.sentence()
    (row,) = [row for row in table.by_feature().rows if row[0] == "bucket_bytes"]
    assert row[2:4] == ("0", "0")


def test_no_pair_of_the_scenarios_is_open_and_no_rule_is_stale() -> None:
    table = pairs.table(shipped())
    left = [f"{trigger} with {feature}" for trigger, feature in table.open]
    assert not left, (
        f"{len(left)} pairs have no case and no reason: {', '.join(left[:20])}; run "
        "`python -m tools.cover`, or give the reason in suite/coverage/reasons.yaml"
    )
    assert not stale_rules(table)


def stale_rules(coverage: pairs.Coverage) -> list[str]:
    """Rules that explain no empty pair."""
    empty = [pair for pair in coverage.pairs if not coverage.cases(pair)]
    return [
        f"{' '.join(rule.triggers)} x {' '.join(rule.features)}: no empty pair"
        for rule in pairs.rules()
        if not any(rule.matches(pair) for pair in empty)
    ]


def test_a_rule_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (
        pairs.ExcludedPair(("mesh two-ranks",), ("backend *",), "a case has it"),
        pairs.ExcludedPair(("no trigger",), ("*",), "nobody has it"),
    )
    monkeypatch.setattr(pairs, "rules", lambda: wrong)
    told = stale_rules(pairs.table([case()]))
    assert told == [
        "mesh two-ranks x backend *: no empty pair",
        "no trigger x *: no empty pair",
    ]


def test_list_coverage_gives_a_line_a_pair() -> None:
    done = CliRunner().invoke(app, ["list", "coverage", "ddp-gpt", "--backend", "in_memory"])
    assert done.exit_code == 0
    lines = [line.split("\t") for line in done.output.splitlines()]
    found = {(trigger, feature): rest for trigger, feature, *rest in lines}
    assert all(len(rest) == 3 for rest in found.values())
    assert int(found["mesh two-ranks", "strategy reference/ddp"][0]) > 0
    assert found["trait tied", "strategy reference/ddp"] == ["0", "0", "no case among these"]


def test_a_document_and_a_map_count_the_cases_of_both() -> None:
    class Result:
        verdict = "pass"

        def __init__(self, case: Case) -> None:
            self.case = case

    skipped = Result(case())
    skipped.verdict = "skip"
    many = [Result(case()), Result(case(optimizer=OptimizerSpec(name="adamw"))), skipped]
    told = pairs.document([result.case for result in many[:2]])
    assert json.loads(json.dumps(told)) == told
    assert told["features"]["strategy reference/ddp"]["mesh two-ranks"] == 2
    assert told["features"]["optimizer adamw"]["mesh two-ranks"] == 1
    drawn = coverage_map(many)  # type: ignore[arg-type]
    places = {str(row[0]): row[1:] for row in drawn.rows}["strategy reference/ddp"]
    assert [str(place) for place in places] == ["2", "2"]
