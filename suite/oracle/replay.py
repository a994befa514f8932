"""The oracle of a stale system: its own history of updates, repeated in one process.

Such a system applies gradients that were computed from older parameters, in an order that nobody
chose.  It reports every update (:class:`~shardproof.contract.Event`); repeating them must give the
parameters that it holds at the end.  Where several servers own some parameters each, every one has
a history, and a gradient is of as many versions as there are servers.

What a replay cannot see is a history that is a lie but consistent: the checks of order and version
catch only what cannot have happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shardproof.contract import Event, OptimizerSpec
from shardproof.oracle.optimizers import Named, build_optimizer, set_learning_rate
from shardproof.oracle.training import copies
from shardproof.oracle.truth import Truth
from shardproof.workloads import Workload

Tensors = dict[str, Tensor]
#: The n-th update: the gradients that it adds up, one of each worker.
Updates = list[list[Event]]


class _Owner:
    """One server's parameters (``keys``; empty: all), and its updates in order."""

    def __init__(
        self, spec: OptimizerSpec, named: Named, updates: Updates, by_worker: bool
    ) -> None:
        self.spec, self.named, self.updates, self.by_worker = spec, named, updates, by_worker
        #: One for all, or one of each worker.
        self.optimizers: dict[int | None, torch.optim.Optimizer] = {}
        self.versions = [copies(named)]
        #: Worker and step -> the version that its gradient is of.
        self.reads = {(e.worker, e.step): e.version for update in updates for e in update}

    def apply(self, gradients: Sequence[Tensors], last: Event) -> None:
        whose = last.worker if self.by_worker else None
        if whose not in self.optimizers:
            self.optimizers[whose] = build_optimizer(self.spec, self.named)
        for name, parameter in self.named.items():
            parts = [part[name] for part in gradients if name in part]
            parameter.grad = sum(parts[1:], parts[0].clone()) if parts else None
        set_learning_rate(self.optimizers[whose], self.spec, last.step)
        self.optimizers[whose].step()
        self.versions.append(copies(self.named))


def replay(
    workload: Workload,
    spec: OptimizerSpec,
    shares: int,
    events: Sequence[Event],
    by_worker: bool = False,
) -> list[Tensors]:
    """Parameters after 0, 1, ... updates; the global batch is cut into ``shares``; optimizer state
    is that of each worker, where ``by_worker``.

    Raises:
        ValueError: the events are no history: a gap, a version from the future, a worker that does
            not exist, a batch that was applied twice, or several workers in an update by state that
            each has of its own.
    """
    models = _Models(workload, shares)
    histories = _histories(events, shares, by_worker)
    count = Counter(name for keys in histories for name in keys or models.named)
    odd = [n for n in {**models.named, **count} if count[n] != 1 or n not in models.named]
    if histories and odd:
        raise ValueError(f"parameter {odd[0]!r} is updated by {count[odd[0]]} servers, expected 1")
    owners = [
        _Owner(spec, {n: models.named[n] for n in keys or models.named}, updates, by_worker)
        for keys, updates in histories.items()
    ]
    versions, known = [models.snapshot()], dict[tuple[int, int], Tensors]()
    while pending := [owner for owner in owners if len(owner.versions) <= len(owner.updates)]:
        moved = False
        for owner in pending:
            update = owner.updates[len(owner.versions) - 1]
            for event in update:
                key = event.worker, event.step
                if key not in known and (made := models.gradients(*key, owners)) is not None:
                    known[key] = made
            if all((event.worker, event.step) in known for event in update):
                owner.apply([known[e.worker, e.step] for e in update], update[-1])
                versions.append(models.snapshot())
                moved = True
        if not moved:
            raise ValueError("deadlock: every server waits for an update of another server")
    return versions


class _Models:
    """The model that is updated, and one of each worker, on which its gradients are computed.

    A worker has its own because nobody else advances its stateful dropout.
    """

    def __init__(self, workload: Workload, shares: int) -> None:
        self.workload, self.shares = workload, shares
        self.builds = [workload.build_for(0, worker) for worker in range(shares)]
        *self.readers, self.writer = [build() for build in (*self.builds, self.builds[0])]
        for module in (*self.readers, self.writer):
            workload.load(module)
        self.named = {n: p for n, p in self.writer.named_parameters() if p.requires_grad}

    def snapshot(self) -> Tensors:
        return copies(dict(self.writer.named_parameters()))

    def gradients(self, worker: int, step: int, owners: Sequence[_Owner]) -> Tensors | None:
        """Of the versions that were read; ``None``: one of them does not exist yet."""
        for owner in owners:
            if (version := owner.reads.get((worker, step))) is None:
                message = (
                    f"worker {worker} sent its gradients of step {step} to only some of the servers"
                )
                raise ValueError(message)
            if version >= len(owner.versions):
                return None
        reader = self.readers[worker]
        with torch.no_grad():
            reader.zero_grad(set_to_none=True)
            held = dict(reader.named_parameters())
            for owner in owners:
                for name, value in owner.versions[owner.reads[worker, step]].items():
                    held[name].copy_(value)
        for micro in self.workload.batch(step, self.shares)[worker].micro_batches:
            self.builds[worker].loss(reader(micro.inputs), micro).backward()
        return {n: p.grad.clone() for n, p in reader.named_parameters() if p.grad is not None}


def _histories(
    events: Sequence[Event], shares: int, by_worker: bool
) -> dict[tuple[str, ...], Updates]:
    """The updates of each server, in order, by the parameters that it owns."""
    histories: dict[tuple[str, ...], Updates] = {}
    applied = Counter((event.keys, event.worker, event.step) for event in events)
    for event in sorted(events, key=lambda e: (e.order, e.worker)):
        updates = histories.setdefault(event.keys, [])
        is_new = applied[event.keys, event.worker, event.step] == 1
        # After these updates it is the next, or a part of the last, whose gradients are all of one
        # step, by whose rate they are applied.
        place = len(updates)
        joins = place and event.order == place - 1 and event.step == updates[-1][0].step
        is_possible = 0 <= event.version <= event.order and 0 <= event.worker < shares
        if not is_possible or not is_new or not (event.order == place or joins):
            raise ValueError(f"update {min(event.order, place)} is impossible: {event}")
        if event.order == place:
            updates.append([])
        updates[-1].append(event)
        if by_worker and len(updates[-1]) > 1:
            what = f"update {event.order} combines gradients of several workers"
            raise ValueError(f"{what}, but each worker has its own optimizer state")
    return histories


def behind(events: Sequence[Event]) -> int:
    """How many steps the stalest gradient was behind: of step t, it has not seen all gradients of
    the last so many steps before t.
    """
    by_keys, by_order = defaultdict[tuple[str, ...], list[Event]](list), attrgetter("order")
    for event in events:
        by_keys[event.keys].append(event)
    most = 0
    for own in by_keys.values():
        given = Counter(event.worker for event in own)
        seen, first = defaultdict[int, set[int]](set), Counter[int]()  # the first step not seen
        slowest = [0]  # version -> steps that it has of every worker that is not done, or dead
        for _, update in groupby(sorted(own, key=by_order), key=by_order):
            for event in update:
                seen[event.worker].add(event.step)
                while first[event.worker] in seen[event.worker]:
                    first[event.worker] += 1
            going = [first[worker] for worker in given if len(seen[worker]) < given[worker]]
            slowest.append(min(going, default=max(first.values(), default=0)))
        most = max(most, *(event.step - slowest[event.version] for event in own))
    return most


def truth(
    workload: Workload,
    spec: OptimizerSpec,
    fed: Sequence[int],
    events: Sequence[Event],
    by_worker: bool = False,
) -> Truth:
    """The reference of the judge: ``initial`` and ``final`` parameters, updates, staleness.

    ``events`` are those of all ranks, ``fed`` of how many steps every worker gave gradients;
    ``by_worker``: optimizer state is each worker's own.
    Without a possible and complete history, ``problem`` says why.
    """
    servers = {event.keys for event in events} or {()}
    if len(events) != sum(fed) * len(servers):
        text = f"the system reported {len(events)} updates, expected {sum(fed) * len(servers)}"
        return Truth(problem=text, updates=len(events))
    told = {(event.worker, event.step) for event in events}
    due = ((worker, step) for worker, steps in enumerate(fed) for step in range(steps))
    for worker, step in (each for each in due if each not in told):
        text = f"no reported update uses the gradient of worker {worker} in step {step}"
        return Truth(problem=text, updates=len(events))
    try:
        versions = replay(workload, spec, len(fed), events, by_worker)
    except ValueError as error:
        return Truth(problem=str(error), updates=len(events))
    stale = max((event.order - event.version for event in events), default=0)
    found = Truth(versions[0], final=versions[-1], updates=len(events), stale=stale)
    found.behind = behind(events)
    return found


def fed(options: Mapping[str, Any], steps: int, workers: int) -> list[int]:
    """Of how many steps every worker gives gradients: all, but one that the option ``dies`` names,
    which makes so many pulls and pushes.
    """
    given = [steps] * workers
    match options.get("dies"):
        case {"worker": int(worker), "turns": int(turns)} if 0 <= worker < workers:
            given[worker] = min(steps, turns // 2)
    return given
