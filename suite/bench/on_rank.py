"""The resources of a timed rank: cores of its own, and a clock where the work is done.

Where two ranks share a core for 50 to 100 ms, A/A half-widths double
(results/evidence/bench-calibration.md).

A call on a GPU returns when its work is queued, so the host's clock would time the queueing.
Events on the current stream are stamped by the GPU as it passes them; reading them waits once, at
the end, so that steps follow each other without a gap, as in training.  Work on other streams
counts from when the current stream waits for it, as after every collective that is not async.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardproof.bench.model.physical_cores import by_core


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


def finish(device: str) -> None:
    """Wait until ``device`` has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Marks in the work of ``device``, and the seconds between them."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Here, after all that was asked for so far; returns without waiting for it."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds from each mark to the next, once the last one has been passed."""
        pairs = itertools.pairwise(self._marks)
        if not self._on_gpu:
            return [after - before for before, after in pairs]
        if self._marks:
            self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]
