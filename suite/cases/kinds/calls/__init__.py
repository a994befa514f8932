"""Workload ``calls``: calls of one collective operation, judged one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cases.kinds.calls import workload
from shardproof.cases.kinds.kind import Leg, UntrainedKind
from shardproof.contract import Collectives


def _legs(case: Case, system: Any) -> Sequence[Leg] | str:
    from shardproof.cases.kinds.calls.rank_program import CallsProgram

    offered = system.offers(case.options, case.backend, case.world)
    if system.hands_on:
        offered = workload.within(offered, BACKENDS[case.backend].takes)
    if cells := workload.sub_matrix(case, offered):
        return [(case.world, lambda _: CallsProgram(case, cells))]
    operation = workload.resolve(case.workload)["operation"]
    return f"{case.system} offers no {operation} of these layouts"


class _Calls(UntrainedKind):
    tests_backend = True

    def parts_ranks(self, case: Case) -> bool:
        """Where the last call differs between ranks, no call of that group can match after it."""
        params = workload.resolve(case.workload)
        return case.world > 1 and params["differs"] != "none" and params["size"] != workload.LARGE


CALLS = _Calls(
    *(workload.NAME, Collectives, "collectives", "offers no collectives"),
    resolve=workload.resolve,
    legs=_legs,
)
