"""A lock for a root: one job at a time saves into it, from the start of a save to its commit.

    take      lock.json with O_EXCL: host, process, when that started, and a word of its own
    check     right before the manifest gets its name: is the word in the file still one's own?
    release   the file goes

A job that dies in a save leaves its lock.  Whether it is dead can be asked on its own machine only:
no process of that number, or one that started at another time, or before the machine did.  Then
the next job takes over.  A lock of another machine (or container) is refused, and a person decides.
Whoever lost the lock to another job, because it was taken for dead, is refused at its commit.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.files import FileLayer
from shardproof.impls.reference.checkpoint.reading.guarded_json import Fields, parse
from shardproof.impls.reference.checkpoint.reading.safe_files import read_small

NAME = "lock.json"
#: Seconds in which who made the file has written into it.
_WRITTEN = 1.0
_ATTEMPTS = 20


class Owner(NamedTuple):
    """The owner of a lock: a process, and a word that distinguishes savers in one process."""

    host: str
    boot: str
    pid: int
    started: int
    word: str


class Lock:
    """The lock of the folder ``root``."""

    def __init__(self, layer: FileLayer, root: Path) -> None:
        self.layer, self.path = layer, root / NAME
        pid = os.getpid()
        self.own = Owner(*here(), pid, started(pid), secrets.token_hex(8))

    def take(self) -> None:
        """Create the lock file.

        :raises CheckpointError: another job saves here, or may do so.
        """
        for _ in range(_ATTEMPTS):
            try:
                self._make()
                return
            except FileExistsError:
                self._remove_if_dead()
        what = "other jobs took this lock again and again"
        raise CheckpointError(self.path, what, "let only one job save into this folder")

    def require(self) -> None:
        """:raises CheckpointError: another job took the lock."""
        if self._owner() != self.own:
            what = (
                "this lock no longer belongs to this job: another job assumed that this job had "
                "ended, or removed the lock"
            )
            raise CheckpointError(self.path, what, "name another folder for one of the two jobs")

    def release(self) -> None:
        """Remove the lock file if this job owns it."""
        if self._owner() == self.own:
            self.layer.unlink(self.path)

    def _make(self) -> None:
        file = self.layer.create(self.path)
        try:
            # Not synced: after a power cut nobody holds it.
            self.layer.write(self.path, file, memoryview(json.dumps(self.own._asdict()).encode()))
        except OSError:
            self.layer.unlink(self.path)
            raise
        finally:
            self.layer.close(file)

    def _read(self) -> Owner | None:
        """The content of the lock file; ``None`` if it is gone.

        :raises CheckpointError: nothing that was ever written there.
        """
        try:
            fields = Fields(parse(read_small(self.path), self.path), self.path)
        except CheckpointError:
            if not self.path.is_symlink() and not self.path.exists():
                return None
            raise
        numbers = fields.number("pid"), fields.number("started")
        return Owner(fields.text("host"), fields.text("boot"), *numbers, fields.text("word"))

    def _owner(self) -> Owner | None:
        with suppress(CheckpointError):
            return self._read()
        return None

    def _remove_if_dead(self) -> None:
        """Remove the lock if its owner is dead.

        :raises CheckpointError: its owner lives, or is elsewhere.
        """
        latest = time.monotonic() + _WRITTEN
        while True:
            try:
                owner = self._read()
                break
            except CheckpointError:  # just made, or left by a power cut
                if time.monotonic() > latest:
                    return self._remove()
                time.sleep(0.02)
        if owner is None:
            return None
        if owner.host != self.own.host:
            what = f"process {owner.pid} on {owner.host.split()[0]!r} saves into this folder"
            remedy = f"name another folder; if that job is dead, remove {self.path}"
            raise CheckpointError(self.path, what, remedy)
        if owner.boot == self.own.boot and owner.started == started(owner.pid):
            what = f"process {owner.pid} on this machine saves into this folder"
            if owner.pid == self.own.pid:
                what = "this process saves into this folder already"
            raise CheckpointError(self.path, what, "name another folder for one of the two jobs")
        return self._remove()

    def _remove(self) -> None:
        # Renamed first: of several who find it dead, one gets it.  If that was a new one already,
        # its owner is refused at its commit.
        aside = self.path.with_name(f"{NAME}.{self.own.word}")
        with suppress(FileNotFoundError):
            self.layer.rename(self.path, aside)
            self.layer.unlink(aside)


def here() -> tuple[str, str]:
    """This machine (or container, which does not see processes of others) and its boot."""
    parts, boot = [socket.gethostname()], ""
    with suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text().strip())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join(parts), boot


def started(pid: int) -> int:
    """Start time of process ``pid`` in ticks since boot; 0 if there is none or it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
