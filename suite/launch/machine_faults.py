"""The faults of this machine, not of a system, that break ranks: asked after they broke."""

from __future__ import annotations

from pathlib import Path

from shardproof.backends import Backend
from shardproof.launch import workspace
from shardproof.launch.nodes import Nodes
from shardproof.launch.outcome import RankOutcome
from shardproof.launch.workspace import TASK_BYTES, lacking, used_in


def fault_of_machine(
    cause: RankOutcome | None,
    workdir: Path,
    backend: Backend,
    needed: int = TASK_BYTES,
    since: float | None = None,
) -> str:
    """Why this machine broke what ran in ``workdir``, with the remedy; empty: nothing says so.

    ``cause``: the rank to look at first, if ranks broke; ``needed``: bytes that a sound system may
    leave.  Room that the system took is no fault of the machine: what it left in ``workdir`` and,
    ``since`` the case began (in the clock of files), beside it, where nobody else's case ran.
    """
    # MPI's own files lie in the work folder, too.
    size, files = (0, 0) if backend.mpirun else used_in(workdir)
    if problem := lacking(1, base=workdir):
        if since is not None and not backend.mpirun and _is_alone(workdir):
            size, files = map(sum, zip((size, files), used_in(_top(workdir), since), strict=True))
        if lacking(1, needed, base=workdir, used=(size, files)):
            return str(problem)
    elif cause is not None and workspace.says_full(cause.message) and str(workdir) in cause.message:
        took = size >= needed or files >= workspace.TASK_FILES
        if not (took or workspace.BY_ITSELF in cause.message):  # others may have made room
            return f"the work folder is full: rank {cause.rank}: {cause.message}"
    problem = backend.unreachable() if cause is not None and Nodes.here() is None else None
    return str(problem or "")


def _top(workdir: Path) -> Path:
    """The folder in which work folders of all runs lie; ``workdir`` itself, if it is in none."""
    parents = [workdir, *workdir.parents]
    return next((one.parent for one in parents if one.name.startswith(workspace.PREFIX)), workdir)


def _is_alone(workdir: Path) -> bool:
    """Whether no other case runs in that file system, as far as its work folders tell."""
    top, name = _top(workdir), workdir.name.rstrip("0123456789")
    others = [one for one in workdir.parent.glob(f"{name}*") if one != workdir]
    return top != workdir and len([*top.glob(f"{workspace.PREFIX}*")]) == 1 and not others
