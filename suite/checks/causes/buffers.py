"""The content of a wrong buffer: another rule's value, another buffer's, or too many batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from shardproof.checks.causes import fits
from shardproof.contract import BufferRule, MicroBatch
from shardproof.evidence.assembled import Evidence
from shardproof.oracle import training
from shardproof.oracle.asked import follows_of
from shardproof.workloads import for_case

_RULES: tuple[BufferRule, ...] = ("rank0", "per_rank", "synced")


def of_buffers(evidence: Evidence, step: int, name: str, coordinate: int, held: Tensor) -> str:
    """A sentence on the buffer ``name`` of a data coordinate after ``step``."""
    truth = evidence.truth.steps[step].buffers
    rest = [(buffers[name], n) for n, buffers in enumerate(truth) if n != coordinate]
    tries = chain(
        ((value, f"{name!r} is that of data coordinate {number}") for value, number in rest),
        _made_otherwise(evidence, step, name, coordinate),
        (
            (value, f"{name!r} has the values of {other!r}")
            for other, value in truth[coordinate].items()
            if other != name and value.is_floating_point()
        ),
    )
    found = fits.nearest(held, truth[coordinate][name], tries, fits.limit_of(evidence))
    return f"data coordinate {coordinate}: {found}" if found else ""


def _made_otherwise(
    evidence: Evidence, step: int, name: str, coordinate: int
) -> Iterator[tuple[Tensor, str]]:
    case, workload = evidence.case, for_case(evidence.case)
    states = fits.states(evidence, step)
    batches = evidence.shares(step)
    start, batch = states[coordinate], batches[coordinate].micro_batches
    if name in start:
        yield start[name], f"{name!r} still has its value from before step {step}"

    def after(state: dict[str, Tensor], micro_batches: list[MicroBatch]) -> dict[str, Tensor]:
        return training.buffers_after(workload, case.precision, state, micro_batches)

    twice = after(start, [micro for micro in batch for _ in range(2)])
    yield twice[name], f"{name!r} counted every micro-batch twice"
    for other in (n for n in start if n != name and n not in workload.shapes):
        if start[other].shape == start[name].shape and start[other].dtype == start[name].dtype:
            mixed = {**start, name: start[other], other: start[name]}
            yield after(mixed, batch)[name], f"{name!r} and {other!r} were swapped"
    if any(one.step == step for record in evidence.records for one in record.evaluations):
        twice = after(start, [*batch, *batch])
        yield twice[name], f"the evaluation before step {step} moved {name!r}"
    own = evidence.initial("buffers").tensors.get(name, {}) if step == 0 else {}
    if len(own) > coordinate:
        yield own[coordinate], f"{name!r} still has its value from setup"
    built = dict(workload.build_for(coordinate, coordinate)().named_buffers())
    for moved, told in ((built, "built on this rank"), (dict(workload.state()), "given")):
        for number in range(step + 1):
            kept = {n: moved[n] for n in moved if n in built}
            earlier = evidence.shares(number)[coordinate].micro_batches
            moved = after(fits.states(evidence, number)[coordinate] | kept, earlier)
        own_way = f"it follows this rank's own batches from the values {told}"
        yield moved[name], f"{name!r} was never sent: {own_way}"
    rules = follows_of(case, evidence.declaration)
    changing = evidence.members if case.changes_members else ()
    way = training.Way(case.precision, changing, follows=rules)
    size = case.data_coordinates, step + 1
    for rule in (rule for rule in _RULES if rule != evidence.declaration.buffers):
        try:
            run = training.train(workload, case.optimizer, *size, rule, way)
        except training.NotJoined:
            continue
        yield run.steps[step].buffers[coordinate][name], f"{name!r} follows the rule {rule!r}"
    yield torch.zeros_like(start[name]), f"{name!r} is zero"
