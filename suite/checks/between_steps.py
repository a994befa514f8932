"""Between steps: evaluation changes nothing, and the gathered state is the state.

Before the last step every rank evaluates that step's batch, so that what an evaluation leaves
behind (a mode, a gradient, a moved buffer) spoils the step that follows; in cases of more than
three steps before the third as well, so that it (a copy that is kept) spoils another evaluation.
Shares sum to the oracle's evaluation of the system's own parameters and buffers.  After the last
step ``full_state`` has the digests of the assembled pieces.  A part of equivalence.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from shardproof.checks import Worst, causes
from shardproof.checks.causes.scalars import of_evaluation
from shardproof.checks.causes.state import of_full_state
from shardproof.checks.numbers import Comparison
from shardproof.evidence.assembled import Evidence
from shardproof.evidence.records import ComparisonRow
from shardproof.oracle import training
from shardproof.workloads import for_case


def measure(evidence: Evidence, bound: float) -> list[ComparisonRow]:
    """One row for the summed loss in evaluation mode, one per thing that is wrong."""
    steps = sorted({one.step for record in evidence.records for one in record.evaluations})
    if steps and steps[-1] != evidence.steps[-1]:
        return _problem(f"evaluate() works before step {steps[-1]}, not before the last step")
    evaluated = [row for step in steps for row in _evaluation(evidence, step, bound)]
    return [*evaluated, *_full_state(evidence)]


def _evaluation(evidence: Evidence, step: int, bound: float) -> list[ComparisonRow]:
    ranks = evidence.ranks
    by_rank = {n: one for n, r in ranks.items() for one in r.evaluations if one.step == step}
    if len(by_rank) < len(ranks):
        return _some_refuse(by_rank, "evaluate")
    told_by: dict[int, tuple[int | None, float]] = {}
    for rank, evaluation in by_rank.items():
        if evaluation.changed:
            return _problem(f"evaluate() changes {evaluation.changed[0]} on rank {rank}")
        if evaluation.retold:
            what = f"{evaluation.retold[0]} on rank {rank}"
            return _problem(f"evaluate() keeps the values, but changes the pieces, of {what}")
        if evaluation.loss is None or evaluation.share is None:
            continue
        if not math.isfinite(evaluation.loss):
            return _problem(f"evaluation: the loss of rank {rank} is {evaluation.loss}")
        told_by[rank] = evaluation.share, evaluation.loss
    try:
        shares = evidence.whole_losses(told_by, bound)
    except ValueError as problem:
        return _problem(f"evaluation: {problem}")
    case = evidence.case
    workload = for_case(case)
    batches = workload.batch(step, case.data_coordinates)
    if set(shares) != set(range(len(batches))):
        named = sorted(share for share in shares if share is not None)
        return _problem(f"evaluate() returned a loss only for data coordinates {named}")
    parameters = [
        trajectory.observed(step - 1, "after_update", "parameters").first()
        for trajectory in evidence.trajectories
    ]
    buffers = evidence.observed(step - 1, "after_update", "buffers").tensors
    given = workload.state()
    # A system that promises nothing of buffers need not show them: those that no step moves are
    # known all the same, and with others there is nothing to compare with.
    hidden = given.keys() - buffers.keys() - parameters[0].keys()
    moved = evidence.truth.steps[step - 1].buffers[:1]
    if any(
        not torch.equal(own[name], given[name]) for own in moved for name in hidden & own.keys()
    ):
        return []
    loss_of, truth = training.evaluator(workload, case.precision), 0.0
    for number, batch in enumerate(batches):
        # Where all coordinates share one copy, each of them has that.
        own = {name: copies[min(number, max(copies))] for name, copies in buffers.items()}
        held = parameters[min(number, len(parameters) - 1)]
        truth += loss_of({**given, **held, **own}, batch.micro_batches)
    total = sum(shares.values())
    error = abs(total - truth) / (abs(truth) or 1.0)
    result = Comparison(error if error == error else float("inf"), bound)
    rows = [ComparisonRow(step, "evaluation", "loss", "all ranks", result.error, result.bound)]
    if not result.ok:
        sentence = causes.told(lambda: of_evaluation(evidence, step, total, truth))
        worst = Worst("loss", step, "evaluation", "all ranks", result.error, result.bound)
        rows += _problem(f"{sentence}: differs: {worst}") if sentence else []
    return rows


def _full_state(evidence: Evidence) -> list[ComparisonRow]:
    states = {rank: record.full_state for rank, record in evidence.ranks.items()}
    by_rank = {rank: state for rank, state in states.items() if state is not None}
    if len(by_rank) < len(states):
        return _some_refuse(by_rank, "have a full_state")
    last = evidence.steps[-1]
    want = {
        row.name: row
        for row in evidence.tensors
        if (row.step, row.point, row.kind) == (last, "after_update", "parameters")
    }
    for rank, gathered in by_rank.items():
        if set(gathered) != set(want):
            odd = sorted(set(gathered) ^ set(want))
            return _problem(f"full_state on rank {rank}: {odd[0]!r} is missing or unexpected")
        for name, row in gathered.items():
            held = want[name]
            if (row.digest, row.shape, row.dtype) != (held.digest, held.shape, held.dtype):
                of = f"full_state on rank {rank} differs from the held value of {name!r}"
                when = of_full_state(evidence, name, row.digest)
                return _problem(f"{of}: {when}" if when else of)
    return []


def _some_refuse(ranks: Collection[int], what: str) -> list[ComparisonRow]:
    return _problem(f"only ranks {sorted(ranks)} {what}; the other ranks refuse") if ranks else []


def _problem(text: str) -> list[ComparisonRow]:
    return [ComparisonRow(problem=text)]
