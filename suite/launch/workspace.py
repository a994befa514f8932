"""Work folders: in memory where there is one, and removed on every path, also after a kill.

Beside them, whether there is room for what cases write there.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import tempfile
from pathlib import Path

from shardproof.errors import Problem

PREFIX, LOCK = "shardproof-", ".lock"
#: Bytes and files that a task may have in its work folder at once, if nothing else is known.
TASK_BYTES, TASK_FILES = 16 << 20, 100
#: Bytes that must be free beside these for what outlives a case, such as oracles, to be put there.
ROOMY_BYTES = 256 << 20


class Workspace:
    """A temporary folder; leaving the ``with`` block removes it.

    A process that is killed cannot remove its own folder.  The next one that makes a folder does:
    the lock is then free.
    """

    def __init__(self, base: Path | None = None) -> None:
        self._base = base

    def __enter__(self) -> Path:
        base = self._base or workspace_base()
        sweep(base)
        self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        # Locked before it bears its name: another process's sweep must never find it free.
        fresh = self._path / f"{LOCK}.fresh"
        self._lock = fresh.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self._path / LOCK)
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def workspace_base() -> Path:
    """Where work folders are made: in memory, if that can be written."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def lacking(tasks: int, needed: int = 0, base: Path | None = None) -> Problem | None:
    """Why ``base`` (default: where work folders are made) has no room for so many tasks at once,
    which need so many bytes (0: not known); ``None``: it has.
    """
    base, needed, files = base or workspace_base(), needed or tasks * TASK_BYTES, tasks * TASK_FILES
    room, limit = os.statvfs(base), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    free, work = room.f_bavail * room.f_frsize, "a case" if tasks == 1 else f"{tasks} cases at once"
    fewer = ", or run fewer at once (-j 1)" if tasks > 1 else ""
    if free < needed:
        what = f"{base} has {free >> 20:,} MiB free, and {work} may need {-(-needed >> 20):,} MiB"
        return Problem(what, f"make room, or enlarge it (in containers: --shm-size 1g){fewer}")
    if room.f_files and room.f_favail < files:
        what = f"{base} takes {room.f_favail:,} more files, and {work} may need {files:,}"
        return Problem(what, f"remove files, or mount it with more inodes (nr_inodes){fewer}")
    if resource.RLIM_INFINITY != limit < TASK_BYTES:
        what = f"files are limited to {limit / 2**20:.1f} MiB, and one of a case may have"
        return Problem(f"{what} {TASK_BYTES >> 20} MiB", "`ulimit -f unlimited`")
    return None


def sweep(base: Path) -> list[Path]:
    """Remove work folders whose process is dead; returns them."""
    removed = []
    for lock in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            # Without waiting, should it be a pipe.
            with os.fdopen(os.open(lock, os.O_RDONLY | os.O_NONBLOCK)) as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # in use, or another user's
        removed.append(lock.parent)
    return removed
