"""What a system does between steps: evaluation changes nothing, the gathered state is the state.

Before the last step every rank evaluates that step's batch twice, so that what an evaluation leaves
behind (a mode, a gradient, a moved buffer) spoils the step that follows.  The two agree bit for
bit; shares sum to the oracle's evaluation of the system's own parameters and buffers.  After the
last step ``full_state`` has the digests of the assembled pieces.  A part of equivalence.
"""

from __future__ import annotations

from shardproof.checks.numbers import Comparison
from shardproof.evidence.assembled import Evidence, Row
from shardproof.oracle import training
from shardproof.workloads import for_case


def measure(evidence: Evidence, bound: float) -> list[Row]:
    """One row for the summed loss in evaluation mode, one per thing that is wrong."""
    return [*_evaluation(evidence, bound), *_full_state(evidence)]


def _evaluation(evidence: Evidence, bound: float) -> list[Row]:
    told = {r["rank"]: r["evaluation"] for r in evidence.records if r.get("evaluation")}
    if not told:
        return []
    if len(told) < len(evidence.records):
        return [{"problem": f"only ranks {sorted(told)} evaluate; the others refuse"}]
    step = next(iter(told.values()))["step"]
    shares: dict[int, float] = {}
    for rank, what in told.items():
        if what["changed"]:
            return [{"problem": f"evaluation changes {what['changed'][0]} on rank {rank}"}]
        first, second = what["losses"]
        if first is None or what["share"] is None:
            continue
        if first != second:
            return [{"problem": f"two evaluations on rank {rank}: {first!r}, then {second!r}"}]
        known = shares.setdefault(what["share"], first)
        if not abs(known - first) <= bound * abs(known):
            return [{"problem": f"evaluation: ranks of share {what['share']} disagree"}]
    case = evidence.case
    workload = for_case(case)
    batches = workload.batch(step, case.data_coordinates)
    if set(shares) != set(range(len(batches))):
        return [{"problem": f"evaluation: only shares {sorted(shares)} are told"}]
    parameters = evidence.observed(step - 1, "after_update", "parameters").first()
    buffers = evidence.observed(step - 1, "after_update", "buffers").tensors
    truth = 0.0
    for number, batch in enumerate(batches):
        own = {name: copies[min(number, max(copies))] for name, copies in buffers.items()}
        truth += training.evaluate(
            workload, {**parameters, **own}, batch.micro_batches, case.precision
        )
    total = sum(shares.values())
    error = abs(total - truth) / (abs(truth) or 1.0)
    result = Comparison(error if error == error else float("inf"), bound)
    place = {"step": step, "phase": "evaluation", "name": "loss", "owner": "all ranks"}
    return [place | {"error": result.error, "bound": result.bound}]


def _full_state(evidence: Evidence) -> list[Row]:
    told = {r["rank"]: r["full_state"] for r in evidence.records if r.get("full_state") is not None}
    if not told:
        return []
    if len(told) < len(evidence.records):
        return [{"problem": f"only ranks {sorted(told)} have a full_state; the others refuse"}]
    last = evidence.steps[-1]
    want = {
        row["name"]: row
        for row in evidence.tensors
        if (row["step"], row["point"], row["kind"]) == (last, "after_update", "parameters")
    }
    for rank, found in told.items():
        if set(found) != set(want):
            odd = sorted(set(found) ^ set(want))
            return [{"problem": f"full_state on rank {rank}: {odd[0]!r} is lost or invented"}]
        for name, row in found.items():
            if any(row[key] != want[name][key] for key in ("digest", "shape", "dtype")):
                return [{"problem": f"full_state on rank {rank} is not what is held: {name!r}"}]
    return []
