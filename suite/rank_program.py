"""What one rank does in one case: set the implementation up, drive its steps, record what it holds.

Runs inside a rank (a thread or a process).  Needs only torch and the contract, so that it also works
under torchrun in a slim image.  Observation points copy the rank's pieces; traffic inside them is
not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from suite import registry
from suite.case import DATA_AXES, Case
from suite.comm import Mesh
from suite.contract import Batch, Build, Capabilities, Implementation, MicroBatch, Piece, Point
from suite.ledgers import phases, traffic
from suite.workloads import Workload


class NotObserved(RuntimeError):
    """The implementation ended a step without the observations that the contract asks for."""


def run_rank(case: Case, workload: Workload, rank: int) -> dict[str, Any]:
    """Run ``case`` on this rank inside the default process group; returns the rank's record."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    implementation_class = registry.load(case.implementation)
    capabilities = implementation_class.capabilities(case.options)
    mesh = Mesh(case.mesh, joint=(DATA_AXES,) if all(a in case.mesh for a in DATA_AXES) else ())
    lends_state = capabilities.initial_state == "everywhere" or rank == 0
    implementation = implementation_class()
    log = phases.current()
    record: dict[str, Any] = {
        "rank": rank,
        "coordinate": mesh.coordinate,
        "capabilities": describe(implementation_class, capabilities),
        "steps": [],
    }
    build = _WatchedBuild(workload.build_for(rank))
    implementation.setup(
        build, workload.state() if lends_state else None, case.optimizer, mesh, case.options
    )
    record["initial"] = {
        kind: _pieces(implementation.local_state(kind)) for kind in ("parameters", "buffers")
    }
    coordinate = _data_index(case, mesh)
    for step in range(case.steps):
        batch = workload.batch(step, case.data_coordinates)[coordinate]
        record["steps"].append(_step(case, implementation, batch, log))
    implementation.drain()
    implementation.close()
    ledger = traffic.current()
    record["traffic"] = ledger.to_dicts() if ledger else []
    record["events"] = [list(event) for event in log.events] if log else []
    return record


def describe(cls: type[Implementation], capabilities: Capabilities) -> dict[str, Any]:
    """Capabilities as plain data, with the claimed strategy."""
    fields = dataclasses.asdict(capabilities)
    fields["features"] = sorted(capabilities.features)
    fields["declines"] = dict(capabilities.declines)
    return {"strategy": cls.strategy, **fields}


def _step(
    case: Case, implementation: Implementation, batch: Batch, log: phases.RankLog | None
) -> dict[str, Any]:
    ledger = traffic.current()
    observed: dict[str, dict[str, Any]] = {}

    def observe(point: Point) -> None:
        if point in observed:
            raise NotObserved(f"step {batch.step}: {point!r} was observed twice")
        with log.observe(point) if log else nullcontext():
            if point == "after_update":
                kinds = ("parameters", "optimizer", "buffers")
            else:
                kinds = ("gradients",)
            observed[point] = {kind: _pieces(implementation.local_state(kind)) for kind in kinds}

    first_call = len(ledger.calls) if ledger else 0
    first_event = log.now if log else 0
    with log.step(batch.step) if log else nullcontext():
        result = implementation.step(batch, observe)
    for point in ("gradients_final", "after_update"):
        if point not in observed:
            raise NotObserved(f"step {batch.step}: {point!r} was never observed")
    return {
        "step": batch.step,
        "loss": _number(result.loss),
        "norm": None if result.norm is None else _number(result.norm),
        "metrics": dict(result.metrics),
        "observed": observed,
        "calls": [first_call, len(ledger.calls) if ledger else 0],
        "events": [first_event, log.now if log else 0],
    }


def _number(value: Tensor | float) -> float:
    number = float(value)
    return number if math.isfinite(number) else math.nan


def _pieces(pieces: list[Piece]) -> list[dict[str, Any]]:
    """Copies, so that what the implementation does next cannot change what was seen."""
    return [
        {
            "name": piece.name,
            "global_shape": list(piece.global_shape),
            "slices": None if piece.slices is None else [list(s) for s in piece.slices],
            "flat_range": None if piece.flat_range is None else list(piece.flat_range),
            "replica": piece.replica,
            "tensor": piece.tensor.detach().cpu().clone(memory_format=torch.contiguous_format),
        }
        for piece in pieces
    ]


def _data_index(case: Case, mesh: Mesh) -> int:
    index = 0
    for axis, size in case.mesh.items():
        if axis in DATA_AXES:
            index = index * size + mesh.coordinate[axis]
    return index


class _WatchedBuild:
    """The workload's build, with the suite's program-order hooks on what it makes."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self.units = build.units

    def __call__(self, device: str = "cpu") -> nn.Module:
        module = self._build(device)
        phases.watch(module, self.units)
        return module

    def loss(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        return self._build.loss(outputs, micro)


def facts_for_judge(workload: Workload) -> Mapping[str, Any]:
    """What the checks need to know of the workload."""
    return {
        "zero_gradient": workload.zero_gradient,
        "parameter_names": list(workload.parameter_names),
        "trainable_names": list(workload.trainable_names),
        "unused_possible": workload.unused_possible,
        "traits": list(workload.spec.traits),
    }
