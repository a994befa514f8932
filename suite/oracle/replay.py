"""The oracle of a stale system: its own history of updates, repeated in one process.

Such a system applies gradients that were computed from older parameters, in an order that nobody
chose.  It reports every update (:class:`~shardproof.contract.Event`); repeating them must give the
parameters that it holds at the end.  What a replay cannot see is a history that is a lie but
consistent: the checks of order and version catch only what cannot have happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from shardproof.contract import Event, OptimizerSpec
from shardproof.oracle.optimizers import build_optimizer, set_learning_rate
from shardproof.oracle.truth import Truth
from shardproof.workloads import Workload


def replay(
    workload: Workload, spec: OptimizerSpec, shares: int, events: Sequence[Event]
) -> list[dict[str, Tensor]]:
    """Parameters after 0, 1, ... updates; the global batch is cut into ``shares``.

    Raises:
        ValueError: the events are no history: a gap, a version from the future, a worker that does
            not exist, or a batch that was applied twice.
    """
    build = workload.build_for(0)
    reader, writer = build(), build()
    workload.load(reader)
    workload.load(writer)
    named = {name: p for name, p in writer.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(spec, named)

    def snapshot() -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in writer.named_parameters()}

    versions = [snapshot()]
    used: Counter[tuple[int, int]] = Counter()
    for place, event in enumerate(sorted(events, key=lambda e: e.order)):
        used[event.worker, event.step] += 1
        if (
            event.order != place
            or not 0 <= event.version <= place
            or not 0 <= event.worker < shares
            or used[event.worker, event.step] > 1
        ):
            raise ValueError(f"update {place} cannot have happened: {event}")
        with torch.no_grad():
            for name, parameter in reader.named_parameters():
                parameter.grad = None
                parameter.copy_(versions[event.version][name])
        for micro in workload.batch(event.step, shares)[event.worker].micro_batches:
            build.loss(reader(micro.inputs), micro).backward()
        for name, parameter in reader.named_parameters():
            if name in named:
                named[name].grad = None if parameter.grad is None else parameter.grad.clone()
        set_learning_rate(optimizer, spec, event.step)
        optimizer.step()
        versions.append(snapshot())
    return versions


def truth(
    workload: Workload, spec: OptimizerSpec, steps: int, shares: int, events: Sequence[Event]
) -> Truth:
    """What the judge compares with: ``initial`` and ``final`` parameters, updates, staleness.

    ``events`` are those of all ranks, ``shares`` how many were fed data in each of the ``steps``.
    Without a possible and complete history, ``problem`` says why.
    """
    if len(events) != shares * steps:
        text = f"{len(events)} updates are reported, {shares * steps} batches were fed"
        return Truth(problem=text, updates=len(events))
    try:
        versions = replay(workload, spec, shares, events)
    except ValueError as error:
        return Truth(problem=str(error), updates=len(events))
    stale = max((event.order - event.version for event in events), default=0)
    return Truth(versions[0], final=versions[-1], updates=len(events), stale=stale)
