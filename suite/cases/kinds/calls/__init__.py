"""Workload ``calls``: calls of one collective operation, judged one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.backends import BACKENDS
from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kinds.calls import workload
from shardproof.cases.kinds.kind import Untrained
from shardproof.cases.kinds.work import Leg
from shardproof.contract import Collectives
from shardproof.workloads.knobs import Params


class Calls(Untrained):
    """The calls of a sub-matrix, one after the other in the same ranks."""

    name = workload.NAME
    system = Collectives
    only_check = "collectives"
    lacks = "offers no collectives"
    tests_backend = True

    def resolve(self, spec: WorkloadSpec) -> Params:
        """All knobs."""
        return workload.resolve(spec)

    def legs(self, case: Case, system: Any) -> Sequence[Leg] | str:
        """One, of the calls that the system offers."""
        from shardproof.cases.kinds.calls.rank_program import CallsProgram

        offered = system.offers(case.options, case.backend, case.world)
        if system.hands_on:
            offered = workload.within(offered, BACKENDS[case.backend].takes)
        if cells := workload.sub_matrix(case, offered):
            return [(case.world, lambda _: CallsProgram(case, cells))]
        operation = workload.resolve(case.workload)["operation"]
        return f"{case.system} offers no {operation} of these layouts"

    def parts_ranks(self, case: Case) -> bool:
        """Where the last call differs between ranks, no call of that group can match after it."""
        params = workload.resolve(case.workload)
        return case.world > 1 and params["differs"] != "none" and params["size"] != workload.LARGE
