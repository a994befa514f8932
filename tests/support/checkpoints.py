"""Training that is saved, loaded and gone on with, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from local_ranks import succeed
from pieces import Rows, assembled, rows
from torch import Tensor

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import OptimizerSpec
from shardproof.impls.reference.checkpoint.checkpointing import Checkpointing
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.engine.engine import Engine
from shardproof.workloads import Workload

ADAMW = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1, clip_norm=1.0, warmup_steps=2)
#: What is compared: with these equal after more steps, nothing was lost.
COMPARED = ("parameters", "optimizer", "buffers")
#: Strategy -> the axis that it takes.
AXES = {
    "naive_ddp": "replicate",
    "ddp": "replicate",
    "zero1": "shard",
    "zero2": "shard",
    "zero3": "shard",
    "fsdp": "shard",
    "tensor": "tensor",
    "pipeline": "pipe",
}


def workload(*traits: str, **knobs: Any) -> Workload:
    """A GPT of width 8 and 2 layers, whose batches 2, 3 and 4 ranks can share."""
    sizes = {"width": 16, "heads": 4, "seq": 8, "layers": 4} | knobs
    return workloads.make(
        WorkloadSpec("charnames_gpt", traits=traits, params=sizes, global_batch=12, micro_batches=1)
    )


#: Format -> what saves it.
FORMATS: dict[str, type[Saver]] = {
    name: getattr(Checkpointing, f"{name}_type") for name in ("full", "sharded", "asynchronous")
}


def make(
    strategy: str,
    work: Workload,
    mesh: Mapping[str, int],
    rank: int,
    spec: OptimizerSpec = ADAMW,
    **options: Any,
) -> Engine:
    """A reference strategy on this rank, set up from the workload's own values."""
    system = registry.load(f"reference/{strategy}")()
    assert isinstance(system, Engine)
    state = work.state() if rank == 0 else None
    system.setup(work.build_for(rank), state, spec, Mesh(mesh), options)
    return system


def train(system: Engine, work: Workload, begin: int, end: int) -> None:
    """Steps ``begin`` to ``end - 1``."""
    mesh = system.mesh
    shares = mesh.size("replicate", "shard")
    share = mesh.coordinate.get("replicate", 0) * mesh.size("shard")
    share += mesh.coordinate.get("shard", 0)
    for step in range(begin, end):
        system.step(work.batch(step, shares)[share], lambda point: None)


def held(system: Engine) -> dict[str, Rows]:
    """Copies of what this rank has."""
    return {kind: rows(system.local_state(kind)) for kind in COMPARED}  # type: ignore[arg-type]


def put_together(ranks: list[dict[str, Rows]]) -> dict[str, dict[str, Tensor]]:
    """Whole tensors by kind; copies must be equal."""
    whole = {}
    for kind in COMPARED:
        state = assembled({rank: found[kind] for rank, found in enumerate(ranks)})
        assert not state.problems, state.problems
        whole[kind] = {name: next(iter(c.values())) for name, c in state.tensors.items()}
        for name, copies in state.tensors.items():
            for copy in copies.values():
                assert torch.equal(copy, whole[kind][name]), f"{kind} {name}: copies differ"
    return whole


def saved(
    root: Path,
    strategy: str,
    mesh: Mapping[str, int],
    steps: int = 2,
    format_: str = "sharded",
    spec: OptimizerSpec = ADAMW,
    work: Workload | None = None,
    before: Callable[[Engine], None] = lambda system: None,
) -> dict[str, dict[str, Tensor]]:
    """Train ``steps`` and save into ``root``; what the ranks held at that moment."""
    work = work or workload()

    def body(rank: int, world: int) -> dict[str, Rows]:
        system = make(strategy, work, mesh, rank, spec, checkpoint={"format": format_})
        before(system)
        train(system, work, 0, steps)
        found = held(system)
        system.save(root, {"data": {"epoch": 1}, "note": ["x", None, 0.1]}).wait()
        system.close()
        return found

    world = 1
    for size in mesh.values():
        world *= size
    return put_together(succeed(body, world))
