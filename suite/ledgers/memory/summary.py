"""What is kept of a memory log in a run's records: bytes at every mark, peaks of every phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardproof.ledgers.memory.log import CLASSES, MemoryLog

if TYPE_CHECKING:
    from shardproof.case import Case

#: Backends on which the ledger is exact; gloo's threads free late.
EXACT = ("in_memory", "nccl", "mpi")
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


def memory_is_measurable(case: Case, backends: Sequence[str]) -> bool:
    """Whether the memory of ``case`` is measured, for a system that runs on ``backends``.

    It takes time, so the check must be asked for; of a system that needs processes memory is
    measured on gloo.
    """
    exact = case.backend in EXACT or "in_memory" not in backends
    return case.ledgers and "memory" in case.checks and exact


def summary(log: MemoryLog) -> list[MemoryRow]:
    """What is kept of ``log``; what is 0 is left out.

    The peak of a phase is that of each class alone; of ``all``, that of their sum.
    """
    moves = [
        MemoryRow("moved", step, where, "", way, size)
        for (step, where, way), size in log.moved.items()
    ]
    return [*_marks(log), *_peaks(log), *moves]


def _marks(log: MemoryLog) -> list[MemoryRow]:
    kinds = log.classes()
    sizes: dict[int, int] = {}
    levels: dict[tuple[str, str], int] = {}
    rows: list[MemoryRow] = []
    event = 0
    for name, step, position in log.marks:
        for index, size, _, _ in log.events[event:position]:
            _apply(log, kinds, sizes, levels, index, size)
        event = position
        rows += [
            _row("mark", step, name, device, kind, held)
            for (device, kind), held in sorted(levels.items())
            if held
        ]
    return rows


def _peaks(log: MemoryLog) -> list[MemoryRow]:
    kinds = log.classes()
    sizes: dict[int, int] = {}
    levels: dict[tuple[str, str], int] = {}
    best: dict[tuple[int, str], dict[tuple[str, str], int]] = {}
    now: tuple[int, str] | None = None
    for index, size, phase, step in log.events:
        if phase not in PHASES:
            now = None
        elif now != (step, phase):
            now = (step, phase)
            _raise(best.setdefault(now, {}), levels, levels)
        changed = _apply(log, kinds, sizes, levels, index, size)
        if now is not None and changed:
            _raise(best[now], levels, (changed, (changed[0], "all")))
    return [
        _row("peak", step, phase, device, kind, held)
        for (step, phase), levels_then in best.items()
        for (device, kind), held in sorted(levels_then.items())
        if held
    ]


def _apply(
    log: MemoryLog,
    kinds: list[str | None],
    sizes: dict[int, int],
    levels: dict[tuple[str, str], int],
    index: int,
    size: int,
) -> tuple[str, str] | None:
    """Bring ``levels`` (bytes by device and class, and ``all``) up to date with one event."""
    kind = kinds[index] if index >= 0 else None
    if kind is None:
        return None
    device = log.storages[index].device
    grown = size - sizes.get(index, 0)
    sizes[index] = size
    for key in ((device, kind), (device, "all")):
        levels[key] = levels.get(key, 0) + grown
    return device, kind


def _raise(
    best: dict[tuple[str, str], int],
    levels: dict[tuple[str, str], int],
    keys: Any,
) -> None:
    for key in keys:
        best[key] = max(best.get(key, 0), levels[key])


def _row(moment: str, step: int, where: str, device: str, kind: str, held: int) -> MemoryRow:
    assert kind in CLASSES or kind == "all"
    return MemoryRow(moment, step, where, device, kind, held)
