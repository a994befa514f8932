"""Calls that the judge's own loop does not make yet: evaluate, save, load, load_pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardproof import registry, tensor_bytes
from shardproof.case import Case
from shardproof.cases.leader import CaseTask
from shardproof.comm import Mesh
from shardproof.contract import Piece
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import Forked, root_cause
from shardproof.oracle import training
from shardproof.workloads import Workload, make


def conduct(task: CaseTask) -> dict[str, Any]:
    """Run :func:`_program` on every rank; what its ranks found stands under ``result``."""
    case, workdir = task.case, task.workdir
    workdir.mkdir(parents=True)
    workload = make(case.workload, case.dtype, case.lane)
    folder = workdir / "checkpoint"
    folder.mkdir()

    def program(rank: int, world: int) -> dict[str, Any]:
        return _program(case, workload, rank, folder)

    launch = RankLaunch(case.backend, case.world, program, workdir, case.deadline)
    outcomes = Forked().run(launch)
    cause = root_cause(outcomes)
    result: dict[str, Any] = {"id": case.id, "error": cause and cause.message}
    if cause is None:
        micro_batches = workload.batch(0, 1)[0].micro_batches
        result["truth"] = training.evaluator(workload)(workload.state(), micro_batches)
        result["ranks"] = [tensor_bytes.load(o.record) for o in outcomes if o.record]
    return {"result": result}


def _program(case: Case, workload: Workload, rank: int, folder: Path) -> dict[str, Any]:
    mesh = Mesh(case.mesh)
    system = registry.load(case.implementation)()
    build = workload.build_for(rank)
    system.setup(build, workload.state(), case.optimizer, mesh, case.options)
    first, second = workload.batch(0, 1)[0], workload.batch(1, 1)[0]

    def parameters() -> list[Piece]:
        held = system.local_state("parameters")
        return [Piece(p.name, p.global_shape, p.tensor.clone(), p.slices) for p in held]

    def same(left: list[Piece], right: list[Piece]) -> bool:
        return all(torch.equal(a.tensor, b.tensor) for a, b in zip(left, right, strict=True))

    def evaluate() -> float | None:
        loss = system.evaluate(first)
        return None if loss is None else float(loss)

    initial, untrained = parameters(), evaluate()
    changed_by_evaluation = not same(initial, parameters())
    system.step(first, lambda point: None)
    system.save(folder, {"step": 1})
    system.step(second, lambda point: None)
    straight = parameters()
    extra = system.load(folder)
    system.step(second, lambda point: None)
    resumed = same(straight, parameters())
    trained = evaluate()
    system.load_pieces("parameters", initial)
    forced = evaluate()
    system.drain()
    system.close()
    return {
        "untrained": untrained,
        "trained": trained,
        "forced": forced,
        "changed_by_evaluation": changed_by_evaluation,
        "extra": dict(extra),
        "resumed": resumed,
    }
