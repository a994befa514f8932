"""Plans of members: what they become, and how bad ones are refused, with line, value and remedy."""

from __future__ import annotations

import pytest

from shardproof.case import Death
from shardproof.errors import ScenarioError
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import Vocabulary

WORDS = Vocabulary(
    implementations=("plain",),
    backends=("in_memory", "gloo"),
    workloads=("gpt",),
    traits=(),
    checks=("equivalence", "membership"),
)
HEAD = """\
name: small
about: an example
sees: [nothing]
workload: {name: gpt}
steps: 4
matrix:
  implementation: plain
  backend: BACKEND
  mesh: {replicate: 3}
  optimizer: sgd
checks: [equivalence, membership]
membership:
"""


def cases(plan: str, backend: str = "in_memory", head: str = HEAD) -> list[object]:
    return list(expand(load_text(head.replace("BACKEND", backend) + plan, "f.yaml"), WORDS))


def test_a_plan_gives_every_cell_once_more() -> None:
    plans = """\
  - {label: back, changes: [{step: 1, members: [0, 2]}, {step: 3, members: [0, 1, 2]}]}
  - {label: dies, deaths: [{rank: 1, step: 2, call: 5}]}
"""
    back, dies = expand(load_text(HEAD.replace("BACKEND", "in_memory") + plans, "f.yaml"), WORDS)
    assert back.id == "small[back]::plain::in_memory::replicate3::sgd::noclip::fp64::quick"
    assert back.membership == {"1": (0, 2), "3": (0, 1, 2)} and back.deaths == ()
    assert dies.membership == {} and dies.deaths == (Death(1, 2, 5),)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("changes: [{step: 1, members: []}]", "the change leaves no member"),
        ("changes: [{step: 1, members: [0, 3]}]", "no such rank in replicate3"),
        (
            "changes: [{step: 1, members: [0, 2, 2]}]",
            "list members in ascending order, each once ([0, 2, 2]) - write [0, 2]",
        ),
        (
            "changes: [{step: 1, members: [2, 0]}]",
            "list members in ascending order, each once ([2, 0]) - write [0, 2]",
        ),
        ("changes: [{step: 1, members: [0, 1, 2]}]", "the change before step 1 changes nothing"),
        ("changes: [{step: 4, members: [0]}]", "there is no such step (4) - valid: 0 to 3"),
        (
            "changes: [{step: 1, members: [0]}, {step: 1, members: [1]}]",
            "two changes have the same step",
        ),
        (
            "changes: [{step: 1, members: [0]}, {step: 2, members: [1]}]",
            "no member of step 1 remains to synchronize the new ones",
        ),
        ("deaths: [{rank: 3, step: 1}]", "rank 3 is not a member of step 1"),
        ("deaths: [{rank: 1, step: 1}, {rank: 1, step: 2}]", "rank 1 is not a member of step 2"),
        (
            "deaths: [{rank: 0, step: 1}, {rank: 1, step: 1}, {rank: 2, step: 1}]",
            "no member is left in step 1",
        ),
        ("deaths: [{rank: 1, step: 9}]", "there is no such step"),
        ("", "no rank joins, leaves or dies"),
    ],
)
def test_what_cannot_be_planned(plan: str, says: str) -> None:
    with pytest.raises(ScenarioError) as error:
        cases(f"  - {{label: odd, {plan}}}\n")
    told = str(error.value)
    assert told.startswith("f.yaml:13: membership plan odd: ") and says in told


def test_deaths_are_planned_where_one_member_can_be_let_go() -> None:
    with pytest.raises(ScenarioError, match="a member can die inside a step on in_memory only"):
        cases("  - {label: dies, deaths: [{rank: 1, step: 1}]}\n", "gloo")


def test_members_and_their_check_belong_together() -> None:
    plan = "  - {label: odd, changes: [{step: 1, members: [0]}]}\n"
    with pytest.raises(ScenarioError, match="membership plans and the check `membership` belong"):
        cases(plan, head=HEAD.replace(", membership]", "]"))
    with pytest.raises(ScenarioError, match="only on one-axis meshes"):
        cases(plan, head=HEAD.replace("{replicate: 3}", "{replicate: 2, shard: 2}"))
