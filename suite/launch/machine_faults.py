"""What of this machine, not of a system, breaks ranks: asked after they broke."""

from __future__ import annotations

import os
from pathlib import Path

from shardproof.backends import Backend
from shardproof.files import FULL
from shardproof.launch.nodes import Nodes
from shardproof.launch.outcome import RankOutcome
from shardproof.launch.workspace import lacking


def fault_of_machine(cause: RankOutcome | None, workdir: Path, backend: Backend) -> str:
    """Why this machine broke what ran in ``workdir``, with the remedy; empty: nothing says so.

    ``cause``: the rank to look at first, if ranks broke.
    """
    if problem := lacking(1, base=workdir):
        return str(problem)
    if cause is None:
        return ""
    full = any(os.strerror(number) in cause.message for number in FULL)
    if full and str(workdir) in cause.message:  # others may have made room meanwhile
        return f"there was no room in the work folder: rank {cause.rank}: {cause.message}"
    problem = backend.unreachable() if Nodes.here() is None else None
    return str(problem or "")
