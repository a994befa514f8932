"""The part of a memory log in a run's records: bytes at every mark, peaks of every phase."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shardproof.ledgers.memory.log import Levels, MemoryLog

#: Phases whose peaks are kept.
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one class on one device: at a mark, at the peak of a phase, or moved in it.

    ``moment`` is ``mark``, ``peak`` or ``moved``; ``where`` the mark's name or the phase; ``kind``
    a class (of peaks also ``all``: their sum), of what moved the direction, ``down`` to the host or
    ``up``; its device is left open.  ``allocator``: the most that torch's allocator of a GPU held
    in a step, tensors of the suite included.
    """

    moment: str
    step: int
    where: str
    device: str
    kind: str
    bytes: int


def summary(log: MemoryLog) -> list[MemoryRow]:
    """The stored part of ``log``; zeros are left out.

    The peak of a phase is that of each class alone; of ``all``, that of their sum.
    """
    rows: list[MemoryRow] = []
    best: dict[tuple[int, str], Levels] = {}
    # Before the first event nothing is held.
    now, marks = None, deque(mark for mark in log.marks if mark[2])
    for event, (moment, levels, changed) in enumerate(log.replay(), 1):
        if moment[1] in PHASES:
            most = best.setdefault(moment, {})
            for key in changed if moment == now else levels:
                if levels[key] > most.get(key, 0):
                    most[key] = levels[key]
        now = moment
        while marks and marks[0][2] == event:
            name, step, _ = marks.popleft()
            rows += _rows("mark", step, name, levels)
    rows += [r for (step, phase), most in best.items() for r in _rows("peak", step, phase, most)]
    for (step, where, way), size in log.moved.items():
        rows.append(MemoryRow("moved", step, where, "", way, size))
    return rows


def _rows(moment: str, step: int, where: str, levels: Levels) -> list[MemoryRow]:
    return [
        MemoryRow(moment, step, where, device, kind, held)
        for (device, kind), held in sorted(levels.items())
        if held
    ]
