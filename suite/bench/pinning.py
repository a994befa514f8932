"""A core for every rank while the clock runs: where two share one for 50 to 100 ms, A/A half-widths
double (results/evidence/bench-calibration.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardproof.launch.process_control import by_core


def share(cores: Sequence[int], rank: int, world: int) -> list[int]:
    """The cores of ``rank``: neighbours, as many as everybody has; none where ranks are more."""
    each = len(cores) // world
    return list(cores[rank * each : (rank + 1) * each])


def pin(rank: int, world: int, threads: bool) -> list[int]:
    """Keep this rank to its :func:`share` of the cores that it may use, which is returned.

    Where there is a physical core for every rank, the second threads of cores stay idle: numbered
    as they are, a neighbour's second thread may be the first one of another rank's core.  A rank
    that is a process takes the threads that it has started along (gloo's); of ranks that are
    ``threads`` of one process each pins itself alone.
    """
    physical = [threads_of[0] for threads_of in by_core() or ()]
    usable = physical if len(physical) >= world else sorted(os.sched_getaffinity(0))
    own = share(usable, rank, world)
    if not own:
        return own
    tasks = ["0"] if threads else [path.name for path in Path("/proc/self/task").iterdir()]
    for task in tasks:
        try:
            os.sched_setaffinity(int(task), own)
        except ProcessLookupError:
            continue  # a thread that has ended meanwhile needs no core
    return own
