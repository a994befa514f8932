"""Stopping together: every small script, ranks without data, and ranks that die in a vote."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from local_ranks import succeed, threads

from shardproof.backends.errors import RankFailed
from shardproof.comm import Mesh
from shardproof.contract import Refused, Ruling, StopRule
from shardproof.impls.reference.parts.consensus import Consensus, VotesDiffer

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = [
    StopRule(patience=2, min_delta=0.5, best="highest"),
    StopRule(patience=1, target=0.25, budget=3, not_finite="stop"),
]
#: All that two ranks can measure in three votes, of these numbers.
NUMBERS = (0.0, 1.0, math.nan)
SCRIPTS = [[pair[:2], pair[2:4], pair[4:]] for pair in itertools.product(NUMBERS, repeat=2 * 3)]
#: How much data each of the two has.
WEIGHTS = (3.0, 1.0)


def ruled(rule: StopRule, script: Sequence[Sequence[float]]) -> list[tuple[bool, int | None]]:
    """By definition, every vote from the whole of what came before it."""

    def metric(vote: Sequence[float]) -> float:
        return sum(w * m for w, m in zip(WEIGHTS, vote, strict=True)) / sum(WEIGHTS)

    def best(votes: Sequence[Sequence[float]]) -> int | None:
        """The last vote of ``votes`` that beat the best of those before it."""
        if not votes:
            return None
        before, last = best(votes[:-1]), metric(votes[-1])
        if math.isnan(last):
            return before
        sign = -1 if rule.best == "lowest" else 1
        beaten = before is None or sign * (last - metric(votes[before])) > rule.min_delta
        return len(votes) - 1 if beaten else before

    told = []
    for count in range(1, len(script) + 1):
        at, now = best(script[:count]), metric(script[count - 1])
        idle = count if at is None else count - 1 - at
        ends = (
            (rule.patience > 0 and idle >= rule.patience)
            or (rule.not_finite == "stop" and math.isnan(now))
            or (rule.target is not None and now <= rule.target)
            or count == rule.budget
        )
        told.append((ends, at))
        if ends:
            break
    return told


@pytest.mark.parametrize("rule", RULES, ids=["gain", "ends"])
def test_every_script_of_two_ranks_and_three_votes(rule: StopRule) -> None:
    def body(rank: int, world: int) -> list[list[tuple[bool, int | None]]]:
        comm = Mesh({"replicate": world}).comm("replicate")
        heard = []
        for script in SCRIPTS:
            consensus, told = Consensus(rule, comm), []
            for step, vote in enumerate(script):
                ruling = consensus.vote(step, vote[rank], WEIGHTS[rank])
                told.append((ruling.ends, ruling.best))
                if ruling.ends:
                    break
            heard.append(told)
        return heard

    assert len(SCRIPTS) == 729
    want = [ruled(rule, script) for script in SCRIPTS]
    assert succeed(body, 2) == [want, want]
    assert len({len(told) for told in want}) > 1, "all scripts end at one vote"


def voted(rule: StopRule, *votes: Sequence[tuple[float, float, bool]]) -> list[list[Ruling]]:
    """What each rank is told, vote by vote."""

    def body(rank: int, world: int) -> list[Ruling]:
        consensus = Consensus(rule, Mesh({"replicate": world}).comm("replicate"))
        return [consensus.vote(step, *vote[rank]) for step, vote in enumerate(votes)]

    return succeed(body, len(votes[0]))


def test_all_ranks_have_one_metric_bit_for_bit_whatever_is_rounded() -> None:
    shares = [(0.1 * rank + 0.7, 1.0 + rank / 3, False) for rank in range(5)]
    (first, *others) = voted(StopRule(patience=1), shares)
    assert all(other == first for other in others)
    total = sum(metric * weight for metric, weight, _ in shares)
    assert first[0].metric == pytest.approx(total / sum(weight for _, weight, _ in shares))


def test_a_rank_without_data_counts_for_nothing_whatever_it_measured() -> None:
    odd = (math.nan, 0.0, False)
    (first, second) = voted(StopRule(patience=1), [(2.0, 5.0, False), odd])
    assert first == second and first[0] == Ruling(False, 0, 2.0)


def test_where_nobody_has_data_there_is_no_metric_and_no_best() -> None:
    nothing = [(1.0, 0.0, False)] * 2
    told = voted(StopRule(patience=2), nothing, nothing)
    assert [(r.ends, r.best, math.isnan(r.metric)) for r in told[0]] == [
        (False, None, True),
        (True, None, True),
    ]


def test_one_rank_asks_and_all_end_on_a_best_that_counts_this_vote() -> None:
    votes = [[(2.0, 1.0, False)] * 3, [(1.0, 1.0, False)] * 2 + [(1.0, 1.0, True)]]
    for told in voted(StopRule(patience=9), *votes):
        assert [r.ends for r in told] == [False, True]
        assert (told[1].best, told[1].why) == (1, "a rank asks to stop")


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_while_others_vote_wakes_them_and_nothing_is_decided(dead: int) -> None:
    def body(rank: int, world: int) -> Any:
        consensus = Consensus(StopRule(patience=3), Mesh({"replicate": world}).comm("replicate"))
        for step in range(0, 50, 10):
            if rank == dead and step == 20:
                raise OSError("the disk is gone")
            consensus.vote(step, 5.0 - step / 10, 1.0)

    _, errors = threads(body, 3)
    assert isinstance(errors[dead], OSError)
    for rank in {0, 1, 2} - {dead}:
        error = errors[rank]
        assert isinstance(error, RankFailed) and f"rank {dead}" in str(error)
        assert error.__notes__ == [
            "the vote on step 20 was not counted; the best checkpoint so far is that of step 10"
        ]


def test_ranks_that_vote_on_different_steps_all_raise() -> None:
    def body(rank: int, world: int) -> Any:
        consensus = Consensus(StopRule(patience=3), Mesh({"replicate": world}).comm("replicate"))
        consensus.vote(10 + (rank == 1), 1.0, 1.0)

    _, errors = threads(body, 3)
    assert all(isinstance(error, VotesDiffer) for error in errors)
    assert "after different steps (ranks 0, 1, ...: steps [10, 11, 10]" in str(errors[0])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "no rule ends training"),
        ({"patience": -1}, "'patience' must be at least 0"),
        ({"budget": -2}, "'budget' must be at least 0"),
        ({"patience": 1, "min_delta": -0.1}, "min_delta = -0.1"),
        ({"target": math.nan}, "target = nan"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(fields: dict[str, Any], says: str) -> None:
    def body(rank: int, world: int) -> Any:
        Consensus(StopRule(**fields), Mesh({"replicate": world}).comm("replicate"))

    _, errors = threads(body, 1)
    assert isinstance(errors[0], Refused) and says in str(errors[0])
