"""The memory of a rank over time: an append-only log, classed and replayed after the fact.

Plain data without torch, so that a stored run can be judged again.  A storage's class is decided
from the *whole* log, because what an allocation is for shows only later:

1. a label, where the suite saw what the storage holds (``parameters``, ``masters``, ``gradients``,
   ``optimizer_state``, ``buffers``); it holds for the storage's whole life;
2. ``communication``: handed to a process group, and no activation by rule 3; a storage born in a
   forward that outlives its step is a bucket, for an activation dies in its own step's backward;
3. ``activations``: born in a forward and still holding bytes when that forward is over;
4. ``temporary``: the rest.

Storages that are not the implementation's (there before the ledger, made while it was paused or
inside an observation) count only where they carry a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from shardproof.files import Stored

#: Known by what they hold; where two claim one storage, the first here wins.
LABELS = ("parameters", "masters", "gradients", "optimizer_state", "buffers", "extra")
#: The device of storages that are mapped from files: host memory of machines without a GPU.
FILE = "file"
CLASSES = (*LABELS, "communication", "activations", "temporary")

#: ``own``: counted.  ``before``: there already, or the suite's; counted once labelled.
#: ``observed``: made inside an observation; never counted.
Origin = Literal["own", "before", "observed"]


@dataclass(slots=True)
class Storage:
    """One allocation: its place and its origin.

    ``operation`` is the torch operator that made it.
    """

    device: str
    operation: str
    phase: str
    step: int
    origin: Origin
    label: str | None = None
    communicated: bool = False


@dataclass(frozen=True)
class Peak:
    """When a phase held most: ``bytes``, what they are by class, and how many events came before.

    For the peak of one class ``bytes`` are those of that class.
    """

    bytes: int
    classes: dict[str, int]
    event: int


#: Device and class (or ``all``) -> bytes.
Levels = dict[tuple[str, str], int]


@dataclass
class MemoryLog(Stored):
    """Storages, events ``(storage, its bytes from now on, phase, step)`` and marks of one rank.

    An event of storage -1 only says that another phase began.  A mark ``(name, step, events)``
    names a moment by the number of events before it.  Bytes are those of storages, padding and all.
    ``moved`` counts floating-point bytes that were copied between host and device, by (step, phase,
    ``down`` to the host or ``up`` from it).
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[tuple[int, int, str, int]] = field(default_factory=list)
    marks: list[tuple[str, int, int]] = field(default_factory=list)
    moved: dict[tuple[int, str, str], int] = field(default_factory=dict)

    def bytes(self, at: str, step: int | None = None) -> dict[str, int]:
        """Bytes by class at the mark ``at`` (of ``step``; otherwise the last one of that name).

        :raises KeyError: no such mark.
        """
        moments = [levels for _, levels, _ in islice(self.replay(), self._position(at, step))]
        return _by_class(moments[-1] if moments else {})

    def peak(self, phase: str, step: int, kind: str | None = None) -> Peak:
        """The most that was held in ``phase`` of ``step``, in all or of class ``kind``.

        What is live when the phase begins belongs to it.  Set-up has step -1.

        :raises KeyError: the log has no such phase.
        """
        peaks = self.peaks(kind)
        if (step, phase) not in peaks:
            raise KeyError(f"the log has no phase {phase!r} in step {step}; it has {sorted(peaks)}")
        return peaks[step, phase]

    def peaks(self, kind: str | None = None) -> dict[tuple[int, str], Peak]:
        """:meth:`peak` of every ``(step, phase)`` in the log, in order of their beginning."""
        best: dict[tuple[int, str], Peak] = {}
        for event, (moment, levels, _) in enumerate(self.replay(), 1):
            classes = _by_class(levels)
            held = sum(classes.values()) if kind is None else classes[kind]
            if moment not in best or held > best[moment].bytes:
                best[moment] = Peak(held, classes, event)
        return best

    def replay(self) -> Iterator[tuple[tuple[int, str], Levels, Sequence[tuple[str, str]]]]:
        """``((step, phase), bytes after it, which of them changed)`` of every event.

        The bytes are one mapping, which goes on changing.
        """
        sizes, levels = [0] * len(self.storages), Levels()
        keys: list[Sequence[tuple[str, str]]] = [
            () if kind is None else ((storage.device, kind), (storage.device, "all"))
            for storage, kind in zip(self.storages, self.classes(), strict=True)
        ]
        for index, size, phase, step in self.events:
            changed = keys[index] if index >= 0 else ()
            if changed:
                more, sizes[index] = size - sizes[index], size
                for key in changed:
                    levels[key] = levels.get(key, 0) + more
            yield (step, phase), levels, changed

    def classes(self) -> list[str | None]:
        """The class of every storage (``None``: not the implementation's, so not counted)."""
        outlived, lasting = self._lives()
        kinds: list[str | None] = []
        for index, storage in enumerate(self.storages):
            if storage.origin == "observed" or (storage.origin == "before" and not storage.label):
                kinds.append(None)
            elif storage.label:
                kinds.append(storage.label)
            elif storage.communicated and (index not in outlived or index in lasting):
                kinds.append("communication")
            else:
                kinds.append("activations" if index in outlived else "temporary")
        return kinds

    def _position(self, name: str, step: int | None) -> int:
        for mark, of_step, position in reversed(self.marks):
            if mark == name and step in (None, of_step):
                return position
        known = ", ".join(f"{mark} of step {of_step}" for mark, of_step, _ in self.marks)
        raise KeyError(f"step {step} has no mark {name!r}; all marks: {known or 'none'}")

    def _lives(self) -> tuple[set[int], set[int]]:
        """Storages that outlived the forward of their birth; those that outlived its whole step."""
        outlived: set[int] = set()
        lasting = {i for i, s in enumerate(self.storages) if s.phase == "forward"}
        pending: set[int] = set()
        for index, size, phase, step in self.events:
            if phase not in ("forward", "observe"):
                outlived |= pending
                pending.clear()
            if index < 0 or self.storages[index].phase != "forward":
                continue
            if phase == "forward" and size:
                pending.add(index)
            elif not size:
                pending.discard(index)
                if step == self.storages[index].step and phase != "setup":
                    lasting.discard(index)
        return outlived, lasting


def _by_class(levels: Levels) -> dict[str, int]:
    """Bytes of every class on all devices."""
    classes = dict.fromkeys((*CLASSES, "all"), 0)
    for (_, kind), size in levels.items():
        classes[kind] += size
    del classes["all"]
    return classes
