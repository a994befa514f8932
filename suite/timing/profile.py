"""Where a step's time goes: the rank program behind ``shardproof bench --profile``.

Two passes over the same steps.  Without a profiler, three clocks: wall time, CPU time of the rank's
own thread, and CPU time of its other threads (gloo's).  Wall minus own CPU is time in which the
rank *waits*: for communication, or for a core.  With torch's profiler, the own thread's CPU time is
shared out by operator:

    optimizer       inside Optimizer.step
    copies          copy_, zero_, fill_, cat and the like, outside of the optimizer
    communication   calls to process groups, as far as this thread runs them
    compute         every other operator: forward and backward
    python          what remains of the own CPU time: interpreter, hooks, dispatch

The profiler makes operators slower, so their shares are scaled to the CPU time measured without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from suite.timing.blocks import Arm
from suite.timing.plan import Pair

STEPS = 8
WARM = 3
#: In the order of the table; all but the last two add up to the wall time.
PHASES = ("compute", "copies", "optimizer", "communication", "python", "waiting")
_COPIES = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::cat", "aten::_foreach_copy_")
_TRAFFIC = ("c10d::", "gloo:", "record_param_comms", "nccl:")


def profile(pair: Pair, side: str, axes: Mapping[str, int], rank: int) -> dict[str, Any]:
    """Milliseconds of a mean step by phase; ``wall``, and ``threads`` of CPU time beside it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    arm = Arm(pair, side, axes, rank)
    arm.set_up()
    for _ in range(WARM):
        arm.step()
    began = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(STEPS):
        arm.step()
    ended = time.perf_counter(), time.thread_time(), time.process_time()
    wall, own, process = (1e3 * (b - a) / STEPS for a, b in zip(began, ended, strict=True))

    clock = time.thread_time()
    with profiled(activities=[ProfilerActivity.CPU]) as recorded:
        clock = time.thread_time()
        for _ in range(STEPS):
            arm.step()
        clock = 1e3 * (time.thread_time() - clock) / STEPS
    shares = _by_phase(recorded.events())
    arm.close()
    told = {phase: shares.get(phase, 0.0) * own / clock for phase in PHASES}
    told["python"] = max(0.0, own - sum(told.values()))
    told["waiting"] = max(0.0, wall - own)
    return {"rank": rank, **told, "wall": wall, "threads": max(0.0, process - own)}


def _by_phase(events: Any) -> dict[str, float]:
    """Self CPU milliseconds a step by phase, of operators on the thread that ran the steps."""
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
    above = event
    while above is not None:
        if above.name.startswith("Optimizer.step"):
            return "optimizer"
        above = above.cpu_parent
    if event.name.startswith(_TRAFFIC):
        return "communication"
    return "copies" if event.name in _COPIES else "compute"
