"""Doors of agents: a socket for each node, there once its agent has imported what ranks need.

Of the standard library alone: the probes in a head, which start at once, wait for them, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

#: Seconds that agents have to come.
START_SECONDS = 120.0


def awaited(doors: Iterable[Path], seconds: float) -> Path | None:
    """Return once all are there: nothing; or the first that has not come within ``seconds``."""
    deadline = time.monotonic() + seconds
    for door in doors:
        while not door.exists():
            if time.monotonic() > deadline:
                return door
            time.sleep(0.05)
    return None


def door(folder: Path, node: int) -> Path:
    """The socket of the agent of ``node``."""
    return folder / f"node{node}"
