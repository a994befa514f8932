"""A heartbeat per rank in shared memory: how many calls, which last, how the rank is doing.

Written by the ranks with plain stores (no lock, no system call), and readable by anyone who has the
file, also when the rank is stopped, looping without the interpreter lock's leave, or dead.

One slot of 13824 bytes per rank::

    0     sequence number   8   calls noted so far
    8     time              8   time.monotonic() of the last note
    16    thread            8   identity of the rank's thread (to find its stack)
    24    state             4   NEW, RUNNING, RETURNED, DONE, FAILED
    28    native thread     4   the kernel's number of the rank's thread (to find its CPU time)
    32    waits             4   odd while the rank's thread is blocked inside a call
    36    waited            4   the call that it waits for, or waited for last; 0: it is not known
    40    injected          8   time.monotonic() at which the suite made a fault here; 0: none
    48    exit notice       2 + 206   what the rank did to end its process, if caught
    256   ring              48 entries of 240 bytes, call n at entry n % 48:
                            group 4, number in it 4, digest 4, 4 unused, text 2 + 222
    11776 order             256 entries of 8 bytes, call n at entry n % 256: step 4, text's digest 4
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NEW, RUNNING, RETURNED, DONE, FAILED = range(5)
#: How a rank in one of these states has ended.
_ENDED = {RETURNED: "it has returned", DONE: "it has returned", FAILED: "it has failed"}

_SLOT = 13824
_HEAD = struct.Struct("<QdQIIIId")
_THREAD, _STATE, _NATIVE, _WAITS, _INJECTED, _NOTICE, _RING = 16, 24, 28, 32, 40, 48, 256
_ENTRIES, _ENTRY, _ORDER = 48, 240, 11776
#: Calls whose order is kept.
ORDERED = 256
_CALL, _TEXT = struct.Struct("<III"), 16
_PLACED = struct.Struct("<iI")
#: Entries that can be read while the rank writes the next one.
_WHOLE = _ENTRIES - 1


@dataclass(frozen=True)
class Noted:
    """One call of a rank: its number among all of them, from 1, and what it was.

    ``group`` stands for the group, ``number`` is the call's number in it, from 1 (0: a message
    between two ranks), ``digest`` stands for what all members must agree on.
    """

    sequence: int
    group: int
    number: int
    digest: int
    text: str


@dataclass(frozen=True)
class Heartbeat:
    """The content of a rank's slot; its texts are read on demand."""

    rank: int
    sequence: int
    at: float
    thread: int
    state: int
    native: int
    waits: int
    waited: int
    injected: float
    slot: bytes

    @property
    def exit_notice(self) -> str:
        """How the rank was about to end its process; "" if that was not seen."""
        return _read_text(self.slot, _NOTICE)

    @property
    def noted(self) -> tuple[Noted, ...]:
        """The last calls, oldest first."""
        last = range(max(0, self.sequence - _ENTRIES), self.sequence)
        return tuple(_noted(self.slot, 0, n) for n in last)

    @property
    def awaited(self) -> Noted | None:
        """The call that it waits for, or that it waited for since it made the last one."""
        return next((call for call in self.noted if call.sequence == self.waited), None)

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        """Step (-1: none) and digest of the text of the last calls, oldest first."""
        last = range(max(0, self.sequence - ORDERED), self.sequence)
        return tuple(_PLACED.unpack_from(self.slot, _ORDER + n % ORDERED * 8) for n in last)

    @property
    def waiting(self) -> bool:
        """Whether its thread was blocked inside a call."""
        return self.waits % 2 == 1

    @property
    def ended(self) -> str:
        """How the rank has ended; "" if it still runs."""
        return _ENDED.get(self.state, "")

    @property
    def event(self) -> tuple[int, int, int]:
        """A value that changes whenever the rank ends, enters or leaves a call."""
        return self.sequence, self.waits, self.state

    @property
    def last_call(self) -> str:
        """The most recent call, "" if there was none."""
        return self.noted[-1].text if self.sequence else ""


class Writer:
    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.rank = rank
        self._base = rank * _SLOT
        self._count = self._waits = 0
        self._groups: Counter[str] = Counter()
        self._thread = threading.get_ident()
        struct.pack_into("<Q", self._map, self._base + _THREAD, self._thread)
        struct.pack_into("<I", self._map, self._base + _NATIVE, threading.get_native_id())
        self.state(RUNNING)

    def group(self, name: str) -> int:
        """The key of the group ``name`` that the rank makes: a new one each time."""
        self._groups[name] += 1
        return zlib.crc32(f"{name}/{self._groups[name]}".encode())

    def note(
        self, text: str, group: int = 0, number: int = 0, digest: int = 0, step: int = -1
    ) -> int:
        """Record one call; its number among all.  Texts over 222 bytes are cut."""
        count = self._count
        entry = self._base + _RING + count % _ENTRIES * _ENTRY
        _CALL.pack_into(self._map, entry, group, number, digest)
        self._text(entry - self._base + _TEXT, text, _ENTRY - _TEXT)
        placed = self._base + _ORDER + count % ORDERED * _PLACED.size
        _PLACED.pack_into(self._map, placed, step, zlib.crc32(text.encode("utf-8", "replace")))
        struct.pack_into("<I", self._map, self._base + _WAITS + 4, 0)
        self._count = count + 1
        # Last, so that a reader never sees a count whose text is missing.
        struct.pack_into("<Qd", self._map, self._base, count + 1, time.monotonic())
        return self._count

    def wait(self, begins: bool, call: int = 0) -> None:
        """The calling thread begins or ends to be blocked; of others than the rank's own: nothing.

        What a rank's helper thread waits for keeps the rank from nothing.
        """
        if threading.get_ident() == self._thread and begins != self._waits % 2:
            self._waits += 1
            if begins:
                struct.pack_into("<II", self._map, self._base + _WAITS, self._waits, call)
            else:
                struct.pack_into("<I", self._map, self._base + _WAITS, self._waits)

    def calls_of(self, ranks: Iterable[int], group: int, number: int) -> dict[int, Noted]:
        """The call ``number`` of a group as those of ``ranks`` made it that have come to it."""
        found = {}
        for rank in ranks:
            base = rank * _SLOT
            if base >= len(self._map):
                continue  # on another machine
            (count,) = struct.unpack_from("<Q", self._map, base)
            for n in range(count - 1, max(-1, count - 1 - _WHOLE), -1):
                entry = base + _RING + n % _ENTRIES * _ENTRY
                its, at, _ = _CALL.unpack_from(self._map, entry)
                if its == group and 0 < at <= number:
                    if at == number:
                        found[rank] = _noted(self._map, base, n)
                    break
        return found

    def differing(
        self, ranks: Iterable[int], group: int, number: int, digest: int
    ) -> dict[int, str]:
        """The calls that members of a group make in place of this rank's call, of all that arrived.

        Empty where none of them differs.  What seems to differ is read once more: it may be written
        at this very moment.
        """
        others = [rank for rank in ranks if rank != self.rank]
        for pause in (0.001, 0.0):
            made = self.calls_of(others, group, number)
            if all(call.digest == digest for call in made.values()):
                return {}
            time.sleep(pause)
        return {rank: call.text for rank, call in made.items()}

    def inject(self) -> None:
        """Record that the suite makes a fault here, now."""
        struct.pack_into("<d", self._map, self._base + _INJECTED, time.monotonic())

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


#: Bytes of the files that this process has made: ranks may cut them, or make them longer.
_sizes: dict[Path, int] = {}


def create(path: Path, world: int) -> None:
    """Make the file, before the ranks are forked."""
    path.write_bytes(bytes(world * _SLOT))
    _sizes[path] = world * _SLOT


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
    return getattr(_thread, "writer", None) or _process


def note(text: str, step: int = -1) -> None:
    """Record that the calling rank calls ``text``, which goes through no process group."""
    if (writer := current()) is not None:
        writer.note(text, step=step)


def wait(begins: bool, call: int = 0) -> None:
    """Record that the calling rank begins or ends to be blocked inside a call."""
    if (writer := current()) is not None:
        writer.wait(begins, call)


def inject() -> None:
    """Record that the suite makes a fault in the calling rank."""
    if (writer := current()) is not None:
        writer.inject()


def peers() -> list[Heartbeat]:
    """The heartbeats of all ranks of the calling rank's launch; none outside ranks."""
    return [] if (writer := current()) is None else _slots(writer.all())


def read(path: Path) -> list[Heartbeat]:
    """All slots, as they are now.  A note written at this very moment may read torn."""
    size = _sizes.get(path, -1)
    with path.open("rb") as file:
        return _slots(file.read(size).ljust(size, b"\0"))


def _slots(data: bytes) -> list[Heartbeat]:
    slots = (data[start : start + _SLOT] for start in range(0, len(data), _SLOT))
    return [Heartbeat(rank, *(*_HEAD.unpack_from(slot), slot)) for rank, slot in enumerate(slots)]


def _noted(data: bytes | mmap.mmap, base: int, n: int) -> Noted:
    entry = base + _RING + n % _ENTRIES * _ENTRY
    group, number, digest = _CALL.unpack_from(data, entry)
    return Noted(n + 1, group, number, digest, _read_text(data, entry + _TEXT))


def _read_text(data: bytes | mmap.mmap, start: int) -> str:
    (length,) = struct.unpack_from("<H", data, start)
    return data[start + 2 : start + 2 + length].decode("utf-8", "replace")
