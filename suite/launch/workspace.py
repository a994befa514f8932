"""Work folders: in memory where there is one, and removed on every path, also after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX, LOCK = "shardproof-", ".lock"


class Workspace:
    """A temporary folder; leaving the ``with`` block removes it.

    A process that is killed cannot remove its own folder.  The next one that makes a folder does:
    the lock is then free.
    """

    def __enter__(self) -> Path:
        base = workspace_base()
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
