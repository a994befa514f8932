"""The collectives of one rank: the last ones in a file that outlives it, and totals.

Collectives of a group must be the same on all its members, in the same order.  So each has a
number in its group and a *chain*: a checksum of all texts up to it.  The first number at which the
chains of two ranks differ is the first call that differs, however the ranks end
(:func:`first_difference`).

The file has one head, what the rank does now, and entries of 256 bytes, call n at entry n % 2048::

    0    magic        8
    8    count        8   calls so far
    16   waits        8   1 while the rank's thread is blocked in a call; DDP's waits are not seen
    24   in backward  8   the last call that was made inside of a backward
    32   process      8   its pid

    0    number       8   of all calls of the rank, from 1; 0: empty
    8    in group     8   number in its group, from 1; 0: a message between two ranks
    16   chain        4   checksum of the group's texts so far
    20   text         2 + 110   the call
    132  place        2 + 66    file:line of the script
    200  group        2 + 54    its ranks
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import sysconfig
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from shardproof.backends.errors import members_of
from shardproof.backends.request import Request
from shardproof.files import Exact, Stored
from shardproof.launch.frames import SUITE, Frame
from shardproof.ledgers.program_order import inside_backward

#: The suite's folder without links: another process may have imported it by another path.
_REAL = os.path.realpath(SUITE)
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},)

_MAGIC = b"SHPCALLS"
_HEAD = struct.Struct("<8sQ")
_WAITS, _BACKWARD = 16, 24
_STATE = struct.Struct("<8xQQQQ")
_ENTRY = struct.Struct("<QQI")
ENTRIES, _SIZE, _START = 2048, 256, 64
#: Offset and room of each text of an entry.
_TEXT, _PLACE, _GROUP = (20, 112), (132, 68), (200, 56)
_BETWEEN_TWO = frozenset({"send", "recv"})
#: Texts and loads of so many different calls are kept.
_KNOWN = 4096


@dataclass(frozen=True)
class Call:
    """One call as the file tells it."""

    number: int
    in_group: int
    chain: int
    text: str
    place: str
    group: str


@dataclass(frozen=True)
class State:
    """The current action of a rank, from its file."""

    pid: int
    #: Whether it is blocked in a call of the script's.
    waits: bool
    #: Whether its last call was made inside of a backward, where DDP waits unseen.
    in_backward: bool


@dataclass
class Total(Stored):
    """All calls of one operation, dtype and group; bytes as the traffic ledger defines them."""

    operation: str
    dtype: str
    group: str
    calls: int = 0
    payload_bytes: int = 0
    #: This rank's share of what is sent, in the model of the traffic ledger.
    logical_bytes: Exact = field(default_factory=Fraction)


@dataclass(frozen=True)
class _Form:
    """The part of a call that is the same whenever it is made again."""

    text: str
    same: str
    loads: tuple[tuple[str, int, Fraction], ...]


class Calls:
    """Writes the file ``path`` and counts.  Not called by two threads at once."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_START + ENTRIES * _SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        _STATE.pack_into(self._map, 0, 0, 0, 0, os.getpid())
        _HEAD.pack_into(self._map, 0, _MAGIC, 0)
        self._thread = threading.get_ident()
        self.totals: dict[tuple[str, str, str], Total] = {}
        self.count = 0
        self._groups: dict[str, tuple[int, int]] = {}
        self._forms: dict[Any, _Form] = {}

    def note(self, request: Request, group: str, size: int, rank: int) -> None:
        """Write down that ``request`` is made now, on the group of these ranks."""
        form = self._form(request, size, rank)
        number, chain = 0, 0
        if request.operation not in _BETWEEN_TWO:
            number, chain = self._groups.get(group, (0, 0))
            number, chain = number + 1, zlib.crc32(form.same.encode(), chain)
            self._groups[group] = (number, chain)
        self.count += 1
        base = _START + self.count % ENTRIES * _SIZE
        _ENTRY.pack_into(self._map, base, 0, number, chain)  # not valid while it changes
        place = _place(sys._getframe(1))
        for text, (offset, room) in ((form.text, _TEXT), (place, _PLACE), (group, _GROUP)):
            data = text.encode("utf-8", "replace")
            data = data[: room - 2] if offset != _PLACE[0] else data[-(room - 2) :]
            start = base + offset
            self._map[start : start + 2 + len(data)] = struct.pack("<H", len(data)) + data
        struct.pack_into("<Q", self._map, base, self.count)
        if inside_backward():
            struct.pack_into("<Q", self._map, _BACKWARD, self.count)
        struct.pack_into("<Q", self._map, 8, self.count)
        for dtype, payload, share in form.loads:
            key = (request.operation, dtype, group)
            total = self.totals.setdefault(key, Total(*key))
            total.calls += 1
            total.payload_bytes += payload
            total.logical_bytes += share

    def on(self, group: str) -> int:
        """How many collectives were made on ``group`` so far."""
        return self._groups.get(group, (0, 0))[0]

    def wait(self, begins: bool) -> None:
        """The calling thread begins or ends to be blocked in a call; of others: nothing."""
        if threading.get_ident() == self._thread:
            struct.pack_into("<Q", self._map, _WAITS, int(begins))

    def _form(self, request: Request, size: int, rank: int) -> _Form:
        sides = (request.inputs, request.outputs)
        shapes = tuple(tuple((t.dtype, t.numel()) for i in side for t in i) for side in sides)
        key = (request.operation, request.reduce, request.root, request.peer, size, shapes)
        form = self._forms.get(key)
        if form is None:
            loads = tuple((dt, n, share) for dt, _, n, share in request.loads(size, rank))
            form = _Form(request.text(), request.agreed(), loads)
            if len(self._forms) < _KNOWN:
                self._forms[key] = form
        return form


@lru_cache(4096)
def is_shown(file: str) -> bool:
    """Whether ``file`` may be shown as where a script stood: it is not torch's, nor the suite's."""
    is_ours = file.startswith(SUITE) or os.path.realpath(file).startswith(_REAL)
    return not (is_ours or file.startswith("<") or "/torch/" in file)


@lru_cache(4096)
def is_of_script(file: str) -> bool:
    """Whether ``file`` is the user's own: of no installed package, nor of Python or the suite."""
    return is_shown(file) and not file.startswith(_INSTALLED)


def place_in_script(frames: Sequence[Frame]) -> str:
    """``in f (train.py:12)`` for the user's innermost line; ``frames`` are outermost first.

    Without any: the innermost of another package; ``""`` if all are of torch and the suite.
    """
    shown = [frame for frame in frames if is_shown(frame[0])]
    own = [frame for frame in shown if is_of_script(frame[0])]
    for file, line, function in (own or shown)[-1:]:
        where = f"{file}:{line}"
        return f"at {where}" if function == "<module>" else f"in {function} ({where})"
    return ""


def _place(frame: FrameType | None) -> str:
    """The script's innermost line, ``train.py:12``; without any that of another package."""
    other = ""
    for _ in range(40):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if is_of_script(file):
            return f"{file}:{frame.f_lineno}"
        if not other and is_shown(file):
            other = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return other


def read(path: Path) -> list[Call]:
    """The last calls of a rank, oldest first.

    :raises ValueError: the file is no file of calls.
    """
    data = path.read_bytes()
    if data[:8] != _MAGIC or len(data) != _START + ENTRIES * _SIZE:
        raise ValueError(f"{path}: this is not a file of recorded calls")
    found = []
    for base in range(_START, len(data), _SIZE):
        number, in_group, chain = _ENTRY.unpack_from(data, base)
        if number:
            texts = (_read_text(data, base + offset) for offset, _ in (_TEXT, _PLACE, _GROUP))
            found.append(Call(number, in_group, chain, *texts))
    return sorted(found, key=lambda call: call.number)


def state(path: Path) -> State:
    """The current action of the rank whose file ``path`` is.

    :raises ValueError: the file is no file of calls.
    """
    with path.open("rb") as file:
        head = file.read(_START)
    if head[:8] != _MAGIC or len(head) != _START:
        raise ValueError(f"{path}: this is not a file of recorded calls")
    count, waits, backward, pid = _STATE.unpack_from(head)
    return State(pid, bool(waits), bool(count) and backward == count)


def _read_text(data: bytes, start: int) -> str:
    (length,) = struct.unpack_from("<H", data, start)
    return data[start + 2 : start + 2 + length].decode("utf-8", "replace")


@dataclass(frozen=True)
class Difference:
    """The first call of a group that two ranks do not have in common."""

    group: str
    in_group: int
    #: Rank -> its call of that number; a rank that never made it is not here.
    calls: Mapping[int, Call]
    #: Whether earlier calls that the files have lost differ already.
    earlier: bool


def first_difference(ranks: Mapping[int, list[Call]]) -> Difference | None:
    """The first call that differs, of the group where most was in common; ``None``: all agree.

    Ranks that made fewer calls so far agree; see :func:`behind`.
    """
    for group, members in sorted(_by_group(ranks).items()):
        common = set.intersection(*({*calls} for calls in members.values()))
        for number in sorted(common):
            calls = {rank: by_number[number] for rank, by_number in members.items()}
            if len({call.chain for call in calls.values()}) > 1:
                earlier = len({call.text for call in calls.values()}) == 1
                return Difference(group, number, calls, earlier)
    return None


def first_apart(ranks: Mapping[int, list[Call]]) -> Difference | None:
    """The first call that ranks made alike and at different lines; ``None``: none is known."""
    for group, members in sorted(_by_group(ranks).items()):
        for number in sorted(set.intersection(*({*calls} for calls in members.values()))):
            calls = {rank: by_number[number] for rank, by_number in members.items()}
            if len({call.place for call in calls.values()}) > 1:
                return Difference(group, number, calls, earlier=False)
    return None


def behind(ranks: Mapping[int, list[Call]]) -> Difference | None:
    """The call that some member of a group has made and another never did, the first of them."""
    for group, members in sorted(_by_group(ranks).items()):
        last = {rank: max(calls, default=0) for rank, calls in members.items()}
        number = min(last.values()) + 1
        made = {r: calls[number] for r, calls in members.items() if number in calls}
        if made and len(made) < len(members):
            return Difference(group, number, made, earlier=False)
    return None


def awaits(mine: list[Call], others: Mapping[int, list[Call]], rank: int) -> str:
    """The call in which another rank waits for ``rank``, in words; ``""``: none does.

    ``others`` are ranks that wait: a call that was made and is not waited for keeps nobody.
    ``rank`` is where all that made as many steps have made its calls, or is at its end.
    """
    for group, members in sorted(_by_group({rank: mine, **others}).items()):
        at = max(members.get(rank, ()), default=0) + 1
        for other, made in members.items() if rank in members else ():
            if call := made.get(at):
                where = f" at {call.place}" if call.place else ""
                return f"rank {other} waits in call {at} on {group}, {call.text}{where}"
    return ""


def _by_group(ranks: Mapping[int, list[Call]]) -> dict[str, dict[int, dict[int, Call]]]:
    """Group -> rank -> number -> call, for groups with several members."""
    groups: dict[str, dict[int, dict[int, Call]]] = {}
    for rank, calls in ranks.items():
        for call in calls:
            if call.in_group:
                members = groups.setdefault(call.group, {r: {} for r in members_of(call.group)})
                members.setdefault(rank, {})[call.in_group] = call
    known = {name: {r: m[r] for r in m if r in ranks} for name, m in groups.items()}
    return {name: members for name, members in known.items() if len(members) > 1}
