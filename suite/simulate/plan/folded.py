"""The memory of a rank with many equal layers, to the byte, from simulations with few of them.

A stage of 40 layers allocates and frees what one of 3 layers does, with parts of the log repeated.
So the code runs with n, n + 1 and n + 2 layers a stage.  The first two give the parts that one more
layer inserts; the third has to be reproduced event for event, or the fold is refused and all layers
are run.  The log of all layers follows, and its peak:

    n       A  f  B  b  C             events of a step, f and b of a layer's forward and backward
    n + 1   A  f  f  B  b  b  C       insertions: f behind A f, b behind B b
    L       A  f ... f  B  b ... b  C

A part that is repeated adds the same bytes each time, so its peak is in its first or in its last
repetition.  In the same way more micro-batches than :func:`enough` repeat what is there: a
simulation with one more says by how many bytes the peak then grows, such as a loss for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardproof import axes
from shardproof.contract import Batch
from shardproof.costs.shapes import BatchSize
from shardproof.ledgers.memory.log import FILE, MemoryLog
from shardproof.ledgers.memory.summary import PHASES
from shardproof.simulate.rank import SimulatedRank, simulate
from shardproof.simulate.sources import ShapeSource

#: Fewest layers a stage that a fold begins with, and the most.
_FIRST, _LAST = 1, 2
#: Layers times micro-batches of a rank that are run whole where they do not fold.
_SHORT = 32
#: Parts that one layer adds to a run of one phase, and lengths of one that are tried.
_MOST_PARTS, _LENGTHS = 12, 3
#: Bytes by which one more micro-batch may raise a peak: losses and counts, no tensor of a layer.
_MOST_GROWTH = 1024


class Event(NamedTuple):
    """``bytes`` more in ``phase``."""

    phase: str
    bytes: int


class Insertion(NamedTuple):
    """``events`` that one more layer adds in front of event ``at``."""

    at: int
    events: tuple[Event, ...]


class DoesNotFold(ValueError):
    """Logs of few layers do not tell that of many; the message says why."""


@dataclass(frozen=True)
class Trace:
    """The counted events of a rank's last step; ``base``: bytes that it begins with."""

    base: int
    events: tuple[Event, ...]

    @property
    def peak(self) -> int:
        """Most bytes in a phase of the step."""
        return Folded(self, (), 0).peak(0)


@dataclass(frozen=True)
class Folded:
    """``trace`` of the fewest layers, and what every further layer inserts and adds to ``base``."""

    trace: Trace
    insertions: tuple[Insertion, ...]
    base: int

    def peak(self, more: int) -> int:
        """Most bytes with so many ``more`` layers."""
        level = most = self.trace.base + more * self.base
        queue = list(self.insertions)
        for number, event in enumerate((*self.trace.events, None)):
            while queue and queue[0].at == number:
                inner = highest = 0
                for one in queue.pop(0).events:
                    inner += one.bytes
                    highest = max(highest, inner) if one.phase in PHASES else highest
                if more:
                    # The level moves by ``inner`` a time: the last time is highest, or the first.
                    most = max(most, level + highest + max(0, (more - 1) * inner))
                level += more * inner
            if event is not None:
                level += event.bytes
                most = max(most, level) if event.phase in PHASES else most
        return most


def trace(log: MemoryLog, step: int) -> Trace:
    """The events of ``step``; storages that are not the implementation's are not counted."""
    kinds, sizes = log.classes(), dict[int, int]()
    base, events = 0, list[Event]()
    for index, size, phase, of_step in log.events:
        if index < 0 or kinds[index] is None or log.storages[index].device == FILE:
            continue
        more, sizes[index] = size - sizes.get(index, 0), size
        if of_step < step:
            base += more
        elif more:
            events.append(Event(phase, more))
    return Trace(base, tuple(events))


def insertions(few: Sequence[Event], more: Sequence[Event]) -> tuple[Insertion, ...]:
    """The parts of ``more`` that are not in ``few``, which has all others in the same order.

    :raises DoesNotFold: there are no such parts.
    """
    #     few    F F F | B B | F F F | B B       runs of one phase: those of a micro-batch; a layer
    #     more   F F F F F | B B B B | ...       more makes each of them longer, none more
    own, other = _runs(few), _runs(more)
    if [phase for phase, _ in own] != [phase for phase, _ in other]:
        raise DoesNotFold("one more layer changes the order of phases")
    found, at = list[Insertion](), 0
    for (_, short), (_, long) in zip(own, other, strict=True):
        parts = _inserted(short, long)
        if parts is None:
            raise DoesNotFold("one more layer changes what the others allocate")
        found += [Insertion(at + place, events) for place, events in parts]
        at += len(short)
    return tuple(found)


def _runs(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    grouped = itertools.groupby(events, key=lambda event: event.phase)
    return [(phase, list(of)) for phase, of in grouped]


def _inserted(
    few: Sequence[Event], more: Sequence[Event], at: int = 0, other: int = 0, parts: int = 0
) -> list[tuple[int, tuple[Event, ...]]] | None:
    """Place and events of each part that ``more`` has in addition; ``None``: it has others."""
    same = _alike(few, at, more, other)
    at, other = at + same, other + same
    left = len(more) - other - (len(few) - at)
    if left < 0 or (left == 0 and at < len(few)) or parts > _MOST_PARTS:
        return None
    if left == 0:
        return []
    # Parts repeat, so several lengths agree for a while: those first that agree longest.
    longest = sorted(range(1, left + 1), key=lambda n: (-_alike(few, at, more, other + n), n))
    for count in longest[:_LENGTHS]:
        rest = _inserted(few, more, at, other + count, parts + 1)
        if rest is not None:
            return [(at, tuple(more[other : other + count])), *rest]
    return None


def _alike(few: Sequence[Event], at: int, more: Sequence[Event], other: int) -> int:
    """How many events agree from these two places on."""
    most, number = min(len(few) - at, len(more) - other), 0
    while number < most and few[at + number] == more[other + number]:
        number += 1
    return number


def fold(traces: Sequence[Trace]) -> Folded:
    """The fold of three traces with one layer more each.

    :raises DoesNotFold: the third is not what the first two tell.
    """
    first, second, third = traces
    parts = insertions(first.events, second.events)
    found = Folded(first, parts, second.base - first.base)
    told, begin = list[Event](), 0
    for part in parts:
        told += [*first.events[begin : part.at], *part.events * 2]
        begin = part.at
    told += first.events[begin:]
    if tuple(told) != third.events or third.base != first.base + 2 * found.base:
        raise DoesNotFold("allocations of a third layer differ from those of the second")
    return found


# ------------------------------------------------------------------------------------ simulations


class Warmed(ShapeSource):
    """A source whose steps before the last, which only make the optimizer's state, are short."""

    def batch(self, rank: int, step: int) -> Batch:
        """The share of ``rank`` in ``step``: one micro-batch at first, where there are no stages."""
        whole = super().batch(rank, step)
        if step == self.steps - 1 or axes.parts(self.axes, "layers") > 1:
            return whole
        return replace(whole, windows=(whole.windows[0][:1],))


class Peak(NamedTuple):
    """Most bytes that a rank of ``stage`` holds; ``layers``: how many layers a stage were run."""

    stage: int
    bytes: int
    layers: int


def ends(mesh: Mapping[str, int]) -> list[int]:
    """The ranks that hold most: of the first and the last stage the first along other axes.

    Shards and parts of layers are as even as possible, larger ones first.  The first stage has the
    embedding and most micro-batches in flight, the last one the head and the loss.
    """
    stages = axes.parts(mesh, "layers")
    apart = math.prod(mesh.values()) // stages
    return [0, (stages - 1) * apart] if stages > 1 else [0]


def peaks(
    source: ShapeSource,
    chunks: int,
    enough: int,
    began: Callable[[str], None] = lambda what: None,
    is_whole: bool = False,
) -> list[Peak]:
    """The peaks of the ranks that hold most.

    ``chunks``: stages of a rank, over which its layers are divided; ``enough``: micro-batches from
    which on more change nothing but losses.  ``is_whole``: run all layers and all micro-batches.
    """
    stages = axes.parts(source.axes, "layers") * chunks
    ranks, layers = ends(source.axes), source.shape.layers
    few = min(enough, source.work.micro_batches)
    # A stage has a layer more than another where they do not divide; the first stages have it.
    least, extra = divmod(layers, stages)
    runs = dict[tuple[int, int], list[Trace]]()

    def run(of_stage: int, micro_batches: int) -> list[Trace]:
        key = of_stage, micro_batches
        if key not in runs:
            began(f"{of_stage} of {-(-layers // stages)} layers a stage")
            runs[key] = _traces(source, of_stage * stages, micro_batches, ranks)
        return runs[key]

    if not is_whole and not (extra and chunks > 1) and least > _FIRST + 2:
        for begin in range(_FIRST, _LAST + 1):
            three = [run(begin + n, few) for n in range(3)]
            try:
                folds = [fold([of[place] for of in three]) for place in range(len(ranks))]
            except DoesNotFold:
                continue
            growth = _growth(run, begin, few, source.work.micro_batches)
            if growth is None:
                break
            own = [least + (stage < extra) for stage in (0, stages - 1)]
            return [
                Peak(rank, one.peak(chunks_of - begin) + more, begin + 2)
                for rank, one, chunks_of, more in zip(ranks, folds, own, growth, strict=False)
            ]
    if not is_whole and min(enough, source.work.micro_batches) * layers // stages > _SHORT:
        raise DoesNotFold("the log of few layers does not tell that of all; --exact runs them all")
    began("all layers")
    every = source.work.micro_batches if is_whole else few
    whole = _traces(source, layers, every, ranks)
    return [
        Peak(rank, one.peak, -(-layers // stages)) for rank, one in zip(ranks, whole, strict=True)
    ]


def _growth(
    run: Callable[[int, int], list[Trace]], layers: int, few: int, micro_batches: int
) -> list[int] | None:
    """Bytes that all ``micro_batches`` add to the peaks of ``few``; ``None``: more than losses."""
    base = run(layers, few)
    if micro_batches == few:
        return [0] * len(base)
    # Schedules may take multiples only: as many as there are once more.
    step = few if micro_batches % few == 0 and micro_batches > few else 1
    more = run(layers, few + step)
    grown = [one.peak - other.peak for one, other in zip(more, base, strict=True)]
    if any(not 0 <= each <= _MOST_GROWTH * step for each in grown):
        return None
    return [-(-each * (micro_batches - few) // step) for each in grown]


def _traces(
    source: ShapeSource, layers: int, micro_batches: int, ranks: Sequence[int]
) -> list[Trace]:
    shape = replace(source.shape, layers=layers, parameters=0, rounded=False)
    work = BatchSize(source.work.samples, source.work.positions, micro_batches)
    fields = {**vars(source), "shape": shape, "work": work}
    made: list[SimulatedRank] = simulate(Warmed(**fields), ranks)
    return [trace(one.log, len(one.calls) - 1) for one in made]
