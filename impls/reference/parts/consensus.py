"""Stopping together: ranks vote on when training ends, and on which checkpoint was the best.

Problem.  Every rank measures its own share of an evaluation, and the shares differ.  A rank that
decides by its own number stops alone: the others wait for it in the next collective, for ever; or
all stop, but each loads another checkpoint as the best.  So nobody decides alone.

    what                          where
    sum, weight of a share        every rank, its own; both 0 without data
    a wish to stop                every rank, its own: a clock that has run out, a signal
    best metric and its step,     every rank, equal, for all count the same votes
    votes, votes without gain

    vote     cast       [1] (step, weight x metric, weight, wish) of this rank
             exchange   [2] all ranks' votes, in the order of ranks
             agree      [3] they are of one step, or all raise
             metric     [4] sum of weight x metric over sum of weights, added up in that order
             count      [5] better than the best?  then patience, target, budget, wishes

The votes are gathered, not summed by an all-reduce: everyone adds up the same numbers in the same
order, so that a metric that lies on a threshold lies on the same side of it on all ranks, whatever
algorithm the backend has.  NaN and infinity need no rule of their own on the way: one rank's makes
the sum not finite, on all ranks.  But 0 times NaN is NaN, so a rank without data sends 0, not its
weight times its metric.

A rank that dies while others vote is the backend's to see: it raises in all who wait.  The error
then says that this vote decided nothing, and which checkpoint was the best before it.

Cost: bytes sent, over all N ranks: 32 N (N-1) a vote.  Memory: none that counts.
Numbers: exact where sums of weights and weighted metrics are; else one rounding a rank, the same
on all ranks.
Left out: the count of votes in a checkpoint (a run that goes on begins a new one), votes by some of
the ranks, metrics that are no mean over samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardproof.comm import Comm
from shardproof.contract import Refused, Ruling, StopRule
from shardproof.impls.reference.engine.options import at_least


class Vote(NamedTuple):
    """The vote of one rank."""

    step: int
    weighted: float
    weight: float
    asks: bool


class VotesDiffer(RuntimeError):
    """Ranks vote after different steps: some have skipped an evaluation."""


class Count:
    """The state after the same votes, equal on all ranks."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self.votes = 0
        self.without_gain = 0  # in a row
        self.best: float | None = None
        self.best_step: int | None = None

    def take(self, step: int, metric: float, asks: bool) -> Ruling:  # [5]
        """Count a vote."""
        self.votes += 1
        if self.is_better(metric):
            self.best, self.best_step, self.without_gain = metric, step, 0
        else:
            self.without_gain += 1
        why = self.why_it_ends(metric, asks)
        return Ruling(bool(why), self.best_step, metric, why)

    def is_better(self, metric: float) -> bool:
        """Whether ``metric`` is better than the best so far, by more than ``min_delta``."""
        if not math.isfinite(metric):
            return False
        gain = math.inf if self.best is None else self.sign * (metric - self.best)
        return gain > self.rule.min_delta

    @property
    def sign(self) -> int:
        """The sign of a change that counts as a gain."""
        return 1 if self.rule.best == "highest" else -1

    def why_it_ends(self, metric: float, asks: bool) -> str:
        """The first reason to end; empty if there is none."""
        rule = self.rule
        if asks:
            return "a rank asks to stop"
        if not math.isfinite(metric) and rule.not_finite == "stop":
            return f"the metric is {metric}"
        if rule.target is not None and self.sign * (metric - rule.target) >= 0:
            return f"the metric {metric:.6g} reaches the target {rule.target:.6g}"
        if rule.patience and self.without_gain >= rule.patience:
            return f"no gain in {self.without_gain} votes in a row"
        if rule.budget and self.votes >= rule.budget:
            return f"the budget of {rule.budget} votes is spent"
        return ""


class Consensus:
    """The votes of one run, over the ranks of ``comm``."""

    count_type: type[Count] = Count

    def __init__(self, rule: StopRule, comm: Comm) -> None:
        check(rule)
        self.comm = comm
        self.count = self.count_type(rule)

    def vote(self, step: int, metric: float, weight: float, asks: bool = False) -> Ruling:
        """Cast this rank's vote and count all of them.  A collective call.

        :raises VotesDiffer: on all ranks, where some vote on another step.
        """
        try:
            votes = self.exchange(self.cast(step, metric, weight, asks))
        except Exception as error:  # a peer is gone: the backend says who
            error.add_note(
                f"the vote on step {step} was not counted; the best checkpoint so far is that "
                f"of step {self.count.best_step}"
            )
            raise
        self.agree(votes)
        return self.count.take(step, self.metric(votes), any(vote.asks for vote in votes))

    def cast(self, step: int, metric: float, weight: float, asks: bool) -> Vote:  # [1]
        """This rank's vote; without data its metric may be NaN, which a weight of 0 does not
        remove.
        """
        return Vote(step, weight * metric if weight else 0.0, weight, asks)

    def exchange(self, vote: Vote) -> list[Vote]:  # [2]
        """The votes of all ranks, in their order."""
        mine = torch.tensor(vote, dtype=torch.float64, device=self.comm.device)
        every = mine.new_empty(self.comm.size * len(vote))
        self.comm.all_gather(every, mine)
        rows = every.view(self.comm.size, len(vote)).tolist()
        return [Vote(int(step), total, weight, bool(asks)) for step, total, weight, asks in rows]

    def agree(self, votes: Sequence[Vote]) -> None:  # [3]
        """Check that all votes are of one step."""
        steps = [vote.step for vote in votes]
        if len({*steps}) > 1:
            raise VotesDiffer(
                f"ranks called vote() after different steps (ranks 0, 1, ...: steps {steps}): "
                "call vote() after the same step on all ranks"
            )

    def metric(self, votes: Sequence[Vote]) -> float:  # [4]
        """The mean over all data; NaN if no rank has any."""
        weight = sum(vote.weight for vote in votes)
        return sum(vote.weighted for vote in votes) / weight if weight else math.nan


def check(rule: StopRule) -> None:
    """Check that a rule can be applied.

    :raises Refused: a bound below 0, or a number that is none.
    """
    at_least("patience", rule.patience, 0)
    at_least("budget", rule.budget, 0)
    if not 0 <= rule.min_delta < math.inf:
        raise Refused(
            f"min_delta = {rule.min_delta!r}: the smallest improvement that counts must be a "
            "finite number of at least 0; write 0 to count every improvement"
        )
    if rule.target is not None and not math.isfinite(rule.target):
        raise Refused(
            f"target = {rule.target!r}: the target must be a finite number; leave the key out "
            "to train without a target"
        )
    if not (rule.patience or rule.budget or rule.target is not None):
        raise Refused(
            "no rule ends training: patience, budget and target are all left out; set one of "
            "them, e.g. patience: 3"
        )
