"""Faults of stopping together: the vote, its numbers, and the choice of the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardproof.case import WorkloadSpec
from shardproof.contract import Ruling, StopRule
from shardproof.impls.mutants import declare
from shardproof.impls.reference.parts.consensus import Consensus, Count, Vote
from shardproof.impls.reference.stopping import ReferenceStopping

#: What names a fault: who is told what, or where training ends.
PARTED = r"rank.* ends? training at vote \d+, rank.* continues?"
BEST = r"different best checkpoints at vote \d+"
LATE, EARLY = r"all ranks continue after vote \d+", r"all ranks end training at vote \d+"
OTHER_BEST = r"all ranks have the checkpoint of step .* for the best"
METRICS = r"receive different metrics at vote \d+"
OTHER_METRIC = r"all ranks receive the metric .* over all data it is"


def of(**knobs: Any) -> Mapping[str, Any]:
    """A case of the workload ``votes``."""
    return {"workload": WorkloadSpec("votes", params=knobs)}


mutant = declare.family(
    ReferenceStopping,
    mesh={"replicate": 3},
    killed_by=("stopping",),
    lane="bitwise",
    steps=0,
    **of(),
)


@mutant("stopping_without_a_vote", says=f"{PARTED}|{BEST}", zoo=("G21",))
class WithoutAVote(Consensus):
    """Every rank decides by its own metric."""

    def exchange(self, vote: Vote) -> list[Vote]:
        return [vote]


@mutant("stopping_by_the_highest_metric", says=f"{LATE}|{EARLY}|{OTHER_BEST}")
class ByTheHighestMetric(Consensus):
    """The metric is the maximum over ranks instead of the mean."""

    def metric(self, votes: Sequence[Vote]) -> float:
        return max(vote.weighted / vote.weight for vote in votes)


@mutant("stopping_weighs_ranks_alike", says=f"{LATE}|{EARLY}|{OTHER_BEST}")
class WeighsRanksAlike(Consensus):
    """The mean of the ranks' means: a rank with little data has the same weight as one with
    much.
    """

    def metric(self, votes: Sequence[Vote]) -> float:
        return sum(vote.weighted / vote.weight for vote in votes) / len(votes)


@mutant(
    "stopping_ignores_nan_of_one_rank",
    says=f"{LATE}|{EARLY}|{OTHER_BEST}",
    **of(not_finite="count"),
)
class IgnoresNanOfOneRank(Consensus):
    """Ranks whose metric is NaN are left out of the mean."""

    def metric(self, votes: Sequence[Vote]) -> float:
        return super().metric([vote for vote in votes if math.isfinite(vote.weighted)])


@mutant("stopping_stops_where_nan_is", says=PARTED, **of(not_finite="stop"))
class StopsWhereNanIs(Consensus):
    """Only a rank whose own metric is NaN stops."""

    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        ruling = super().vote(step, metric, weight, asks)
        told = math.isfinite(ruling.metric) or not math.isfinite(metric)
        return replace(ruling, ends=ruling.ends and told)


@mutant("stopping_keeps_its_own_best", says=BEST, zoo=("G22",))
class KeepsItsOwnBest(Consensus):
    """All ranks end together, but each keeps the checkpoint that was best on its own data."""

    def __init__(self, rule: StopRule, comm: Any) -> None:
        super().__init__(rule, comm)
        self.own = Count(rule)

    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        ruling = super().vote(step, metric, weight, asks)
        return replace(ruling, best=self.own.take(step, metric, asks).best)


@mutant("stopping_tells_its_own_metric", says=METRICS)
class TellsItsOwnMetric(Consensus):
    """The vote is global, but each rank gets its own metric back and logs it."""

    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        return replace(super().vote(step, metric, weight, asks), metric=metric)


@mutant("stopping_counts_patience_alone", says=PARTED)
class CountsPatienceAlone(Consensus):
    """The best checkpoint is global, but each rank counts patience by its own metric."""

    def __init__(self, rule: StopRule, comm: Any) -> None:
        super().__init__(rule, comm)
        self.own = Count(rule)

    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        ends = self.own.take(step, metric, asks).ends
        return replace(super().vote(step, metric, weight, asks), ends=ends)


@mutant(
    "stopping_without_data_votes_zero",
    says=OTHER_METRIC,
    **of(without_data=True, patience=0, target=6),
)
class WithoutDataVotesZero(Consensus):
    """A rank without data votes with a metric of 0 that counts, which pulls the mean to the
    target.
    """

    def cast(self, step: int, metric: float, weight: float, asks: bool) -> Vote:
        return super().cast(step, metric, weight, asks) if weight else Vote(step, 0.0, 64.0, asks)


@mutant(
    "stopping_without_data_votes_nan",
    says=f"{EARLY}|{OTHER_BEST}",
    **of(without_data=True),
)
class WithoutDataVotesNan(Consensus):
    """A rank without data votes with 0 times its metric, which is NaN and makes the mean NaN."""

    def cast(self, step: int, metric: float, weight: float, asks: bool) -> Vote:
        return Vote(step, weight * metric, weight, asks)


@mutant("stopping_is_patient_once_more", says=LATE)
class IsPatientOnceMore(Count):
    """Training ends one vote too late: patience is off by one."""

    def why_it_ends(self, metric: float, asks: bool) -> str:
        self.without_gain -= 1
        why = super().why_it_ends(metric, asks)
        self.without_gain += 1
        return why


@mutant("stopping_counts_a_tie_as_gain", says=f"{LATE}|{OTHER_BEST}")
class CountsATieAsGain(Count):
    """A metric equal to the best one counts as a gain."""

    def is_better(self, metric: float) -> bool:
        return super().is_better(metric) or metric == self.best


@mutant("stopping_budget_off_by_one", says=EARLY, **of(patience=0, budget=6))
class BudgetOffByOne(Count):
    """Votes are counted from 0, so the budget ends one vote too early."""

    def why_it_ends(self, metric: float, asks: bool) -> str:
        self.votes += 1
        why = super().why_it_ends(metric, asks)
        self.votes -= 1
        return why


@mutant("stopping_hears_its_own_clock", says=PARTED, **of(asks=True))
class HearsItsOwnClock(Consensus):
    """Only the rank whose time is over stops."""

    def exchange(self, vote: Vote) -> list[Vote]:
        votes = super().exchange(vote)
        return [other._replace(asks=vote.asks) for other in votes]


@mutant("stopping_reaches_its_own_target", says=PARTED, **of(patience=0, target=8))
class ReachesItsOwnTarget(Consensus):
    """A rank ends training when its own metric reaches the target."""

    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        ruling, own = super().vote(step, metric, weight, asks), Count(self.count.rule)
        return replace(ruling, ends=own.take(step, metric, asks).ends)
