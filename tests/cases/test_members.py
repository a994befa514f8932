"""Who takes part in which step, on which samples, at which rate; and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from made_case import made_case

from shardproof.case import Case, Death, WorkloadSpec
from shardproof.checks import membership
from shardproof.evidence.records import StepRecord
from shardproof.oracle import members
from shardproof.workloads import make


def changing(**fields: Any) -> Case:
    """Of four ranks rank 1 leaves before step 1 and dies, back again, in step 3."""
    usual: dict[str, Any] = {
        "membership": {"1": (0, 2, 3), "2": (0, 1, 2, 3)},
        "deaths": (Death(1, 3, 2),),
        "steps": 5,
        "workload": WorkloadSpec("charnames_gpt", global_batch=12),
    }
    return made_case("reference/elastic", {"replicate": 4}, **(usual | fields))


def test_members_batches_and_rates_of_both_rules() -> None:
    steps = members.of(changing())
    assert [step.members for step in steps] == [
        *((0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)),
        *((0, 2, 3), (0, 2, 3)),
    ]
    assert steps[3].begin == (0, 1, 2, 3)
    assert [(step.first, step.size, step.rate) for step in steps] == [
        (12 * number, 12, 1.0) for number in range(5)
    ]
    local = members.of(changing(), "local")
    assert [step.size for step in local] == [12, 9, 12, 9, 9]
    assert [step.first for step in local] == [0, 12, 21, 33, 42]
    assert [step.rate for step in local] == [1.0, 0.75, 1.0, 0.75, 0.75]
    assert members.sources(steps, 2) == {0: 0, 1: 0, 2: 2, 3: 3}
    assert members.sources(steps, 0) == {rank: rank for rank in range(4)}
    # The one who brought rank 1 up to date dies in the very step.
    alone = {"membership": {"1": (0,), "2": (0, 1)}, "deaths": (Death(0, 2),)}
    assert members.sources(members.of(changing(**alone)), 2) == {1: 0}


def test_what_an_oracle_depends_on() -> None:
    plain = made_case("reference/elastic", {"replicate": 4})
    assert plain.oracle_key("per_rank", "local") == plain.oracle_key("per_rank", "global")
    one, other = changing(), changing(deaths=())
    keys = {
        case.oracle_key("per_rank", rule) for case in (one, other) for rule in ("global", "local")
    }
    assert len(keys) == 4
    assert Case.from_dict(one.to_dict()) == one


def test_a_row_of_epochs_has_every_sample_once_an_epoch() -> None:
    spec = WorkloadSpec("charnames_gpt", traits=("short_epochs",), global_batch=4)
    workload = make(spec, "float64", "fp64")
    whole = [workload.at(first, 1).whole_batch(0) for first in range(20)]
    assert [int(batch.sample_ids) for batch in whole] == [*range(20)]
    drawn = [workload.at(first, 1)._index(0)[0] for first in range(20)]
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second) and len(set(first)) == 10 and first != second
    # However it is cut: three samples across the end of an epoch.
    assert workload.at(9, 3)._index(7) == drawn[9:12]
    assert workload.at(9, 3).whole_batch(7).inputs.shape[0] == 3


def figures(taken: list[dict[int, tuple[list[int], str]]], case: Case) -> Any:
    """Figures of ranks that trained, step by step, on samples, after attempts that ended so."""
    records = [
        SimpleNamespace(
            rank=rank,
            steps=[
                StepRecord(
                    number,
                    None,
                    None,
                    None,
                    present=rank in step and bool(step[rank][0]),
                    samples=step.get(rank, ([], ""))[0],
                    attempt=step.get(rank, ([], ""))[1],
                )
                for number, step in enumerate(taken)
            ],
        )
        for rank in range(3)
    ]
    of_steps = {"steps": range(case.steps), "members": members.of(case)}
    return SimpleNamespace(case=case, records=records, ranks=dict(enumerate(records)), **of_steps)


def three(**fields: Any) -> Case:
    return made_case(
        "reference/elastic",
        {"replicate": 3},
        workload=WorkloadSpec("charnames_gpt", global_batch=3),
        steps=2,
        **fields,
    )


FIRST = {0: ([0], ""), 1: ([1], ""), 2: ([2], "")}
LEAVES: Any = {"membership": {"1": (0, 2)}}
DIES: Any = {"deaths": (Death(1, 1, 4),)}


@pytest.mark.parametrize(
    ("fields", "second", "status", "says"),
    [
        (LEAVES, {0: ([3, 4], ""), 2: ([5], "")}, "pass", ""),
        (LEAVES, {0: ([3, 4], ""), 2: ([2], "")}, "fail", "again on sample 2 of step 0"),
        (LEAVES, {0: ([3, 4], ""), 2: ([8], "")}, "fail", "sample 8, expected one of the next 3"),
        (LEAVES, {0: ([3, 4], ""), 2: ([4], "")}, "fail", "ranks 0,2 train on sample 4, each"),
        (LEAVES, {0: ([3, 4], "")}, "fail", "no rank trains on sample 5 (1 of 3 are left out)"),
        (DIES, {0: ([3, 4], "stopped"), 1: ([], "died"), 2: ([5], "stopped")}, "pass", ""),
        (
            DIES,
            {0: ([3, 4], "committed"), 1: ([], "died"), 2: ([5], "stopped")},
            "fail",
            "step 1: rank 1 died in it, yet rank 0 committed it, rank 2 did not",
        ),
        (
            DIES,
            {0: ([3, 4], "committed"), 1: ([], "lived"), 2: ([5], "committed")},
            "precondition",
            "rank 1 was to die before its call 4 of step 1, but the rank ended that step",
        ),
        ({}, {0: ([3], ""), 1: ([4], ""), 2: ([5], "")}, "skip", "the same in every step"),
    ],
)
def test_what_the_check_says(
    fields: Any, second: dict[int, tuple[list[int], str]], status: str, says: str
) -> None:
    outcome = membership.decide(figures([FIRST, second], three(**fields)))
    assert outcome.status == status, outcome.message
    assert says in outcome.message
