"""Workloads that train no model: each calls systems of one kind, and has one check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardproof.case import WorkloadSpec
from shardproof.contract import Collectives, Sampling, Stopping
from shardproof.workloads import calls, epochs, votes
from shardproof.workloads.knobs import Params


@dataclass(frozen=True)
class OfItsOwn:
    """A workload that trains no model.

    ``system``: the kind of :class:`~shardproof.contract.Untrained` that it is for; ``check``: the
    only one; ``lacks``: why another system has no such case; ``resolve``: all its knobs;
    ``has_steps``: fault plans may name them.
    """

    system: type[Any]
    check: str
    lacks: str
    resolve: Callable[[WorkloadSpec], Params]
    has_steps: bool = False


BY_NAME = {
    calls.NAME: OfItsOwn(Collectives, "collectives", "offers no collectives", calls.resolve),
    epochs.NAME: OfItsOwn(Sampling, "data", "is no sampler", epochs.resolve),
    votes.NAME: OfItsOwn(
        Stopping, "stopping", "does not decide when to stop", votes.resolve, has_steps=True
    ),
}
_BY_STRATEGY = {own.system.strategy: own for own in BY_NAME.values()}


def of(spec: Any) -> OfItsOwn | None:
    """What goes with the workload that ``spec`` names; ``None``: it trains a model."""
    return BY_NAME.get(spec.name)


def mismatch(spec: WorkloadSpec, strategy: str) -> str:
    """Why systems of ``strategy`` have no case of the workload ``spec``; empty: they have."""
    asked, own = of(spec), _BY_STRATEGY.get(strategy)
    if asked is own:
        return ""
    if asked is None:
        return str(own.system.not_trained()) if own else ""
    return asked.lacks if own else f"trains models and {asked.lacks}"
