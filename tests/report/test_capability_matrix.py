"""Cells of strategy x backend x capability: which cases count; nothing unjudged is green."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import Case, WorkloadSpec
from shardproof.checks import CHECKS, OF_UNTRAINED, Outcome
from shardproof.checks.results import CaseResult, LeftOut
from shardproof.contract import OptimizerSpec
from shardproof.init.drawing import overall
from shardproof.report.capability_matrix import (
    BY_CHECK,
    BY_TRAIT,
    CAPABILITIES,
    STATES,
    CapabilityCell,
    capabilities,
    cells,
    outcome,
)
from shardproof.verdicts import GREEN, VERDICTS, exit_code
from shardproof.workloads.traits import TRAITS

CASE = made_case(
    "reference/zero3",
    {"shard": 2},
    backend="gloo",
    workload=WorkloadSpec("charnames_gpt", micro_batches=1),
    checks=("equivalence", "traffic"),
)


def case(name: str = "c", **fields: Any) -> Case:
    return replace(CASE, id=name, **fields)


def line(
    verdict: str = "pass", statuses: dict[str, Any] | None = None, **fields: Any
) -> CaseResult:
    told = case(**fields)
    statuses = dict.fromkeys(told.checks, "pass") if statuses is None else statuses
    found = [Outcome(name, status) for name, status in statuses.items()]
    return CaseResult(told.id, told, verdict, checks=found)


def cell(*lines: CaseResult, capability: str = "numbers") -> CapabilityCell:
    [found] = [c for c in cells(lines) if c.capability == capability]
    return found


def test_every_check_and_every_trait_stands_for_a_capability() -> None:
    checks = {name for names in BY_CHECK.values() for name in names}
    # Loss scaling and elastic groups take the whole case's verdict.
    assert checks | {"loss_scale", "membership"} == set(CHECKS)
    traits = [name for names in BY_TRAIT.values() for name in names]
    assert sorted(traits) == sorted(TRAITS)
    assert {*BY_CHECK, *BY_TRAIT} <= set(CAPABILITIES)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, set()),
        ({"optimizer": OptimizerSpec(clip_norm=0.1)}, {"clipping"}),
        ({"workload": WorkloadSpec("charnames_gpt", micro_batches=2)}, {"accumulation"}),
        ({"workload": WorkloadSpec("x", ("tied", "scalar"), micro_batches=1)},
         {"shared-weights", "odd-shapes"}),
        ({"precision": {"parameters": "bfloat16"}}, {"mixed-precision"}),
        ({"options": {"recompute_every": 2, "offload": "optimizer"}}, {"recomputation", "offload"}),
        ({"options": {"data": "ddp", "data_options": {"recompute_every": 1}}}, {"recomputation"}),
        ({"options": {"zero_optimization": {"offload_param": {"device": "cpu"}}}}, {"offload"}),
        ({"options": {"offload": None, "recompute_every": 0}}, set()),
        ({"expect": {"relation": "reload"}}, {"checkpoint"}),
        ({"expect": {"relation": {"same_as": {"options": {"data": "ddp"}}}}}, set()),
        ({"mesh": {"pipe": 2, "shard": 1}}, set()),
        ({"mesh": {"pipe": 2, "shard": 2}}, {"several-axes"}),
        ({"workload": WorkloadSpec("digits_cnn", micro_batches=1)}, {"buffers"}),
        ({"workload": WorkloadSpec("digits_cnn", micro_batches=1, params={"norm": "group"})},
         set()),
        ({"membership": {"1": (0,)}}, {"elastic"}),
    ],
)  # fmt: skip
def test_a_case_counts_for_what_it_trains_with(fields: dict[str, Any], expected: set[str]) -> None:
    told = capabilities(case(**fields))
    assert set(told) == {"numbers", "traffic"} | expected
    assert told == [name for name in CAPABILITIES if name in told]


def test_an_expected_refusal_trains_nothing() -> None:
    refused = case(
        expect={"refuses": "x"}, checks=("refusals",), optimizer=OptimizerSpec(clip_norm=1)
    )
    assert capabilities(refused) == ["refusals"]


def test_a_check_fails_for_itself_and_for_what_is_trained_with() -> None:
    result = line(
        "fail",
        {"equivalence": "pass", "traffic": "fail"},
        optimizer=OptimizerSpec(clip_norm=0.1),
    )
    assert [outcome(result, name) for name in ("numbers", "traffic", "clipping")] == [
        *("pass", "fail", "fail")
    ]


@pytest.mark.parametrize(
    ("relation", "fields", "capability"),
    [
        ("recompute", {"options": {"recompute_every": 2}}, "recomputation"),
        ("reload", {"reload_at": 1}, "checkpoint"),
    ],
)
def test_what_a_relation_shows_is_no_pass_where_it_was_skipped(
    relation: str, fields: dict[str, Any], capability: str
) -> None:
    expect = {"relation": relation}
    for status in ("skip", "fail", "pass"):
        result = line("pass", {"equivalence": "pass", "relations": status}, expect=expect)
        assert outcome(result, capability) == status
    # The case itself did it.
    result = line("pass", {"equivalence": "pass", "relations": "skip"}, expect=expect, **fields)
    assert outcome(result, capability) == "pass"


@pytest.mark.parametrize("verdict", ["crash(rank 1)", "hang(x)", "fail", "skip", "precondition(p)"])
def test_a_case_without_checks_says_the_same_of_all(verdict: str) -> None:
    result = line(verdict, {})
    kind = verdict.partition("(")[0]
    assert {outcome(result, name) for name in ("numbers", "traffic")} == {kind}


def test_expected_failures_are_those_of_the_check_that_fails() -> None:
    result = line("xfail", {"equivalence": "pass", "traffic": "fail"})
    assert [outcome(result, name) for name in ("numbers", "traffic")] == ["pass", "xfail"]
    assert outcome(line("xpass"), "numbers") == "xpass"


def test_of_several_checks_the_worst_counts_and_one_that_does_not_apply_does_not() -> None:
    checks = ("equivalence", "replicas", "norm")
    statuses = {"equivalence": "pass", "replicas": "undecidable", "norm": "skip"}
    assert outcome(line("undecidable", statuses, checks=checks), "numbers") == "undecidable"
    assert (
        outcome(line("pass", statuses | {"replicas": "skip"}, checks=checks), "numbers") == "pass"
    )
    assert outcome(line("skip", dict.fromkeys(checks, "skip"), checks=checks), "numbers") == "skip"


def test_working_precision_alone_proves_no_numbers_but_bytes() -> None:
    result = line(
        "pass (working precision only)",
        lane="working_precision",
        optimizer=OptimizerSpec(clip_norm=1),
    )
    assert (
        outcome(result, "numbers") == outcome(result, "clipping") == "pass (working precision only)"
    )
    assert outcome(result, "traffic") == "pass"
    assert cell(result, result).text == "working precision only 2/2"
    mixed = cell(result, line())
    assert mixed.text == "pass 2/2"
    assert "1 pass (working precision only)" in mixed.sentence


@pytest.mark.parametrize(
    ("verdicts", "state", "text"),
    [
        (["pass"] * 12, "pass", "pass 12/12"),
        (["pass", "skip"], "pass", "pass 1/1"),
        (["pass"] * 3 + ["crash", "fail"], "fail", "fail 2"),
        (["xpass"], "fail", "fail 1"),
        (["refused"], "fail", "fail 1"),
        (["pass", "undecidable"], "open", "open 1"),
        (["pass", "xfail"], "xfail", "xfail 1"),
        (["skip", "skip"], "skip", "skip"),
        (["no such verdict"], "open", "open 1"),
    ],
)
def test_a_cell_is_never_better_than_its_worst_case(
    verdicts: list[str], state: str, text: str
) -> None:
    lines = [line(verdict, {}) for verdict in verdicts]
    found = cell(*lines)
    assert (found.state, found.text) == (state, text)
    assert overall(lines).text == text


def test_every_verdict_has_a_state_and_green_needs_a_pass() -> None:
    for verdict in VERDICTS:
        found = cell(line(verdict, {}))
        assert found.state in STATES
        if found.state in ("pass", "working precision only"):
            assert verdict in GREEN
            assert exit_code({verdict: 1}) == 0


def test_what_was_left_out_stands_beside_or_alone() -> None:
    left = LeftOut("l", case(optimizer=OptimizerSpec(clip_norm=1)), None, "-")
    found = {c.capability: c for c in cells([line()], [left])}
    assert found["clipping"].state == found["clipping"].text == "not run"
    assert found["numbers"].text == "pass 1/1"
    assert "1 not run" in found["numbers"].sentence
    assert overall([], [left]).text == "not run"
    assert overall([]).text == "not run"


def test_cells_are_sorted_and_tell_ranks_and_broken_cases() -> None:
    lines = [
        line("fail", {"equivalence": "fail"}, name="one", mesh={"shard": 3}),
        line(name="two"),
        line(name="three", backend="in_memory"),
        line(name="four", implementation="pytorch/ddp"),
        line("skip", {}, name="five", mesh={"shard": 7}),
    ]
    found = cells(lines)
    assert [(c.implementation, c.backend, c.capability) for c in found] == [
        (name, backend, capability)
        for name, backend in (
            ("pytorch/ddp", "gloo"),
            ("reference/zero3", "gloo"),
            ("reference/zero3", "in_memory"),
        )
        for capability in ("numbers", "traffic")
    ]
    numbers = found[2]
    assert numbers.broken == ["one"]
    assert numbers.worlds == {2, 3}
    assert numbers.sentence == (
        "reference/zero3 on gloo, numbers: 1 fail, 1 pass, 1 skip; ranks: 2, 3"
    )
    assert {cell.capability for cell in found} == {"numbers", "traffic"}


def test_lines_of_older_versions_that_lack_fields_are_read() -> None:
    told = line().to_dict() | {"of_a_later_version": 1}
    for name in ("expect", "options", "precision", "membership", "reload_at"):
        del told["case"][name]
    told["case"]["of_a_later_version"] = 1
    assert cell(CaseResult.from_dict(told)).text == "pass 1/1"


@pytest.mark.parametrize("check", sorted(OF_UNTRAINED))
def test_what_trains_nothing_says_nothing_of_accumulation(check: str) -> None:
    workload = WorkloadSpec("charnames_gpt", micro_batches=2)
    assert "accumulation" in capabilities(case(workload=workload))
    assert "accumulation" not in capabilities(case(workload=workload, checks=(check,)))
