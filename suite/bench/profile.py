"""Where a step's time goes: the rank program behind ``shardproof bench --profile``.

Two passes over the same steps.  Under torch's profiler the time of the rank's own thread is shared
out by operator:

    communication   calls to process groups, as far as this thread runs them, waits inside included
    optimizer       inside Optimizer.step
    copies          copy_, zero_, fill_, cat and the like
    compute         every other operator: forward and backward
    other           the rest of the step: Python, hooks, and waits outside of operators

The profiler makes steps slower, so shares are scaled to the wall time of the other pass, which also
reads CPU clocks: ``blocked`` and ``threads`` (docs/speed.md).
"""

from __future__ import annotations

import time
from typing import Any

from shardproof.bench.arm import Arm
from shardproof.bench.launches import SideRun

STEPS = 8
WARM = 3
#: In the order of the table; they add up to ``wall``.
PHASES = ("compute", "copies", "optimizer", "communication", "other")
_COPIES = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::cat", "aten::_foreach_copy_")
_TRAFFIC = ("c10d::", "gloo:", "record_param_comms", "nccl:")


def profile(run: SideRun, rank: int) -> dict[str, float]:
    """Milliseconds of a mean step by phase, their sum ``wall``, ``blocked`` and ``threads``."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    arm = Arm(run, rank).set_up()
    arm.seconds(WARM)
    began = time.perf_counter(), time.thread_time(), time.process_time()
    arm.seconds(STEPS)
    ended = time.perf_counter(), time.thread_time(), time.process_time()
    wall, own, process = (1e3 * (b - a) / STEPS for a, b in zip(began, ended, strict=True))

    with profiled(activities=[ProfilerActivity.CPU]) as recorded:
        clock = 1e3 * sum(arm.seconds(STEPS)) / STEPS
    shares = _by_phase(recorded.events())
    arm.close()
    phases = {phase: shares.get(phase, 0.0) * wall / clock for phase in PHASES}
    phases["other"] = max(0.0, wall - sum(phases.values()))
    beside = {"blocked": max(0.0, wall - own), "threads": max(0.0, process - own)}
    return {**phases, "wall": wall, **beside}


def _by_phase(events: Any) -> dict[str, float]:
    """Own milliseconds a step by phase, of operators on the thread that ran the steps."""
    main = max(
        (event.thread for event in events if event.name.startswith("Optimizer.step")), default=None
    )
    shares: dict[str, float] = {}
    for event in events:
        if main is not None and event.thread != main:
            continue
        if event.name.startswith(("Optimizer.", "autograd::", "DistributedDataParallel")):
            continue  # a frame around operators: its own time is Python's
        shares[_phase(event)] = shares.get(_phase(event), 0.0) + event.self_cpu_time_total / 1e3
    return {phase: total / STEPS for phase, total in shares.items()}


def _phase(event: Any) -> str:
    if event.name.startswith(_TRAFFIC):
        return "communication"
    above = event
    while above is not None:
        if above.name.startswith("Optimizer.step"):
            return "optimizer"
        above = above.cpu_parent
    return "copies" if event.name in _COPIES else "compute"
