"""The announced schedule of a pipeline, judged before it runs: soundness, name, closed forms.

The first half of the check ``schedule``, whose docstring tells what is asked.  The leader asks it
before it starts a rank: a schedule that is unsound, or is not what its name says, is not run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from shardproof import strategies
from shardproof.axes import parts
from shardproof.case import Case
from shardproof.checks import Outcome
from shardproof.contract import Implementation, Options, Refused
from shardproof.costs.schedules import FORMS, Setting
from shardproof.costs.stages import CHUNKS, place_of, schedule_name
from shardproof.registry.declaration import BrokenContract
from shardproof.schedules import Action, Schedule, Timeline, problems, simulate

#: Times that bubbles are compared at: equal ones, and such as a transformer's blocks have.
TIMES = tuple(
    tuple(map(Fraction, times)) for times in (("1", "1", "1"), ("1", "6/5", "4/5"), ("3", "4", "1"))
)
#: Simulated clocks are floats.
CLOCK = 1e-9


class NoSchedule(RuntimeError):
    """An implementation raised an error where it was asked for its schedule."""


def claimed(
    implementation: type[Implementation], options: Options, ranks: int, size: int
) -> Schedule | None:
    """The schedule that ``implementation`` announces for a window of ``size`` micro-batches.

    :raises Refused: it declines.
    :raises NoSchedule: it raises anything else.
    :raises BrokenContract: it gives something else.
    """
    asked = f"schedule(options, {ranks}, {size})"
    try:
        schedule = implementation.schedule(options, ranks, size)
    except (Refused, BrokenContract):
        raise
    except Exception as error:
        raise NoSchedule(f"{asked} raised {error!r}") from error
    if schedule is not None and not isinstance(schedule, Schedule):
        raise BrokenContract(f"{asked} returned a {type(schedule).__name__}, not a Schedule")
    if schedule is not None and schedule.micro_batches != size:
        raise BrokenContract(f"{asked} has {schedule.micro_batches} micro-batches, not {size}")
    return schedule


def unsound_schedules(
    case: Case, strategy: str, schedules: Mapping[int, Schedule]
) -> dict[str, list[str]]:
    """The problem of the announced schedules, by size of window; empty: none."""
    by_size = {}
    for size, schedule in schedules.items():
        # First whether it can run at all: one that cannot has no bubble to compare.
        if not (wrong := problems(schedule)):
            odd = _not_as_asked(case, strategy, schedule) or _not_as_published(schedule)
            wrong = [odd] if odd else []
        by_size[str(size)] = wrong
    return {size: wrong for size, wrong in by_size.items() if wrong}


def not_run(unsound: Mapping[str, Sequence[str]]) -> Outcome:
    """The outcome of a case that is not run because of what :func:`unsound_schedules` found."""
    size, wrong = next(iter(unsound.items()))
    return Outcome("schedule", "fail", f"window of {size}: {'; '.join(wrong)} (not run)")


def _not_as_asked(case: Case, strategy: str, schedule: Schedule) -> str:
    """How the schedule differs from what the options ask for, if those are in the suite's words."""
    options, ranks = case.options, parts(case.mesh, "layers")
    name = schedule_name(options)
    if schedule.ranks != ranks:
        return f"a schedule for {schedule.ranks} ranks, the pipe axis has {ranks}"
    if name is None:
        orders = [
            tuple(a for a in map(Action.parse, order) if a.op in ("F", "B", "W", "BW"))
            for order in options["schedule"]["orders"]
        ]
        same = orders == [schedule.computed(rank) for rank in range(ranks)]
        return "" if same else "claims another order than that of the option 'schedule'"
    if name not in FORMS and name not in CHUNKS:
        return ""  # a name of the system's own
    if schedule.place != place_of(options, ranks):
        return f"places stages on ranks {schedule.place}, {name} on {place_of(options, ranks)}"
    # Names that stand for the published schedule, and no other: upstream systems give interleaved
    # 1F1B and ZB-V orders of their own where they may.
    textbook: Collection[str] = FORMS
    if not strategies.of(strategy).own_stages:
        textbook = ("gpipe", "1f1b", *(() if schedule.micro_batches % ranks else ("interleaved",)))
    if schedule.name != name and name in textbook:
        return f"claims {schedule.name!r}, asked for {name!r}"
    return ""


def settings_of(schedule: Schedule) -> Iterator[Setting]:
    """The times at which the bubbles of ``schedule`` are compared."""
    chunks = schedule.stages // schedule.ranks
    for times in TIMES:
        yield Setting(schedule.ranks, schedule.micro_batches, chunks, *times)


def in_words(setting: Setting) -> str:
    """``T_F, T_B, T_W = 1, 1, 1``."""
    times = setting.forward, setting.input_backward, setting.weight_backward
    return f"T_F, T_B, T_W = {', '.join(map(str, times))}"


def _not_as_published(schedule: Schedule) -> str:
    """Bubbles at three sets of times, and micro-batches in flight, against the closed forms."""
    if (form := FORMS.get(schedule.name)) is None:
        return ""
    for setting in settings_of(schedule):
        played, allowed = bubbles(schedule, setting), CLOCK * float(setting.ideal)
        for kind, wanted in (("span", form.span(setting)), ("makespan", form.makespan(setting))):
            bubble = getattr(played, kind)
            if wanted is not None and abs(bubble - float(wanted)) > allowed:
                found = f"{kind} bubble {bubble:g} at {in_words(setting)}"
                right = f"the closed form gives {float(wanted):g} ({form.source})"
                return f"{schedule.name} on {setting.ranks} ranks: {found}, {right}"
    for rank in range(schedule.ranks):
        # Any setting will do: micro-batches in flight do not depend on times.
        most = form.held(setting, rank)
        if most is not None and schedule.peak(rank) != most:
            held = f"up to {schedule.peak(rank)} micro-batches (counted for each chunk)"
            right = f"the closed form gives {most} ({form.source})"
            return f"{schedule.name}: rank {rank} holds {held}, {right}"
    return ""


def bubble_unjudged(schedule: Schedule) -> str:
    """Why no closed form was held against the bubble of ``schedule``; empty: one was."""
    form, what = FORMS.get(schedule.name), f"no closed form of {schedule.name!r} is known"
    if form is None:
        return f"bubble not judged: {what}"
    for setting in settings_of(schedule):
        if form.span(setting) is not None or form.makespan(setting) is not None:
            return ""
    size = f"{schedule.micro_batches} micro-batches on {schedule.ranks} ranks"
    return f"bubble not judged: {what} with {size} ({form.source})"


class Bubbles(NamedTuple):
    """The longest idle time between a rank's first and last computation, and in all ranks' time."""

    span: float
    makespan: float


def bubbles(schedule: Schedule, setting: Setting, waits: bool = False) -> Bubbles:
    """Bubbles of ``schedule`` on a simulated clock, in the unit of the setting's times.

    ``waits``: ranks wait where the schedule has a receive, not where its message is needed.
    """
    times = setting.forward, setting.input_backward, setting.weight_backward
    forward, input_backward, weight_backward = map(float, times)
    return idle_of(simulate(schedule, forward, input_backward, weight_backward, waits=waits))


def idle_of(played: Timeline) -> Bubbles:
    """Idle time of a timeline: of the worst rank, and of the whole."""
    idle = [span - busy for span, busy in zip(played.spans, played.busy, strict=True)]
    return Bubbles(max(idle), played.makespan - max(played.busy))


def window_figures(schedule: Schedule) -> WindowFigures:
    """Figures of one schedule, at equal times."""
    setting = next(settings_of(schedule))
    ratios = BubbleRatios.of(bubbles(schedule, setting), float(setting.ideal))
    return WindowFigures(
        **vars(ratios),
        name=schedule.name,
        stages=schedule.stages,
        micro_batches=schedule.micro_batches,
        in_flight=[schedule.peak(rank) for rank in range(schedule.ranks)],
        closed=closed_ratios(schedule, setting),
    )


@dataclass(frozen=True)
class BubbleRatios:
    """Bubbles over a rank's work (``ideal``), and over that and the makespan's bubble."""

    span_bubble_over_ideal: float
    span_bubble_over_total: float
    makespan_bubble_over_ideal: float
    makespan_bubble_over_total: float

    @classmethod
    def of(cls, bubbles: Bubbles, ideal: float) -> BubbleRatios:
        """The ratios of ``bubbles``."""
        total = ideal + bubbles.makespan
        span, makespan = bubbles
        return cls(span / ideal, span / total, makespan / ideal, makespan / total)


@dataclass(frozen=True)
class WindowFigures(BubbleRatios):
    """A schedule at equal times; ``closed``: ratios by the closed forms, ``None`` without one."""

    name: str
    stages: int
    micro_batches: int
    in_flight: list[int]
    closed: dict[str, float | None]


def closed_ratios(schedule: Schedule, setting: Setting) -> dict[str, float | None]:
    """The closed forms over a rank's work; ``None``: there is none."""
    form = FORMS.get(schedule.name)
    values = (None, None) if form is None else (form.span(setting), form.makespan(setting))
    return {
        f"{kind}_bubble_over_ideal": None if value is None else float(value / setting.ideal)
        for kind, value in zip(("span", "makespan"), values, strict=True)
    }
