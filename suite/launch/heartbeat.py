"""A heartbeat per rank in shared memory: how many calls, which last, how the rank is doing.

Written by the ranks with plain stores (no lock, no system call), and readable by anyone who has the
file, also when the rank is stopped, looping without the interpreter lock's leave, or dead.

One slot of 2048 bytes per rank::

    0     sequence number   8   calls noted so far
    8     time              8   time.monotonic() of the last note
    16    thread            8   identity of the rank's thread (to find its stack)
    24    state             4   NEW, RUNNING, RETURNED, DONE, FAILED
    28    native thread     4   the kernel's number of the rank's thread (to find its CPU time)
    32    waits             4   odd while the rank's thread is blocked inside a call
    40    exit notice       2 + 214   what the rank did to end its process, if caught
    256   ring              8 entries of 2 + 222 bytes: text of call n at entry n % 8
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shardproof.backends import Peer

NEW, RUNNING, RETURNED, DONE, FAILED = range(5)

_SLOT = 2048
_HEAD = struct.Struct("<QdQIII")
_THREAD, _STATE, _NATIVE, _WAITS, _NOTICE, _RING = 16, 24, 28, 32, 40, 256
_ENTRIES, _ENTRY = 8, 224


@dataclass(frozen=True)
class Heartbeat:
    """What a rank's slot says; its texts are read when they are asked for."""

    rank: int
    sequence: int
    noted: float
    thread: int
    state: int
    native: int
    waits: int
    slot: bytes

    @property
    def exit_notice(self) -> str:
        """How the rank was about to end its process, "" if nobody saw it."""
        return _read_text(self.slot, _NOTICE)

    @property
    def calls(self) -> tuple[str, ...]:
        """The last calls, oldest first."""
        last = range(max(0, self.sequence - _ENTRIES), self.sequence)
        return tuple(_read_text(self.slot, _RING + n % _ENTRIES * _ENTRY) for n in last)

    @property
    def waiting(self) -> bool:
        """Whether its thread was blocked inside a call."""
        return self.waits % 2 == 1

    @property
    def last_call(self) -> str:
        """The most recent call, "" if there was none."""
        return self.calls[-1] if self.sequence else ""


class Writer:
    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.rank = rank
        self._base = rank * _SLOT
        self._count = self._waits = 0
        self._thread = threading.get_ident()
        struct.pack_into("<Q", self._map, self._base + _THREAD, self._thread)
        struct.pack_into("<I", self._map, self._base + _NATIVE, threading.get_native_id())
        self.state(RUNNING)

    def note(self, text: str) -> None:
        """Record one call.  Texts over 222 bytes are cut."""
        count = self._count
        self._text(_RING + count % _ENTRIES * _ENTRY, text, _ENTRY)
        self._count = count + 1
        # Last, so that a reader never sees a count whose text is missing.
        struct.pack_into("<Qd", self._map, self._base, count + 1, time.monotonic())

    def wait(self, begins: bool) -> None:
        """The calling thread begins or ends to be blocked; of others than the rank's own: nothing.

        What a rank's helper thread waits for keeps the rank from nothing.
        """
        if threading.get_ident() == self._thread and begins != self._waits % 2:
            self._waits += 1
            struct.pack_into("<I", self._map, self._base + _WAITS, self._waits)

    def state(self, state: int) -> None:
        struct.pack_into("<I", self._map, self._base + _STATE, state)

    def announce_exit(self, text: str) -> None:
        """Record how the rank is about to end the process; the first such call stays."""
        if self._map[self._base + _NOTICE : self._base + _NOTICE + 2] == b"\0\0":
            self._text(_NOTICE, text, _RING - _NOTICE)

    def all(self) -> bytes:
        """The slots of all ranks."""
        return self._map[:]

    def _text(self, offset: int, text: str, room: int) -> None:
        data = text.encode("utf-8", "replace")[: room - 2]
        start = self._base + offset
        self._map[start : start + 2 + len(data)] = struct.pack("<H", len(data)) + data


_process: Writer | None = None
_thread = threading.local()


def create(path: Path, world: int) -> None:
    """Make the file, before the ranks are forked."""
    path.write_bytes(bytes(world * _SLOT))


def attach(path: Path, rank: int, thread: bool) -> Writer:
    """Start this rank's heartbeat: for the calling thread only, or for the whole process."""
    global _process
    writer = Writer(path, rank)
    if thread:
        _thread.writer = writer
    else:
        _process = writer
    return writer


def current() -> Writer | None:
    """The heartbeat of the calling rank; ``None`` outside ranks."""
    writer: Writer | None = getattr(_thread, "writer", None)
    return writer or _process


def note(text: str) -> None:
    """Record that the calling rank issued ``text``; nothing outside ranks.  About 1 microsecond."""
    if (writer := current()) is not None:
        writer.note(text)


def wait(begins: bool) -> None:
    """Record that the calling rank begins or ends to be blocked inside a call."""
    if (writer := current()) is not None:
        writer.wait(begins)


#: How a rank in one of these states has ended.
_ENDED = {RETURNED: "it has returned", DONE: "it has returned", FAILED: "it has failed"}


def peers() -> list[Peer]:
    """What all ranks of the calling rank's launch do; nothing outside ranks."""
    if (writer := current()) is None:
        return []
    return [
        Peer(
            beat.rank,
            _ENDED.get(beat.state, ""),
            beat.waiting,
            (beat.sequence, beat.waits, beat.state),
            beat.last_call or "its first call",
        )
        for beat in _slots(writer.all())
    ]


def read(path: Path) -> list[Heartbeat]:
    """All slots, as they are now.  A note written at this very moment may read torn."""
    return _slots(path.read_bytes())


def _slots(data: bytes) -> list[Heartbeat]:
    slots = (data[start : start + _SLOT] for start in range(0, len(data), _SLOT))
    return [Heartbeat(rank, *(*_HEAD.unpack_from(slot), slot)) for rank, slot in enumerate(slots)]


def _read_text(data: bytes, start: int) -> str:
    (length,) = struct.unpack_from("<H", data, start)
    return data[start + 2 : start + 2 + length].decode("utf-8", "replace")
