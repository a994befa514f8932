"""The memory of a rank with many equal layers, from simulations of the same rank with few of them.

Layers.  The code runs with 1, 2 and 3 layers a stage.  A step is a row of *runs*, each of one phase
(the forward of some micro-batches, a backward, the update); a layer more makes a run longer.  A
moment inside of a run lies between its begin and its end: some layers are done, and the others are
not.  So what a layer adds to it is between what it adds to the begin and the end, or to the peak:

    bytes with L layers  <=  peak of the run with n  +  (L - n) x the largest of the three

This is exact where the peak itself grows fastest, as it does wherever the end or the begin of a run
is its peak, and a bound from above elsewhere.  Begin and end must grow by the same bytes from the
first of three numbers of layers to the second as from there to the third, but for padding, and the
peak by no more than they or it did before.  Else larger numbers are tried; then it is refused.

Stages.  A rank of P stages runs the program of a rank of 2 stages with more micro-batches in
flight.  Each of them holds the same bytes from its forward to its backward, so no moment needs more
than the same moment of 2 stages and, for each further one in flight, what 3 stages add to it:

    bytes with P stages  <=  bytes with 2  +  (held(P) - held(2)) x what one in flight adds

``held`` is the closed form of the schedule; the forward phase ends with all of them in flight, so
what one adds is read off there.

Micro-batches.  More of them than fill the pipeline add losses and counts: a simulation with more
says how many bytes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardproof import axes
from shardproof.costs.schedules import FORMS, Setting
from shardproof.costs.shapes import BatchSize
from shardproof.costs.stages import V_SHAPED
from shardproof.ledgers.memory.log import FILE, MemoryLog
from shardproof.ledgers.memory.summary import PHASES
from shardproof.simulate.rank import simulate
from shardproof.simulate.sources import ShapeSource, accepted

#: Fewest layers a stage that the law begins with, and the most.
_FIRST, _LAST = 1, 2
#: Ranks of a short pipeline that stands for a longer one, and of that which has one more in flight.
_SHORT, _NEXT = 2, 3
#: How many times the memory two numbers of layers must show, so that a third is not tried.
_SURELY = 1.05
#: Layers times micro-batches of a rank that are run whole where the law does not hold.
_WHOLE = 32
#: Bytes by which the padding of shards may differ between two numbers of layers.
_PADDING = 256
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


class TooLarge(ValueError):
    """Two numbers of layers already show that all of them need more memory: ``bytes``, about."""

    def __init__(self, size: int) -> None:
        super().__init__(f"about {size:,} bytes")
        self.bytes = size


@dataclass(frozen=True)
class Trace:
    """The runs of a rank's last step."""

    runs: tuple[Run, ...]

    @property
    def peak(self) -> int:
        """Most bytes in a phase of the step."""
        return max((run.peak for run in self.runs if run.phase in PHASES), default=0)

    def of(self, phase: str) -> int:
        """Most bytes in ``phase``."""
        return max((run.peak for run in self.runs if run.phase == phase), default=0)


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
    rows = [[run for run in one.runs if run.phase in PHASES] for one in traces]
    if len({tuple(run.phase for run in row) for row in rows}) > 1:
        raise DoesNotFold("one more layer changes the order of phases")
    most = 0
    for first, second, third in zip(*rows, strict=True):
        before = [b - a for a, b in zip(first[1:], second[1:], strict=True)]
        now = [c - b for b, c in zip(second[1:], third[1:], strict=True)]
        # Padded shards of a layer more are some bytes longer or shorter, in turns.
        same = all(abs(before[n] - now[n]) <= _PADDING for n in (0, 2))
        begin, end = (max(before[n], now[n]) for n in (0, 2))
        peak = min(max(before[1], now[1]), now[1] + _PADDING)
        # At the ends of the model something more is under way, which matters less and less.
        if not same or now[1] > max(begin, before[1], end) + _PADDING:
            raise DoesNotFold("the bytes of a second layer differ from those of a third")
        most = max(most, third.peak + more * max(0, begin, peak, end))
    return most


def at_least(one: Trace, other: Trace, more: int) -> int:
    """Bytes that so many ``more`` layers than ``other`` need, which has one more than ``one``.

    A layer is counted by what it adds to the begin and to the end of a run: one that is gathered
    there, and freed before the next, is no growth.  0: the phases differ.
    """
    if [run.phase for run in one.runs] != [run.phase for run in other.runs]:
        return 0
    return max(
        (
            b.peak + more * min(b.begin - a.begin, b.end - a.end, b.peak - a.peak)
            for a, b in zip(one.runs, other.runs, strict=True)
            if b.phase in PHASES
        ),
        default=0,
    )


# ------------------------------------------------------------------------------------ simulations


class Peak(NamedTuple):
    """Most bytes that ``rank`` holds; ``layers``: how many layers a stage were run.

    ``is_exact``: the rank ran all its layers and stages, so this is no bound but what it holds.
    """

    rank: int
    bytes: int
    layers: int
    is_exact: bool


def ends(mesh: Mapping[str, int], schedule: str) -> list[int]:
    """The ranks that hold most: of the first and the last stage the first along other axes.

    Shards and parts of layers are as even as possible, larger ones first.  The first stage has the
    embedding and most micro-batches in flight, the last one the head and the loss.  Where both lie
    on the first rank, and all ranks have as many in flight, that rank has no less than any other.
    """
    stages = axes.parts(mesh, "layers")
    apart = math.prod(mesh.values()) // stages
    return [0, (stages - 1) * apart] if stages > 1 and schedule not in V_SHAPED else [0]


@dataclass
class Folded:
    """The simulations of one source.

    ``chunks``: stages of a rank, over which its layers are divided; ``memory``: bytes of a rank, if
    plans that need more are of no interest; ``began`` hears what begins.
    """

    source: ShapeSource
    schedule: str
    chunks: int
    began: Callable[[str], None] = lambda what: None
    memory: int = sys.maxsize
    #: Stages, layers of each and micro-batches -> a trace of each rank that holds most.
    runs: dict[tuple[int, int, int], list[Trace]] = field(default_factory=dict)

    @cached_property
    def stages(self) -> int:
        """Ranks along the axis of stages."""
        return axes.parts(self.source.axes, "layers")

    @cached_property
    def layers(self) -> list[int]:
        """The layers of a stage, on each rank that holds most: the most of its stages."""
        total = self.stages * self.chunks
        least, extra = divmod(self.source.shape.layers, total)
        places = range(self.stages)[:: max(1, self.stages - 1)][: len(self.ranks)]
        return [
            least + any(place + n * self.stages < extra for n in range(self.chunks))
            for place in places
        ]

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that hold most."""
        return ends(self.source.axes, self.schedule)

    def held(self, stages: int, place: int) -> int:
        """Micro-batches of a stage in flight, once for each chunk, on rank ``place`` of stages."""
        if stages == 1:
            return self.chunks
        form = FORMS.get(self.schedule)
        found = form.held(Setting(stages, 10**6, self.chunks), place) if form else None
        if found is None:
            raise DoesNotFold(f"no closed form says how many micro-batches {self.schedule} holds")
        return found

    def few(self, stages: int) -> int:
        """Micro-batches that fill ``stages``, and one more, which finds gradients that are there.

        Without stages the last one has nothing to gather for the next, so one lies between.  No
        more than there are.
        """
        flying = -(-self.held(stages, 0) // self.chunks)
        # Where the last rank holds several, gradients of weights come later, or chunks take turns:
        # that is full with 2 P - 1 (Qi et al., 2401.10241, section 6).
        is_late = stages > 1 and self.held(stages, stages - 1) > 1
        least = max(flying + 1, 2 * stages) if is_late else flying + 1
        count = accepted(self.source, stages, least if stages > 1 else 3)
        return min(count, self.source.work.micro_batches)

    def traced(self, stages: int, of_stage: int, micro_batches: int) -> list[Trace]:
        """Traces of a world of ``stages``, with ``of_stage`` layers each."""
        key = stages, of_stage, micro_batches
        if key not in self.runs:
            what = f"{of_stage} of {max(self.layers)} layers a stage"
            self.began(what + f", {stages} of {self.stages} stages" * (stages > 1))
            self.runs[key] = self._simulated(stages, stages * self.chunks * of_stage, micro_batches)
        return self.runs[key]

    def _simulated(self, stages: int, layers: int, micro_batches: int) -> list[Trace]:
        source, along = self.source, axes.cutting("layers")
        mesh = {name: stages if name == along else n for name, n in source.axes.items()}
        fields = {
            **vars(source),
            "axes": mesh,
            "shape": replace(source.shape, layers=layers, parameters=0, rounded=False),
            "work": BatchSize(source.work.samples, source.work.positions, micro_batches),
        }
        made = simulate(ShapeSource(**fields), ends(mesh, self.schedule), notes_work=False)
        return [trace(one.log, len(one.calls) - 1) for one in made]

    # --------------------------------------------------------------------------------- the laws

    def whole(self) -> list[Peak]:
        """All layers, stages and micro-batches."""
        self.began("all layers and micro-batches")
        work = self.source.work.micro_batches
        found = self._simulated(self.stages, self.source.shape.layers, work)
        return self._peaks([one.peak for one in found], max(self.layers), is_exact=True)

    def _peaks(self, sizes: Sequence[int], layers: int, is_exact: bool) -> list[Peak]:
        return [
            Peak(rank, size, layers, is_exact) for rank, size in zip(self.ranks, sizes, strict=True)
        ]

    def bounded(self) -> list[Peak]:
        """Bounds from above, by the laws of the module.

        :raises DoesNotFold: a law does not hold.
        """
        mixture = self.source.shape.mixture
        if mixture is not None and mixture.dense:
            # A dense layer may hold more or less than a mixture, by how many ranks divide experts.
            raise DoesNotFold("its first layers are dense and the others mixtures")
        full = self.few(self.stages)
        # With fewer micro-batches than fill the pipeline, they are in flight, not as many as held.
        can_shorten = self.stages > _NEXT and full < self.source.work.micro_batches
        stages = _SHORT if can_shorten else self.stages
        few = self.few(stages) if can_shorten else full
        last = min(_FIRST + 2, max(self.layers))
        losses = self._losses(stages, few)  # the law that costs least comes first
        sizes = self._over_layers(stages, few)
        flying = [0] * len(sizes) if stages == self.stages else self._flying(few)
        # Shards of other ranks, and of all layers, may be padded by more than those that ran.
        padding = _PADDING * (max(self.layers) * self.chunks + 2)
        together = [sum(parts) + padding for parts in zip(sizes, flying, losses, strict=True)]
        return self._peaks(together, last, is_exact=False)

    def _over_layers(self, stages: int, few: int) -> list[int]:
        most = max(self.layers)
        if most <= _FIRST + 1:
            return [one.peak for one in self.traced(stages, most, few)]
        for begin in range(_FIRST, _LAST + 1):
            if begin + 2 > most:
                return [one.peak for one in self.traced(stages, most, few)]
            two = [self.traced(stages, begin + n, few) for n in range(2)]
            self._require_fits(two, begin + 1)
            three = [*two, self.traced(stages, begin + 2, few)]
            try:
                return [
                    extended([of[place] for of in three], max(0, layers - begin - 2))
                    for place, layers in enumerate(self.layers)
                ]
            except DoesNotFold as error:
                reason = error
        raise reason

    def _require_fits(self, two: Sequence[Sequence[Trace]], last: int) -> None:
        """Require that two numbers of layers, ``last`` the larger one, do not show too much.

        :raises TooLarge: they do.
        """
        for place, layers in enumerate(self.layers):
            one, other = (traces[place] for traces in two)
            size = at_least(one, other, layers - last)
            if size > _SURELY * self.memory:
                raise TooLarge(size)

    def _flying(self, few: int) -> list[int]:
        """Bytes of the micro-batches that are in flight in all stages, and not in two.

        :raises DoesNotFold: another layer takes bytes away.
        """
        # With one layer and with two: the layers are equal, as the law of layers has found.
        own = [min(n, self.layers[0]) for n in (1, 2)]
        added = [self._added(layers, few) for layers in own]
        found = []
        for place, layers in enumerate(self.layers):
            along = 0 if place == 0 else -1
            short, all_ = (
                self.held(stages, range(stages)[along]) for stages in (_SHORT, self.stages)
            )
            one, two = (each[place] for each in added)
            if two < one:
                raise DoesNotFold("a second layer holds less in flight than the first")
            found.append(max(0, all_ - short) * math.ceil(one + (layers - own[0]) * (two - one)))
        return found

    def _added(self, layers: int, few: int) -> list[float]:
        """Bytes that one more stage of a micro-batch in flight adds, on each rank."""
        short = self.traced(_SHORT, layers, few)
        long = self.traced(_NEXT, layers, self.few(_NEXT))
        found = []
        for place, (one, other) in enumerate(zip(short, long, strict=True)):
            along = 0 if place == 0 else -1
            more = self.held(_NEXT, range(_NEXT)[along]) - self.held(_SHORT, range(_SHORT)[along])
            grown = max(other.of(phase) - one.of(phase) for phase in ("forward", "backward"))
            if more <= 0 < grown - _MOST_GROWTH:
                raise DoesNotFold("a stage more adds bytes where it adds no micro-batch in flight")
            found.append(max(0, grown) / max(1, more))
        return found

    def _losses(self, stages: int, few: int) -> list[int]:
        """Bytes that all micro-batches add to those of ``few``.

        :raises DoesNotFold: more than losses.
        """
        count = self.source.work.micro_batches
        if count <= few:
            return [0] * len(self.ranks)
        more = accepted(self.source, stages, few + 1)
        base, other = (self.traced(stages, 1, number) for number in (few, more))
        grown = [b.peak - a.peak for a, b in zip(base, other, strict=True)]
        step = more - few
        if any(each > _MOST_GROWTH * step for each in grown):
            raise DoesNotFold("another micro-batch adds bytes to the peak")
        return [max(0, -(-each * (count - few) // step)) for each in grown]


def peaks(
    source: ShapeSource,
    schedule: str,
    chunks: int,
    began: Callable[[str], None] = lambda what: None,
    is_whole: bool = False,
    memory: int = sys.maxsize,
) -> list[Peak]:
    """The peaks of the ranks that hold most, or bounds from above.

    ``is_whole``: run all layers and all micro-batches; ``memory``: as :class:`Folded` says.

    :raises DoesNotFold: the laws do not hold, and the whole would take long.
    :raises TooLarge: a rank needs more than ``memory``, as two numbers of layers show.
    """
    folded = Folded(source, schedule, chunks, began, memory)
    if is_whole:
        return folded.whole()
    try:
        return folded.bounded()
    except DoesNotFold:
        if max(folded.layers) * chunks * source.work.micro_batches > _WHOLE:
            raise
        return folded.whole()
