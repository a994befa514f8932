"""Training under PyTorch's own systems that is saved, loaded and gone on with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checkpoints
from checkpoints import ADAMW, put_together
from local_ranks import succeed
from pieces import Rows
from torch import Tensor

from shardproof import registry, workloads
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import OptimizerSpec
from shardproof.workloads import Workload

#: A system: its name after ``pytorch/``, the mesh, options.
Chosen = tuple[str, Mapping[str, int], Mapping[str, Any]]
#: What the tests give to ``save``.
EXTRA = {"data": {"epoch": 1}, "note": ["\u00e9", None, 0.1]}


def workload(
    *traits: str, name: str = "charnames_gpt", dtype: str = "float64", **knobs: Any
) -> Workload:
    """As the tests of reference checkpoints, in four micro-batches, as pipelines want them."""
    sizes = {"width": 16, "heads": 4, "seq": 8, "layers": 4} if name == "charnames_gpt" else {}
    spec = WorkloadSpec(name, traits=traits, params=sizes | knobs, global_batch=16, micro_batches=4)
    return workloads.make(spec, dtype)


def make(chosen: Chosen, work: Workload, rank: int, spec: OptimizerSpec = ADAMW) -> Any:
    """A system on this rank, set up from the workload's own values."""
    name, axes, options = chosen
    kind = registry.load(f"pytorch/{name}")
    system: Any = kind()
    gets = rank == 0 or kind.capabilities(options).initial_state == "everywhere"
    joint = [("replicate", "shard")] if {"replicate", "shard"} <= set(axes) else []
    mesh = Mesh(axes, joint)
    system.setup(work.build_for(rank), work.state() if gets else None, spec, mesh, options)
    return system


def world(chosen: Chosen) -> int:
    """Its ranks."""
    return math.prod(chosen[1].values())


def with_format(chosen: Chosen, form: str, keep: int = 2) -> Chosen:
    """``chosen``, which saves as ``form``."""
    name, axes, options = chosen
    return name, axes, {**options, "checkpoint": {"format": form, "keep": keep}}


def saved(
    root: Path, chosen: Chosen, work: Workload, spec: OptimizerSpec = ADAMW, steps: int = 2
) -> dict[str, dict[str, Tensor]]:
    """Train ``steps`` and save into ``root``; what the ranks held at that moment."""

    def body(rank: int, _: int) -> dict[str, Rows]:
        system = make(chosen, work, rank, spec)
        checkpoints.train(system, work, 0, steps)
        held = checkpoints.held(system)
        pending = system.save(root, EXTRA)
        if pending is not None:
            pending.wait()
        system.close()
        return held

    return put_together(succeed(body, world(chosen)))


def loaded(
    root: Path, chosen: Chosen, work: Workload, spec: OptimizerSpec = ADAMW, until: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Load from ``root`` into fresh ranks and train on ``until`` that step; what they hold then."""

    def body(rank: int, _: int) -> dict[str, Rows]:
        system = make(chosen, work, rank, spec)
        assert system.load(root) == EXTRA
        checkpoints.train(system, work, system.steps_done, until)
        return checkpoints.held(system)

    return put_together(succeed(body, world(chosen)))


def trained(
    chosen: Chosen, work: Workload, until: int, spec: OptimizerSpec = ADAMW
) -> dict[str, dict[str, Tensor]]:
    """What ranks hold that never stopped."""

    def body(rank: int, _: int) -> dict[str, Rows]:
        system = make(chosen, work, rank, spec)
        checkpoints.train(system, work, 0, until)
        return checkpoints.held(system)

    return put_together(succeed(body, world(chosen)))


def assert_equal(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    """Bit for bit, by name."""
    for kind, tensors in one.items():
        assert tensors.keys() == other[kind].keys()
        wrong = [name for name, tensor in tensors.items() if not tensor.equal(other[kind][name])]
        assert not wrong, f"{kind}: {wrong}"
