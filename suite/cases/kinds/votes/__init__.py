"""Workload ``votes``: ranks vote on when training ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kinds.kind import Untrained
from shardproof.cases.kinds.votes import workload
from shardproof.cases.kinds.work import Leg
from shardproof.contract import Stopping
from shardproof.workloads.knobs import Params


class Votes(Untrained):
    """Votes on scripts of metrics; they are steps, which fault plans may name."""

    name = workload.NAME
    system = Stopping
    only_check, also = "stopping", frozenset({"faults"})
    lacks = "does not decide when to stop"

    def resolve(self, spec: WorkloadSpec) -> Params:
        """All knobs."""
        return workload.resolve(spec)

    def legs(self, case: Case, system: Any) -> Sequence[Leg]:
        """One."""
        from shardproof.cases.kinds.votes.rank_program import VotingProgram

        return [(case.world, lambda _: VotingProgram(case))]
