"""The physical cores of this machine, on which times are taken."""

from __future__ import annotations

import os
from pathlib import Path

from shardproof.launch.process_control import cores


def by_core() -> list[list[int]] | None:
    """The cores that this process may run on, by physical core: two threads of a core are one item.

    ``None``: the kernel does not tell.
    """
    threads_of: dict[str, list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        place = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings")
        try:
            threads_of.setdefault(place.read_text().strip(), []).append(number)
        except OSError:
            return None
    return list(threads_of.values())


def physical_cores() -> int:
    """Physical cores among those that this process may use: two threads of one core are one."""
    per_core = by_core()
    if per_core is not None:
        return len(per_core)
    import psutil  # what it counts, cut to what may be used

    return min(cores(), psutil.cpu_count(logical=False) or cores())
