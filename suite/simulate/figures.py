"""Peak memory of a simulated rank, the bytes that it sends in its last step, and their tables."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from shardproof import axes
from shardproof.checks.traffic import axis_of
from shardproof.ledgers.memory.log import CLASSES, FILE, MemoryLog
from shardproof.ledgers.memory.summary import PHASES, summary
from shardproof.simulate.machines import Machine
from shardproof.simulate.rank import SimulatedRank
from shardproof.simulate.seconds import StepTime
from shardproof.table import Table

_ALL = "all"
#: Named rows in the table of the peak; one more row adds up the rest.
_MOST_NAMED = 8
_AFTER = "after_update"


class Held(NamedTuple):
    """Storages of one kind, operator and phase: ``bytes`` of all ``storages`` together.

    ``made_by``: the torch operator that made them; ``phase``: when it did.
    """

    kind: str
    made_by: str
    phase: str
    storages: int
    bytes: int


#: Operation, axis and phase of calls.
Sort = tuple[str, str, str]


@dataclass(frozen=True)
class Figures:
    """Bytes of one rank in its last step.

    ``peaks``: by phase and class, ``all`` for their sum at one moment.  ``kept``: by class, after
    the update.  ``host``: state in host memory after the update, which the others do not count.
    ``sent`` and ``calls``: by operation, axis and phase.  ``held``: storages in memory at the peak.
    """

    rank: int
    peaks: Mapping[tuple[str, str], int]
    kept: Mapping[str, int]
    host: int
    sent: Mapping[Sort, Fraction]
    calls: Mapping[Sort, int]
    held: Sequence[Held]

    @property
    def peak(self) -> int:
        """Most bytes that the rank holds at once."""
        return self.peaks.get((self.phase, _ALL), 0)

    @property
    def phase(self) -> str:
        """The phase in which it holds them."""
        return max(PHASES, key=lambda phase: self.peaks.get((phase, _ALL), 0))

    @property
    def kinds(self) -> list[str]:
        """Classes of which there are bytes, then ``all``."""
        there = {kind for _, kind in self.peaks} | {*self.kept}
        return [kind for kind in (*CLASSES, _ALL) if kind in there]


def figures(made: SimulatedRank, mesh: Mapping[str, int]) -> Figures:
    """The figures of the last step of ``made``, a rank of ``mesh``."""
    last = len(made.calls) - 1
    rows = [row for row in summary(made.log) if row.step == last]
    after = [row for row in rows if row.where == _AFTER]
    near = [row for row in rows if row.device != FILE]
    sent, calls = dict[Sort, Fraction](), Counter[Sort]()
    for call in made.calls[-1]:
        if call.phase != "observe":
            key = call.operation, axis_of(call.group, mesh), call.phase
            sent[key] = sent.get(key, Fraction()) + call.logical_bytes
            calls[key] += 1
    return Figures(
        rank=made.rank,
        peaks={(row.where, row.kind): row.bytes for row in near if row.moment == "peak"},
        kept={row.kind: row.bytes for row in near if row.where == _AFTER},
        host=sum(row.bytes for row in after if row.device == FILE and row.kind != _ALL),
        sent=sent,
        calls=calls,
        held=_held(made.log, last),
    )


def _held(log: MemoryLog, step: int) -> list[Held]:
    """The storages in memory at the highest moment of ``step``, the largest first."""
    kinds, sizes, best = log.classes(), dict[int, int](), 0
    total = most = 0
    for number, (index, size, phase, of_step) in enumerate(log.events, 1):
        if index >= 0 and _is_counted(log, kinds, index):
            total += size - sizes.get(index, 0)
            sizes[index] = size
        if of_step == step and phase in PHASES and total > most:
            most, best = total, number
    sizes.clear()
    for index, size, _, _ in itertools.islice(log.events, best):
        if index >= 0 and _is_counted(log, kinds, index):
            sizes[index] = size
    groups = dict[Sort, list[int]]()
    for index, size in sizes.items():
        if size:
            storage = log.storages[index]
            # A name such as aten.empty.memory_format: library, operator, overload.
            made_by = (*storage.operation.split("."), "")[1]
            groups.setdefault((str(kinds[index]), made_by, storage.phase), []).append(size)
    found = [Held(*key, len(of), sum(of)) for key, of in groups.items()]
    return sorted(found, key=lambda one: -one.bytes)


def _is_counted(log: MemoryLog, kinds: Sequence[str | None], index: int) -> bool:
    return kinds[index] is not None and log.storages[index].device != FILE


def looked_at(mesh: Mapping[str, int]) -> list[int]:
    """The ranks that represent all, ascending; their number does not grow with the mesh.

    Shards along an axis are largest on its first rank and smallest on its last, so these are the
    first rank, the last rank along each axis and along all of them.  If an axis cuts layers, the
    neighbours of its ends are included, since the ends also hold the embedding and the head.
    """
    stages, stride, found = axes.cutting("layers"), 1, {0, math.prod(mesh.values()) - 1}
    for name, size in reversed([*mesh.items()]):
        near = {1, size - 2, size - 1} if name == stages else {size - 1}
        found |= {place * stride for place in near if 0 <= place < size}
        stride *= size
    return sorted(found)


# --------------------------------------------------------------------------------------- tables


def memory_table(title: str, found: Figures, notes: Sequence[str] = ()) -> Table:
    """Bytes of each class at the peak of each phase, and after the update."""
    rows = []
    for kind in found.kinds:
        sizes = [found.peaks.get((phase, kind), 0) for phase in PHASES]
        name = "at one moment" if kind == _ALL else kind.replace("_", " ")
        rows.append((name, *map(_size, [*sizes, found.kept.get(kind, 0)])))
    if found.host:
        rows.append(("in host memory", *[""] * len(PHASES), _size(found.host)))
    columns = ("GB", *(f"peak in {phase}" for phase in PHASES), "after update")
    return Table(title, columns, rows, notes=notes, align="lrrrr")


def held_table(found: Figures) -> Table:
    """The largest groups of storages at the peak; the last row adds up the rest."""
    named, rest = found.held[:_MOST_NAMED], found.held[_MOST_NAMED:]
    rows = [
        (one.kind.replace("_", " "), one.made_by or "-", one.phase, f"{one.storages:,}", _size(b))
        for one in named
        for b in (one.bytes,)
    ]
    if rest:
        count, size = sum(one.storages for one in rest), sum(one.bytes for one in rest)
        rows.append(("all others", "", "", f"{count:,}", _size(size)))
    title = f"In memory at the peak, in {found.phase}: {_size(found.peak)} GB"
    headings = ("class", "made by", "in", "storages", "GB")
    return Table(title, headings, rows, align="lllrr")


def traffic_table(found: Figures) -> Table:
    """Bytes that the rank sends in the step."""
    rows = [
        (operation.replace("_", "-"), axis, phase, f"{found.calls[key]:,}", _size(size))
        for key, size in found.sent.items()
        for operation, axis, phase in (key,)
    ]
    title = f"Sent in the step: {_size(sum(found.sent.values()))} GB"
    return Table(title, ("operation", "axis", "in", "calls", "GB"), rows, align="lllrr")


#: How operators become kernels, in words.
_KERNELS = {"eager": "one per operator", "fused": "fused between products"}


def time_table(found: Mapping[str, StepTime], machine: Machine) -> Table:
    """Seconds of the step by :data:`_KERNELS`, and how the rank spends them."""
    rows = [
        (
            _KERNELS[kernels],
            *(f"{seconds:,.4f}" for seconds in (one.seconds, one.compute, one.exposed, one.idle)),
            f"{one.tokens_per_second:,.0f}",
            f"{one.share_of_peak:.1%}",
        )
        for kernels, one in found.items()
    ]
    first = next(iter(found.values()))
    title = f"Seconds of the step on {first.world:,} x {machine.name}, {machine.node} a node"
    notes = [
        machine.says,
        f"of peak: {first.peak / 1e12:,.1f} TFLOP/s, the peak in the dtype of most products",
        f"slowest simulated rank: {first.rank:,}; with all communication hidden: "
        + " or ".join(f"{one.least:,.4f}" for one in found.values()),
        *([first.unknown] if first.unknown else []),
    ]
    columns = ("kernels", "seconds", "compute", "exposed", "idle", "tokens/s", "of peak")
    return Table(title, columns, rows, notes=notes, align="lrrrrrr")


def exact_time_table(found: Mapping[str, StepTime], machine: Machine) -> Table:
    """The same for programs, exactly: seconds, FLOPs of the rank and of the model, tokens."""
    names = (
        *("seconds", "compute", "exposed", "idle", "communication", "least", "flops"),
        *("model_flops", "peak", "tokens", "share_of_peak", "tokens_per_second"),
    )
    rows = [
        (machine.name, kernels, str(one.rank), *(repr(getattr(one, name)) for name in names))
        for kernels, one in found.items()
    ]
    return Table("Seconds of the step", ("machine", "kernels", "rank", *names), rows)


def _size(size: Fraction | int) -> str:
    return f"{float(size) / 1e9:,.3f}"


def broken_table(wrong: Sequence[str]) -> Table:
    """Promises that ranks break, one a row."""
    rows = [tuple(text.split(": ", 1)) for text in wrong]
    return Table("Broken promises", ("rank", "problem"), rows)


def left_out_table(parts: Sequence[str]) -> Table:
    """Parts of memory and traffic that no formula judges."""
    return Table("Not judged", ("part",), [(part,) for part in parts])


def exact_tables(found: Sequence[Figures]) -> Iterator[Table]:
    """Every figure of every simulated rank in bytes, for programs."""
    memory: list[tuple[str, ...]] = [
        (str(one.rank), "peak", phase, kind, str(size))
        for one in found
        for (phase, kind), size in one.peaks.items()
    ]
    for one in found:
        memory += [(str(one.rank), "kept", _AFTER, *map(str, item)) for item in one.kept.items()]
        memory.append((str(one.rank), "kept", _AFTER, "host", str(one.host)))
    yield Table("Memory in bytes", ("rank", "moment", "where", "class", "bytes"), memory)
    held = [(str(one.rank), *map(str, each)) for one in found for each in one.held]
    yield Table("At the peak in bytes", ("rank", "class", *Held._fields[1:]), held)
    sent = [
        (str(one.rank), *key, str(one.calls[key]), str(size))
        for one in found
        for key, size in one.sent.items()
    ]
    headings = ("rank", "operation", "axis", "phase", "calls", "bytes")
    yield Table("Sent in bytes", headings, sent)
