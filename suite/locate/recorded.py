"""Recordings of ranks as they are read, and who wrote what a tensor holds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from shardproof import tensor_bytes

#: File, line and function.
Place = tuple[str, int, str]


@dataclass(frozen=True)
class Region:
    """Bytes ``first`` to ``last`` of a storage, and the content at that moment."""

    storage: int
    first: int
    last: int
    content: Tensor | None

    def overlaps(self, other: Region) -> bool:
        """Whether both have a byte in common."""
        return self.storage == other.storage and self.first < other.last and other.first < self.last


@dataclass(frozen=True, eq=False)
class Event:
    """An entry of a recording.

    ``kind``: ``op`` (an operator), ``call`` (a call to a group is issued), ``done`` (its results
    are there), ``seen`` (the system shows or returns a tensor).  ``places``: the frames of the
    system, innermost first.  ``more``: what only that kind has.
    """

    rank: int
    number: int
    kind: str
    name: str
    places: Sequence[Place]
    reads: Sequence[Region]
    writes: Sequence[Region]
    step: int
    phase: str
    unit: str
    backward: bool
    more: Mapping[str, Any] = field(default_factory=dict)


_FIELDS = ("kind", "name", "place", "reads", "writes", "step", "phase", "unit", "backward")


@dataclass(frozen=True, eq=False)
class Recording:
    """All events of one rank in program order; ``truncated``: there was no room for the rest."""

    rank: int
    events: Sequence[Event]
    truncated: bool = False

    @cached_property
    def _writers(self) -> Mapping[int, list[tuple[int, Region]]]:
        found: dict[int, list[tuple[int, Region]]] = defaultdict(list)
        for event in self.events:
            for region in event.writes:
                found[region.storage].append((event.number, region))
        return found

    def writers(self, region: Region, before: int) -> Iterator[Event]:
        """The events before number ``before`` that wrote what ``region`` held then, last first."""
        entries = self._writers.get(region.storage, [])
        missing = [(region.first, region.last)]
        for at in range(bisect_left(entries, before, key=lambda entry: entry[0]) - 1, -1, -1):
            number, written = entries[at]
            if not region.overlaps(written):
                continue
            left = [piece for span in missing for piece in _without(span, written)]
            if left != missing:
                yield self.events[number]
            missing = left
            if not missing:
                return

    @cached_property
    def _readers(self) -> Mapping[int, list[tuple[int, Region]]]:
        found: dict[int, list[tuple[int, Region]]] = defaultdict(list)
        for event in self.events:
            for region in event.reads if event.kind == "op" else ():
                found[region.storage].append((event.number, region))
        return found

    def readers(self, region: Region, after: int) -> Iterator[Event]:
        """The operators after number ``after`` that read of ``region`` what was written there."""
        writes = (n for n, w in self._writers[region.storage] if n > after and w.overlaps(region))
        end = next(writes, len(self.events))
        for number, read in self._readers.get(region.storage, ()):
            if after < number <= end and read.overlaps(region):
                yield self.events[number]

    @cached_property
    def _views(self) -> Mapping[int, list[Event]]:
        found: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.kind == "view":
                found[event.reads[0].storage].append(event)
        return found

    def views(self, region: Region, before: int) -> Iterator[Event]:
        """The views of the storage of ``region`` since it was written, last first."""
        since = next((w.number for w in self.writers(region, before)), -1)
        for event in reversed(self._views.get(region.storage, [])):
            if since < event.number < before:
                yield event

    @cached_property
    def _turns(self) -> tuple[Mapping[int, int], Mapping[Any, Event]]:
        counts, turns, events = Counter[Any](), dict[int, int](), dict[Any, Event]()
        for event in self.events:
            if event.kind == "op":
                key = (event.name, event.places, event.step, event.phase, event.unit)
                turns[event.number], events[*key, counts[key]] = counts[key], event
                counts[key] += 1
        return turns, events

    def turn(self, event: Event) -> int:
        """How often the operator ran at that place before ``event``."""
        return self._turns[0][event.number]

    def at_turn(self, like: Event, turn: int) -> Event | None:
        """The event of this rank that is to it what ``like`` is to another."""
        key = (like.name, like.places, like.step, like.phase, like.unit, turn)
        return self._turns[1].get(key)

    @cached_property
    def calls(self) -> Mapping[tuple[Any, ...], Event]:
        """The calls, by what is equal on all members."""
        return {call_key(event): event for event in self.events if event.kind == "call"}


def _without(span: tuple[int, int], written: Region) -> list[tuple[int, int]]:
    first, last = span
    if written.last <= first or last <= written.first:
        return [span]
    pieces = [(first, written.first), (written.last, last)]
    return [(a, b) for a, b in pieces if a < b]


def call_key(event: Event) -> tuple[Any, ...]:
    """The part of a call of one rank that it has in common with those of the other members."""
    more = event.more
    if event.name in ("send", "recv"):
        ends = (event.rank, more["peer"]) if event.name == "send" else (more["peer"], event.rank)
        return ("message", tuple(more["group"]), *ends, more["tag"], more["number"])
    return (more["group_name"], tuple(more["group"]), more["number"])


def read(file: Path, rank: int) -> Recording:
    """The recording of ``rank`` in ``file``."""
    data = tensor_bytes.load(file)
    tensors = data["tensors"]
    places = [tuple((f, int(n), q) for f, n, q in place) for place in data["places"]]

    def region(row: Any) -> Region:
        storage, first, last, content = row
        return Region(storage, first, last, tensors[content] if content >= 0 else None)

    events = [
        Event(
            rank,
            number,
            row["kind"],
            row["name"],
            places[row["place"]] if row["place"] >= 0 else (),
            [region(each) for each in row["reads"]],
            [region(each) for each in row["writes"]],
            row["step"],
            row["phase"],
            row["unit"],
            row["backward"],
            {key: value for key, value in row.items() if key not in _FIELDS},
        )
        for number, row in enumerate(data["events"])
    ]
    return Recording(rank, events, data["truncated"])
