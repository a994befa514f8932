"""Workload ``votes``: ranks vote on when training ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.case import Case
from shardproof.cases.kinds.kind import Leg, UntrainedKind
from shardproof.cases.kinds.votes import workload
from shardproof.contract import Stopping


def _legs(case: Case, system: Any) -> Sequence[Leg]:
    from shardproof.cases.kinds.votes.rank_program import VotingProgram

    return [(case.world, lambda _: VotingProgram(case))]


#: Votes are steps, which fault plans may name.
VOTES = UntrainedKind(
    *(workload.NAME, Stopping, "stopping", "does not decide when to stop"),
    resolve=workload.resolve,
    legs=_legs,
    also=frozenset({"faults"}),
)
