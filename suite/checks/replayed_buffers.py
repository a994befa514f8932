"""Buffers that one step makes of what a system held before it.

AdamW divides by the root of a second moment: where that is near ``eps``, round-off of a gradient
is a visible part of the update.  So parameters are never compared across trajectories under AdamW,
and buffers follow parameters: one that leaves its bound is made again from the system's own state.
A part of equivalence.

*Cannot see* a buffer behind a stateful dropout, whose draws are not held: such a one stays wrong.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardproof.checks.causes import fits
from shardproof.contract import MicroBatch
from shardproof.evidence.assembled import Evidence
from shardproof.oracle import training
from shardproof.workloads import for_case


def after_step(evidence: Evidence, step: int, replica: int, coordinate: int) -> dict[str, Tensor]:
    """Buffers of copy ``replica``, of ``coordinate``, by the declared rule; empty: it had none."""
    held = fits.state_before(evidence, step)
    rule = evidence.declaration.buffers
    start = {name: copies[min(copies)] for name, copies in held["parameters"].items()}
    for name, copies in held["buffers"].items():
        #     per_rank    each copy goes on from itself
        #     others      all go on from the first copy, which is broadcast, or equal on all ranks
        source = replica if rule == "per_rank" else min(copies)
        if source not in copies:
            return {}
        start[name] = copies[source]
    batches = [share.micro_batches for share in evidence.shares(step)]
    mine = _joined(batches) if rule == "synced" else batches[coordinate]
    return training.buffers_after(for_case(evidence.case), evidence.case.precision, start, mine)


def _joined(batches: list[list[MicroBatch]]) -> list[MicroBatch]:
    """Micro-batches of equal index as one; only their inputs are asked for."""
    return [
        replace(parts[0], inputs=torch.cat([micro.inputs for micro in parts]))
        for parts in zip(*batches, strict=True)
    ]
