"""The turns of a rank for ``step_seconds.py``: the machine, and steps of each system.

Ranks on nodes import this, and have no typer.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.backends import USUAL_PROCESSES
from shardproof.bench.arm import Arm, everybody
from shardproof.bench.collectives import OPERATIONS
from shardproof.bench.model import probes
from shardproof.bench.on_rank import pin
from shardproof.bench.subjects import ProbeRecord, SideRun

WORLD = 2
#: The products and the payload bytes by which ``--machine here`` is measured; products several
#: times, because most of a step is products.
PRODUCTS = [((1, 1024, 1024, 1024), 1)] * 10
PAYLOADS = (2**12, 2**18, 2**22, 2**24)
#: What a rank measures in each turn of a system: the machine, and seconds of its steps.
Turns = list[tuple[ProbeRecord, list[float]]]


def measure(runs: Sequence[SideRun], rounds: int, rank: int) -> Turns:
    """The measurements of ``rank``: in each round a turn of each system."""
    pin(rank, WORLD, threads=False)
    control, turns = everybody(USUAL_PROCESSES, WORLD), Turns()
    arms = [Arm(run, rank) for run in runs]
    for arm in arms:  # after all groups are made
        arm.set_up().seconds(probes.WARM)
    prober = probes.Probes(control, dict.fromkeys(OPERATIONS, PAYLOADS), PRODUCTS)
    prober.sweep()
    for arm in arms * rounds:
        prober.forget()
        prober.sweep()
        control.barrier()
        steps = arm.seconds(probes.STEPS)
        control.barrier()
        prober.sweep()
        turns.append((prober.record(), steps))
    for arm in arms:
        arm.close()
    return turns
