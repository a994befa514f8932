"""The memory of a rank with many equal layers, from simulations of the same rank with few of them.

The code runs with n, n + 1 and n + 2 layers a stage.  A step is a row of *runs*, each of one phase
(the forward of a micro-batch, its backward, the update); a layer more makes a run longer.  A moment
inside of a run lies between its begin and its end: some layers are done, and the others are not.
So what a layer adds to it is between what it adds to the begin and to the end, or to the peak:

    bytes with L layers  <=  peak of the run with n + 2  +  (L - n - 2) x the largest of the three

This is exact where the peak itself grows fastest, as it does wherever the end or the begin of a run
is its peak, and a bound from above elsewhere: what is said to fit, fits.  Begin and end must grow
by the same bytes from n to n + 1 as to n + 2, and the peak by no more than they or it did before,
or the law is refused.  In the same way more micro-batches than *enough* add losses: a simulation
with more says how many bytes.
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

#: Fewest layers a stage that the law begins with, and the most.
_FIRST, _LAST = 2, 2
#: Layers times micro-batches of a rank that are run whole where the law does not hold.
_SHORT = 32
#: Bytes by which one more micro-batch may raise a peak: losses and counts, no tensor of a layer.
_MOST_GROWTH = 1024


class Run(NamedTuple):
    """Bytes that a rank holds when a run of one phase begins, at most, and when it ends."""

    phase: str
    begin: int
    peak: int
    end: int


class DoesNotFold(ValueError):
    """Logs of few layers do not tell that of many; the message says why."""


@dataclass(frozen=True)
class Trace:
    """The runs of a rank's last step."""

    runs: tuple[Run, ...]

    @property
    def peak(self) -> int:
        """Most bytes in a phase of the step."""
        return max((run.peak for run in self.runs if run.phase in PHASES), default=0)


def trace(log: MemoryLog, step: int) -> Trace:
    """The runs of ``step``; storages that are not the implementation's are not counted."""
    kinds, sizes = log.classes(), dict[int, int]()
    level, levels = 0, list[tuple[str, int, int]]()
    for index, size, phase, of_step in log.events:
        if index < 0 or kinds[index] is None or log.storages[index].device == FILE:
            continue
        before, more = level, size - sizes.get(index, 0)
        level, sizes[index] = level + more, size
        if of_step == step and more:
            levels.append((phase, before, level))
    runs = []
    for phase, found in itertools.groupby(levels, key=lambda event: event[0]):
        own = list(found)
        begin = own[0][1]
        runs.append(Run(phase, begin, max(begin, *(at for _, _, at in own)), own[-1][2]))
    return Trace(tuple(runs))


def extended(traces: Sequence[Trace], more: int) -> int:
    """Most bytes with so many ``more`` layers than the last of three traces has.

    :raises DoesNotFold: the second layer adds another number of bytes than the third.
    """
    if len({tuple(run.phase for run in one.runs) for one in traces}) > 1:
        raise DoesNotFold("one more layer changes the order of phases")
    most = 0
    for first, second, third in zip(*(one.runs for one in traces), strict=True):
        before = [b - a for a, b in zip(first[1:], second[1:], strict=True)]
        begin, peak, end = (c - b for b, c in zip(second[1:], third[1:], strict=True))
        # At the ends of the model something more is under way, which matters less and less.
        if [begin, end] != [before[0], before[2]] or peak > max(begin, before[1], end):
            raise DoesNotFold("the bytes of a second layer differ from those of a third")
        if third.phase in PHASES:
            most = max(most, third.peak + more * max(0, begin, peak, end))
    return most


# ------------------------------------------------------------------------------------ simulations


class Warmed(ShapeSource):
    """A source whose steps before the last, which only make the optimizer's state, are short."""

    def batch(self, rank: int, step: int) -> Batch:
        """The share of ``rank``; without stages one micro-batch in all steps but the last."""
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
            growth = _growth(run, begin, few, source.work.micro_batches)
            if growth is None:
                break
            own = [least + (stage < extra) for stage in (0, stages - 1)][: len(ranks)]
            try:
                sizes = [
                    extended([of[place] for of in three], layers_of - begin - 2)
                    for place, layers_of in enumerate(own)
                ]
            except DoesNotFold:
                continue
            return [
                Peak(rank, size + more, begin + 2)
                for rank, size, more in zip(ranks, sizes, growth, strict=True)
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
