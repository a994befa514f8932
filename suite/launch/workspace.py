"""Work folders: in memory where there is one, and removed on every path, also after a kill.

Beside them, whether there is room for what cases write there.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardproof.errors import Problem
from shardproof.files import FULL

PREFIX, LOCK, RECORD = "shardproof-", ".lock", ".rec"
#: Bytes and files that a task may have in its work folder at once, if nothing else is known.
TASK_BYTES, TASK_FILES = 16 << 20, 100
#: Bytes that must be free beside these for what outlives a case, such as oracles, to be put there.
ROOMY_BYTES = 256 << 20
#: Bytes that a file may have where this was imported, before any code of a user's ran.
_FILE_BYTES = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
#: Begins what a rank says that had no room because of what it did.
BY_ITSELF = "this process itself "


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


def lacking(
    tasks: int, needed: int = 0, base: Path | None = None, used: Sequence[int] = (0, 0)
) -> Problem | None:
    """Why ``base`` (default: where work folders are made) has no room for so many tasks at once,
    which need so many bytes (0: not known); ``None``: it has, or would have without the bytes and
    files that are ``used``.
    """
    base, needed, files = base or workspace_base(), needed or tasks * TASK_BYTES, tasks * TASK_FILES
    room, limit = os.statvfs(base), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    work = "a case" if tasks == 1 else f"{tasks} cases at once"
    free = room.f_bavail * room.f_frsize + used[0]
    fewer = ", or run fewer cases at once (-j 1)" if tasks > 1 else ""
    if free < needed:
        what = f"{base} has {free >> 20:,} MiB free, but {work} may need {-(-needed >> 20):,} MiB"
        return Problem(what, f"delete files there or enlarge {base} (Docker: --shm-size 1g){fewer}")
    if room.f_files and room.f_favail + used[1] < files:
        what = f"{base} has room for {room.f_favail:,} files, but {work} may need {files:,}"
        return Problem(what, f"delete files there or give {base} more inodes (nr_inodes){fewer}")
    if resource.RLIM_INFINITY != limit < TASK_BYTES:
        what = f"files are limited to {limit / 2**20:.1f} MiB, but a case may write one of"
        return Problem(f"{what} {TASK_BYTES >> 20} MiB", "run `ulimit -f unlimited`")
    return None


def used_in(folder: Path, since: float = 0.0) -> tuple[int, int]:
    """Bytes and files in ``folder`` that a system made: no record, and nothing in work folders of
    others; only what was changed ``since``.
    """
    size = count = 0
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(PREFIX)]
        for name in (*folders, *(name for name in names if RECORD not in name)):
            with suppress(OSError):  # it has gone meanwhile
                about = os.lstat(Path(where, name))
                if about.st_ctime >= since:
                    size, count = size + about.st_blocks * 512, count + 1
    return size, count


def says_full(text: str) -> bool:
    """Whether a message tells that there was no room for a file."""
    return any(os.strerror(number) in text for number in FULL)


def by_itself(folder: Path) -> str:
    """How this process took the room in ``folder``, or kept itself from it; empty: not known."""
    if (limit := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != _FILE_BYTES:
        return f"{BY_ITSELF}limits files to {limit:,} bytes: "
    held = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was that of this list
            about = os.fstat(int(descriptor.name))  # also of a file that has no name any more
            held += about.st_blocks * 512 * (about.st_dev == folder.stat().st_dev)
    return f"{BY_ITSELF}holds files of {held >> 20:,} MiB there: " if held >= TASK_BYTES else ""


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
