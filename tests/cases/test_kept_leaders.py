"""A leader judges several cases, one after the other, and none of them shows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import Case, Fault, WorkloadSpec
from shardproof.cases import leader, runner
from shardproof.cases.leader import judge_case
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RankHost
from shardproof.scenarios.selection import Selection
from shardproof.scenarios.vocabulary import installed

QUICK = "in_memory"


class Asked(Exception):
    """Ranks would be started now."""


@pytest.mark.parametrize(
    ("workload", "fault", "expected"),
    [
        (WorkloadSpec("charnames_gpt"), None, True),
        (WorkloadSpec("charnames_gpt", traits=("tied",)), None, True),
        (WorkloadSpec("charnames_gpt", traits=("skewed_ranks",)), None, False),
        (WorkloadSpec("charnames_gpt", traits=("late_results",)), None, False),
        (WorkloadSpec("charnames_gpt"), Fault("p", "kill", 0, 0, "forward", ("crash",)), False),
    ],
)
def test_ranks_keep_one_core_unless_their_order_is_the_point(
    tmp_path: Path, workload: WorkloadSpec, fault: Fault | None, expected: bool
) -> None:
    asked = []

    class Asks(RankHost):
        def run(self, launch: RankLaunch) -> Any:
            asked.append(launch.one_core)
            raise Asked

    case = made_case("reference/ddp", {"replicate": 2}, workload=workload, fault=fault)
    judge_case(case, tmp_path, tmp_path, Asks())
    assert asked == [expected]


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
    changed: dict[str, Any], kept: bool
) -> None:
    case = replace(quick("ddp-gpt")[0], **changed)
    assert leader.leaves_no_trace(case) == kept


def test_a_model_of_ones_own_has_a_leader_to_itself() -> None:
    case = quick("ddp-gpt")[0]
    own = replace(case, workload=replace(case.workload, name="mine:MODEL"))
    assert not leader.leaves_no_trace(own)


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
