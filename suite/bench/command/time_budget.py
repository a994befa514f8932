"""Which comparisons and cells fit into the time there is: ``shardproof bench --budget MINUTES``.

As for cases (``scenarios.budget``); nothing is cut short: the number of blocks is fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from shardproof.bench.session import Measured
from shardproof.bench.sides import SEGMENT_SECONDS, WARM_SECONDS
from shardproof.bench.subjects import ORDER, Cell, Subject
from shardproof.runs.durations import Durations
from shardproof.scenarios import budget
from shardproof.table import number

#: Where nothing is known of a pair or cell nor of its like: seconds of a launch besides warm-up and
#: blocks (of a cell its calls are watched and probed, too), of the passes of a side alone, and of
#: the scorecard of both; and how much longer than its segments a cell's block is, with the probes.
_PAIR_LAUNCH_SECONDS, _CELL_LAUNCH_SECONDS = 4.0, 6.0
_ALONE_SECONDS, _SCORE_SECONDS = 4.0, 30.0
_PROBING_FACTOR = 2
#: Segments of a pair's block (A/B and A/A), and sides that warm up in its launch.
_PAIR_SEGMENTS, _PAIR_SIDES = 8, 3


@dataclass(frozen=True)
class Passes:
    """The passes of a comparison other than its launches: each side ``alone``, the ``score``."""

    alone: bool = True
    score: bool = False


@dataclass(frozen=True)
class Schedule:
    """``chosen`` in the order to run; ``seconds`` is what they are expected to take."""

    chosen: list[Measured]
    left_out: list[Measured]
    seconds: float

    def summary(self) -> str:
        """How many are measured, how long that takes, and how many are left out."""
        items = [*self.chosen, *self.left_out]
        noun = "cell" if items and isinstance(items[0].subject, Cell) else "comparison"
        late = f", {len(self.left_out)} left out by the budget" if self.left_out else ""
        return f"{number(len(self.chosen), noun)}, about {self.seconds:.0f} s{late}"


def duration_name(subject: Subject, passes: Passes) -> str:
    """The key of a remembered duration: as many blocks and launches, and the same passes."""
    name = f"{subject.id}::{subject.blocks}x{subject.launches}"
    if isinstance(subject, Cell):
        return name
    return f"{name}::{'+'.join(word for word, on in asdict(passes).items() if on) or 'times'}"


def estimates(
    subjects: Iterable[Subject], durations: Durations, passes: Passes
) -> dict[str, float]:
    """Seconds by id: the median of the past, else that of its like, else a rough guess."""
    subjects = list(subjects)
    past = [(s, durations.estimate(duration_name(s, passes))) for s in subjects]
    seconds = budget.estimates(past, _like, lambda subject: _guess(subject, passes))
    return {subject.id: each for subject, each in zip(subjects, seconds, strict=True)}


def choose(
    items: Sequence[Measured],
    durations: Durations,
    minutes: float | None,
    passes: Passes = Passes(),
) -> Schedule:
    """The ``items`` that fit into ``minutes`` (``None``: all); cells stay with their source."""
    expected = estimates((item.subject for item in items), durations, passes)
    chosen: list[Measured] = []
    left_out: list[Measured] = []
    used = 0.0
    for item in items:
        seconds = expected[item.subject.id] if item.timed else 0.0
        fits = minutes is None or used + seconds <= minutes * 60
        if item.problem is None and item.source not in (None, item):
            fits = item.source in chosen
        (chosen if fits else left_out).append(item)
        used += seconds if fits else 0.0
    return Schedule(chosen, left_out, used)


def _like(subject: Subject) -> tuple[object, ...]:
    what = subject.backend, subject.world, subject.workload.name, subject.size
    return (type(subject), *what, subject.blocks, subject.launches)


def _guess(subject: Subject, passes: Passes) -> float:
    if isinstance(subject, Cell):
        launch = _CELL_LAUNCH_SECONDS + len(set(ORDER)) * WARM_SECONDS
        block = len(ORDER) * _PROBING_FACTOR * SEGMENT_SECONDS
        return subject.launches * launch + subject.blocks * block
    launch = _PAIR_LAUNCH_SECONDS + _PAIR_SIDES * WARM_SECONDS
    extra = _ALONE_SECONDS * passes.alone * 2 + _SCORE_SECONDS * passes.score
    return subject.launches * launch + subject.blocks * _PAIR_SEGMENTS * SEGMENT_SECONDS + extra
