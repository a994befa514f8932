"""Judging a stale system: repeat, in one process, the updates that it says it made."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardproof import tensor_bytes
from shardproof.case import Case
from shardproof.cases.leader import CaseTask
from shardproof.cases.rank_program import run_rank
from shardproof.checks.numbers import FP64_BOUND, relative_frobenius
from shardproof.contract import Event
from shardproof.evidence.assembled import assemble
from shardproof.evidence.records import RankRecord
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import Forked, root_cause
from shardproof.oracle.replay import replay
from shardproof.workloads import Workload, make


def replayed(task: CaseTask) -> dict[str, Any]:
    """Task of a leader: run the ranks and compare the server with a replay."""
    case, workdir = task.case, task.workdir
    workdir.mkdir(parents=True)
    workload = make(case.workload, case.dtype, case.lane)
    program = lambda rank, world: run_rank(case, workload, rank).to_dict()  # noqa: E731
    launch = RankLaunch(case.backend, case.world, program, workdir, case.deadline)
    outcomes = Forked().run(launch)
    cause = root_cause(outcomes)
    result: dict[str, Any] = {"id": case.id, "error": cause and cause.message}
    if cause is None:
        files = [o.record for o in outcomes if o.record]
        records = [RankRecord.from_dict(tensor_bytes.load(file)) for file in files]
        result |= _compare(case, workload, records)
    return {"result": result}


def _compare(case: Case, workload: Workload, records: list[RankRecord]) -> dict[str, Any]:
    events = [event for record in records for event in record.history]
    shares = 1 + max(event.worker for event in events)
    versions = replay(workload, case.optimizer, shares, events)
    compare = relative_frobenius(FP64_BOUND)

    def worst(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
        return max(compare(found[name], truth[name]).error for name in truth)

    def server(at: str, step: int = 0) -> dict[str, Tensor]:
        pieces = {
            r.rank: (r.final if at == "final" else r.steps[step].observed[at])["parameters"]
            for r in records
        }
        return assemble(pieces).first()

    errors = [worst(server("final"), versions[-1])]
    for step in range(case.steps):
        errors.append(worst(server("after_update", step), versions[shares * (step + 1)]))
    fresh = [Event(e.order, e.worker, e.step, e.order) for e in events]
    return {
        "bound": FP64_BOUND,
        "errors": errors,
        "stale": max(event.order - event.version for event in events),
        "if_fresh": worst(server("final"), replay(workload, case.optimizer, shares, fresh)[-1]),
        "losses": [r.steps[0].loss for r in records],
    }
