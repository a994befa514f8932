"""What a simulated rank held at most and sent in its last step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from shardproof import axes
from shardproof.ledgers.memory.log import MemoryLog
from shardproof.ledgers.memory.summary import PHASES, summary
from shardproof.simulate.rank import SimulatedRank
from shardproof.table import Table

_ALL = "all"
#: Storages that the table of the peak names.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Figures:
    """Of one rank, in bytes: ``peaks`` by phase and class, ``kept`` by class after the update,
    ``sent`` by operation, axis and phase; ``held``: what lies in memory at the peak, by class,
    operator that made it and phase, with how many storages.
    """

    rank: int
    peaks: Mapping[tuple[str, str], int]
    kept: Mapping[str, int]
    sent: Mapping[tuple[str, str, str], Fraction]
    calls: Mapping[tuple[str, str, str], int]
    held: Sequence[tuple[str, str, str, int, int]]

    @property
    def peak(self) -> int:
        """Most bytes that the rank held at once."""
        return max((size for (_, kind), size in self.peaks.items() if kind == _ALL), default=0)

    @property
    def phase(self) -> str:
        """The phase in which it held them."""
        return max(PHASES, key=lambda phase: self.peaks.get((phase, _ALL), 0))


def figures(made: SimulatedRank) -> Figures:
    """Of the last step of ``made``."""
    last = len(made.calls) - 1
    rows = [row for row in summary(made.log) if row.step == last]
    peaks = {(row.where, row.kind): row.bytes for row in rows if row.moment == "peak"}
    kept = {row.kind: row.bytes for row in rows if row.where == "after_update"}
    sent, calls = dict[tuple[str, str, str], Fraction](), Counter[tuple[str, str, str]]()
    for call in made.calls[-1]:
        if call.phase != "observe":
            key = call.operation, call.axis, call.phase
            sent[key] = sent.get(key, Fraction()) + call.logical_bytes
            calls[key] += 1
    return Figures(made.rank, peaks, kept, sent, calls, _held(made.log, last))


def _held(log: MemoryLog, step: int) -> list[tuple[str, str, str, int, int]]:
    """The storages at the highest moment of ``step``, together by what made them."""
    kinds, sizes, best = log.classes(), dict[int, int](), dict[int, int]()
    total = most = 0
    for index, size, phase, number in log.events:
        if index >= 0 and kinds[index] is not None:
            total += size - sizes.get(index, 0)
            sizes[index] = size
        if number == step and phase in PHASES and total > most:
            most, best = total, dict(sizes)
    groups = dict[tuple[str, str, str], list[int]]()
    for index, size in best.items():
        if size:
            storage = log.storages[index]
            made_by = storage.operation.removeprefix("aten::").partition(".")[0]
            groups.setdefault((str(kinds[index]), made_by, storage.phase), []).append(size)
    lines = [(*key, sum(of), len(of)) for key, of in groups.items()]
    return sorted(lines, key=lambda line: -line[3])


def looked_at(mesh: Mapping[str, int]) -> Iterator[int]:
    """The ranks that stand for all: the first and the last one along each axis, and the second and
    the last but one where layers are divided, since ends of a pipeline hold embedding and head.
    """
    names = list(mesh)
    dividing = axes.dividing(mesh)
    ends = []
    for name in names:
        size = mesh[name]
        near = {0, 1, size - 2, size - 1} if name in dividing else {0, size - 1}
        ends.append(sorted(n for n in near if 0 <= n < size))
    strides = [1]
    for name in reversed(names[1:]):
        strides.insert(0, strides[0] * mesh[name])
    for place in itertools.product(*ends):
        yield sum(at * stride for at, stride in zip(place, strides, strict=True))


def memory_table(title: str, found: Figures) -> Table:
    """Bytes of each class at the peak of each phase, and after the update."""
    kinds = dict.fromkeys(kind for _, kind in found.peaks if kind != _ALL)
    kinds |= dict.fromkeys(kind for kind in found.kept if kind != _ALL)
    rows = []
    for kind in [*kinds, _ALL]:
        sizes = [found.peaks.get((phase, kind), 0) for phase in PHASES]
        name = "together" if kind == _ALL else kind.replace("_", " ")
        rows.append((name, *(f"{size / 1e9:,.3f}" for size in [*sizes, found.kept.get(kind, 0)])))
    notes = ("each class at its own highest moment; together: at one moment",)
    columns = ("GB", *(f"peak in {phase}" for phase in PHASES), "after the update")
    return Table(title, columns, rows, notes=notes, align="lrrrr")


def held_table(found: Figures) -> Table:
    """The largest of what lies in memory at the peak."""
    rows = [
        (kind.replace("_", " "), operation or "-", phase, str(count), f"{size / 1e9:,.3f}")
        for kind, operation, phase, size, count in found.held[:_MOST_NAMED]
    ]
    title = f"In memory at the peak, in {found.phase}: {found.peak / 1e9:,.2f} GB"
    return Table(title, ("class", "made by", "in", "tensors", "GB"), rows, align="lllrr")


def traffic_table(found: Figures) -> Table:
    """Bytes that the rank sends in the step."""
    rows = [
        (operation, axis, phase, str(found.calls[operation, axis, phase]), f"{size / 10**9:,.3f}")
        for (operation, axis, phase), size in (
            (key, float(value)) for key, value in found.sent.items()
        )
    ]
    total = float(sum(found.sent.values()))
    title = f"Sent in the step: {total / 1e9:,.2f} GB"
    return Table(title, ("operation", "axis", "in", "calls", "GB"), rows, align="lllrr")
