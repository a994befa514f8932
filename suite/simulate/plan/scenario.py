"""The scenario file that checks a plan on its cluster, and the command that runs it there.

A case compares with training on one process, so the file keeps the plan's mesh, options and number
of layers a stage, and takes a small model whose heads, widths and positions its axes can divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from shardproof.simulate.plan.candidates import Candidate, Job, combined

#: Elements of a head of the small model, and its shortest sample.
_HEAD, _SEQ = 8, 32


def scenario(job: Job, plan: Candidate, name: str) -> str:
    """The file, as YAML."""
    stages, t = plan.parts("layers") * plan.chunks, plan.parts("widths")
    ways = max(4, t * plan.parts("positions"))
    shares = job.gpus // (plan.parts("layers") * t * plan.parts("positions"))
    # Few micro-batches fill a pipeline; a schedule may ask for multiples of its ranks.
    micro_batches = min(plan.micro_batches, max(2, 2 * plan.parts("layers")))
    micro_batches -= (micro_batches - plan.micro_batches) % plan.parts("layers")
    options = {k: v for k, v in plan.options.items() if k != "precision"}
    precision: Mapping[str, Any] = plan.options.get("precision", {})
    found: dict[str, Any] = {
        "name": name,
        "about": f"the plan for {job.shape.name} on {job.gpus} GPUs, with a small model",
        "sees": ["a mesh or an option of the plan that does not train as one process does"],
        "workload": {
            "name": combined()["scenario"]["workload"],
            "global_batch": shares * max(1, micro_batches),
            "micro_batches": max(1, micro_batches),
            "params": {
                "layers": max(2, stages),
                "heads": ways,
                "width": ways * _HEAD,
                "vocab": 128 * -(-ways // 128),
                "seq": max(_SEQ, 2 * plan.parts("positions")),
            },
        },
        "matrix": {
            "implementation": {"name": plan.implementation, "label": "plan", "options": options},
            "backend": combined()["scenario"]["backend"],
            "mesh": dict(plan.mesh),
            "optimizer": "adamw",
        },
        "checks": ["traffic"],
        "steps": 2,
    }
    if precision:
        found["matrix"]["lane"] = "working_precision"
        found["matrix"]["precision"] = {"label": job.accounting, **precision}
    return yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=100)


def command(job: Job, file: str) -> str:
    """The command that runs ``file``, once on every node."""
    nodes, each = -(-job.gpus // job.node), min(job.node, job.gpus)
    several = (
        f"--nnodes {nodes} --node-rank N --master-addr HEAD " if nodes > 1 else "--standalone "
    )
    return (
        f"torchrun {several}--nproc-per-node {each} "
        f"-m shardproof.cluster.torchrun {file} --records FOLDER"
    )
