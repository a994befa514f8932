"""A leader judges several cases, one after the other, and none of them shows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shardproof.case import Case
from shardproof.cases import runner
from shardproof.cases.leader import CaseTask
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

QUICK = "in_memory"


@pytest.fixture(scope="module", autouse=True)
def keeps_fork_servers() -> None:
    """Sessions of this file have fork servers of their own, which keep leaders."""


def quick(scenario: str, expression: str = QUICK) -> list[Case]:
    return Selection([scenario], tier="quick", expression=expression).cases(installed())


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, True),
        ({"implementation": "pytorch/fsdp2"}, True),
        ({"implementation": "mutants/ddp_never_reduces"}, True),
        ({"implementation": "mutants/judge_check_returns_nothing"}, False),
        ({"implementation": "deepspeed/zero1"}, False),
        ({"implementation": "mine:DDP"}, False),
        ({"implementation": "mine.py:DDP"}, False),
        ({"options": {"hook": "mine:hook"}}, False),
        ({"expect": {"relation": "reload"}}, True),
        ({"expect": {"relation": {"same_as": {"options": {"units": "layers"}}}}}, True),
        ({"expect": {"relation": {"same_as": {"implementation": "mine:DDP"}}}}, False),
        ({"expect": {"relation": {"same_as": {"implementation": "deepspeed/zero1"}}}}, False),
    ],
)
def test_what_others_wrote_is_not_loaded_into_a_leader_that_is_kept(
    changed: dict[str, Any], kept: bool, tmp_path: Any
) -> None:
    case = replace(quick("ddp-gpt")[0], **changed)
    assert runner._leaves_no_trace(CaseTask(case, tmp_path, tmp_path)) == kept


def test_a_model_of_ones_own_has_a_leader_to_itself(tmp_path: Any) -> None:
    case = quick("ddp-gpt")[0]
    own = replace(case, workload=replace(case.workload, name="mine:MODEL"))
    assert not runner._leaves_no_trace(CaseTask(own, tmp_path, tmp_path))


def exact(figures: dict[str, Any]) -> Any:
    """Digests of all tensors and what was compared; threads of a pipeline send in varying order."""
    return figures["tensors"], figures["compared"]


def test_what_is_measured_is_the_same_in_any_order() -> None:
    cases = [case for name in ("ddp-gpt", "fsdp-gpt", "pipeline") for case in quick(name)[:2]]
    assert len(cases) > 4
    cases.append(replace(cases[0], id="planted", implementation="mutants/ddp_never_reduces"))

    def accounts(order: list[Case]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with runner.Session(1) as session:
            session.run(
                order,
                lambda result: None,
                on_account=lambda result, account: found.update(
                    {result.id: (result.verdict, exact(account["figures"]))}
                ),
            )
        return found

    first = accounts(cases)
    shuffled = random.Random(5).sample(cases, len(cases))
    assert {name for name, (verdict, _) in first.items() if verdict == "fail"} == {"planted"}
    assert first == accounts(shuffled)
