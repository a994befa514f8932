"""A pipeline runs the schedule that it claims, and that schedule is sound and what its name says.

Before any rank is started the implementation says, as data, what it will run for one window of each
size (``Implementation.schedule``).  What is wrong with that fails without being run:

* a schedule that cannot be run: an action left out, done twice or on the wrong rank, an order that
  breaks F before B before W, messages out of order, a deadlock, which is told as its cycle;
* one that is not what its name says: what the options ask for is what is claimed; bubbles, played
  on a simulated clock, and micro-batches in flight equal the published closed forms
  (:mod:`shardproof.costs.schedules`); where none is published the verdict says so.

Then:

* the run: on every rank the computations logged in each window are those claimed, in that order,
  one after the other; every forward runs the units of its stage and every backward goes through
  them; all of them are over before the gradients are final;
* micro-batches in flight, counted from the log, are those of the schedule;
* memory, where it is measured: on every rank and in every step the largest bytes of class
  ``activations`` are what the micro-batches in flight take.  What one micro-batch of a stage takes
  is measured on the workload's own model in one process (``measure``).  The peak must reach the
  most that they need at any time, a micro-batch between B and W at least the inputs of the layers
  whose weights have a gradient to come, and may exceed what they take by the messages under way,
  the inputs received, and a few numbers.

Figures tell both bubbles over ideal and over total: for equal times, and in the last step's first
window as measured, simulated and replayed (:func:`measured`).  Seconds are taken with ledgers on,
of ranks that may share cores: no verdict depends on them.

*Cannot see* how long anything takes in a real run, where an upstream system traces and claims
nothing (then it says so and does not pass), nor what is computed outside of traced actions.
Activations are not judged under mixed precision or recomputation, on a tensor axis, or of upstream
systems.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardproof.case import Case
from shardproof.checks import Outcome, Worst
from shardproof.contract import Implementation, Refused
from shardproof.costs.model_facts import shape_key
from shardproof.costs.schedules import FORMS, Setting
from shardproof.costs.stages import CHUNKS, place_of, schedule_name, split_units
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import ComparisonRow, LoggedEvent, RankRecord
from shardproof.ledgers.memory import memory_is_measurable
from shardproof.ledgers.program_order import Done
from shardproof.schedules import Action, Schedule, Timeline, problems, simulate

if TYPE_CHECKING:
    from shardproof.evidence.assembled import Evidence

#: Times that bubbles are compared at: equal ones, and such as a transformer's blocks have.
TIMES = tuple(
    tuple(map(Fraction, times)) for times in (("1", "1", "1"), ("1", "6/5", "4/5"), ("3", "4", "1"))
)
#: Strategies whose options and stages are in the words of the suite.
OWN = ("pipeline", "hybrid")
#: Simulated clocks are floats.
_CLOCK = 1e-9
#: Bytes of losses and other numbers that live as long as a step.
_SCALARS = 64

Log = list[Done]


def decide(evidence: Figures) -> Outcome:
    """Claim, closed forms, log and memory, in this order."""
    case = evidence.case
    if "pipe" not in case.mesh:
        return Outcome("schedule", "skip", "the mesh has no pipe axis")
    figures: dict[str, Any] = {}
    wrong = unsound_schedules(case, evidence.declaration.strategy, evidence.schedules)
    if wrong:
        return not_run(wrong)
    for size, schedule in evidence.schedules.items():
        figures[f"window of {size}"] = _told(schedule)
    if not case.ledgers:
        return Outcome(
            "schedule", "skip", "ledgers are off: what was run is not known", None, figures
        )
    for record in evidence.records:
        for step in evidence.steps:
            problem = _wrong_run(evidence, record, step)
            if problem:
                message = f"rank {record.rank}, step {step}: {problem}"
                return Outcome("schedule", "fail", message, None, figures)
    figures["in_flight"] = {
        str(record.rank): max(_held(actions_of(record, evidence.steps[-1])), default=0)
        for record in evidence.records
    }
    if not evidence.schedules:
        return Outcome("schedule", "skip", _unclaimed(evidence), None, figures)
    figures["measured"] = measured(evidence, evidence.steps[-1])
    told = "; ".join(text for s in evidence.schedules.values() if (text := bubble_unjudged(s)))
    why_not = why_not_measured(evidence)
    if why_not:
        figures["activations"] = f"not judged: {why_not}"
        return Outcome("schedule", "pass", told, None, figures)
    return _judge_activations(evidence, figures, told)


class NoSchedule(RuntimeError):
    """What an implementation gave for its schedule is none."""


def claimed(
    implementation: type[Implementation], options: Mapping[str, Any], ranks: int, size: int
) -> Schedule | None:
    """What ``implementation`` says that it will run for a window of ``size`` micro-batches.

    :raises Refused: it declines.
    :raises NoSchedule: it raises anything else, or gives something else.
    """
    asked = f"schedule(options, {ranks}, {size})"
    try:
        found = implementation.schedule(options, ranks, size)
    except Refused:
        raise
    except Exception as error:
        raise NoSchedule(f"{asked} raised {error!r}") from error
    if found is not None and not isinstance(found, Schedule):
        raise NoSchedule(f"{asked} returned a {type(found).__name__}, not a Schedule")
    if found is not None and found.micro_batches != size:
        raise NoSchedule(f"{asked} is for {found.micro_batches} micro-batches")
    return found


def unsound_schedules(
    case: Case, strategy: str, schedules: Mapping[int, Schedule]
) -> dict[str, list[str]]:
    """What is wrong with what is claimed, by size of the window; empty: it can be run."""
    found = {}
    for size, schedule in schedules.items():
        told = problems(schedule)
        odd = "" if told else _not_as_asked(case, strategy, schedule) or _not_as_published(schedule)
        if told or odd:
            found[str(size)] = told or [odd]
    return found


def not_run(told: Mapping[str, Sequence[str]]) -> Outcome:
    """The outcome of a case that is not run because of what :func:`unsound_schedules` found."""
    size, found = next(iter(told.items()))
    return Outcome("schedule", "fail", f"window of {size}: {'; '.join(found)} (not run)")


# ------------------------------------------------------------------------------------- the claim


def _not_as_asked(case: Case, strategy: str, schedule: Schedule) -> str:
    """What the options ask for, as far as they are in the words of the suite."""
    options, ranks = case.options, case.mesh["pipe"]
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
    if schedule.name != name and name in _textbook(strategy, ranks, schedule.micro_batches):
        return f"claims {schedule.name!r}, asked for {name!r}"
    return ""


def _textbook(strategy: str, ranks: int, micro_batches: int) -> Collection[str]:
    """Names that stand for the published schedule, and no other, in the options of ``strategy``.

    Upstream systems give interleaved 1F1B and ZB-V orders of their own where they may.
    """
    if strategy in OWN:
        return FORMS
    return ("gpipe", "1f1b", *(() if micro_batches % ranks else ("interleaved",)))


def _settings(schedule: Schedule) -> Iterator[Setting]:
    chunks = schedule.stages // schedule.ranks
    for times in TIMES:
        yield Setting(schedule.ranks, schedule.micro_batches, chunks, *times)


def _not_as_published(schedule: Schedule) -> str:
    """Bubbles at three sets of times, and micro-batches in flight, against the closed forms."""
    form = FORMS.get(schedule.name)
    if form is None:
        return ""
    for setting in _settings(schedule):
        found = bubbles(schedule, setting)
        for kind, wanted in (("span", form.span(setting)), ("makespan", form.makespan(setting))):
            if wanted is not None and abs(found[kind] - float(wanted)) > _CLOCK * float(
                setting.ideal
            ):
                times = f"{setting.forward}, {setting.input_backward}, {setting.weight_backward}"
                return (
                    f"{schedule.name} on {setting.ranks} ranks: {kind} bubble {found[kind]:g} at "
                    f"T_F, T_B, T_W = {times}, the closed form gives {float(wanted):g} "
                    f"({form.source})"
                )
    for rank in range(schedule.ranks):
        most = form.held(setting, rank)
        if most is not None and schedule.peak(rank) != most:
            return (
                f"{schedule.name}: rank {rank} holds up to {schedule.peak(rank)} micro-batches "
                f"(counted for each chunk), the closed form gives {most} ({form.source})"
            )
    return ""


def bubble_unjudged(schedule: Schedule) -> str:
    """Why no closed form was held against the bubble of ``schedule``; empty: one was."""
    form = FORMS.get(schedule.name)
    if form is None:
        return f"bubble not judged: no closed form of {schedule.name!r} is known"
    for setting in _settings(schedule):
        if form.span(setting) is not None or form.makespan(setting) is not None:
            return ""
    return (
        f"bubble not judged: no closed form of {schedule.name!r} is known with "
        f"{schedule.micro_batches} micro-batches on {schedule.ranks} ranks ({form.source})"
    )


def bubbles(schedule: Schedule, setting: Setting) -> dict[str, float]:
    """Span and makespan bubble of ``schedule``, in the unit of the setting's times."""
    forward, input_backward = float(setting.forward), float(setting.input_backward)
    weight_backward = float(setting.weight_backward)
    return _idle(simulate(schedule, forward, input_backward, weight_backward))


def _idle(played: Timeline) -> dict[str, float]:
    idle = [span - busy for span, busy in zip(played.spans, played.busy, strict=True)]
    return {"span": max(idle), "makespan": played.makespan - max(played.busy)}


def _told(schedule: Schedule) -> dict[str, Any]:
    """Figures of one schedule, at equal times."""
    setting = next(_settings(schedule))
    found, ideal = bubbles(schedule, setting), float(setting.ideal)
    told: dict[str, Any] = {
        "name": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "in_flight": [schedule.peak(rank) for rank in range(schedule.ranks)],
        "closed": _closed(schedule, setting),
    }
    return told | _ratios(found, ideal)


def _ratios(found: Mapping[str, float], ideal: float) -> dict[str, float]:
    """Bubbles over a rank's work and over that and the makespan's bubble."""
    told = {}
    for kind, bubble in found.items():
        told[f"{kind}_bubble_over_ideal"] = bubble / ideal
        told[f"{kind}_bubble_over_total"] = bubble / (ideal + found["makespan"])
    return told


def _unclaimed(evidence: Figures) -> str:
    told = (
        "no schedule is claimed: its soundness, its bubble and the order of its run are not judged"
    )
    logged = any(record.actions for record in evidence.records)
    return told if logged else f"{told}; nothing was traced"


# --------------------------------------------------------------------------------------- the run


def actions_of(record: RankRecord, step: int) -> Log:
    """What a rank computed in ``step``, in the order of begins."""
    return sorted((row for row in record.actions if row.step == step), key=lambda row: row.begin)


def _action(row: Done) -> Action:
    return Action(row.op, row.stage, row.micro)


def _wrong_run(evidence: Figures, record: RankRecord, step: int) -> str:
    """What is wrong with the log of one rank and step."""
    log = actions_of(record, step)
    problem = _wrong_order(evidence, record, log, record.steps[step].windows)
    if problem:
        return problem
    for one, other in pairwise(log):
        if other.begin < one.end:
            return f"{_action(other)} begins before {_action(one)} has ended"
    events = record.events_of(step)
    final = next(
        (n for n, kind, name in events if (kind, name) == ("observe", "gradients_final")), None
    )
    late = next((row for row in log if final is not None and row.end > final), None)
    if late is not None:
        return f"{_action(late)} is not over when gradients are said to be final"
    return _computed_nothing(evidence, log, events)


def _wrong_order(evidence: Figures, record: RankRecord, log: Log, windows: Sequence[int]) -> str:
    """The first computation that is not the one claimed, window by window."""
    if not evidence.schedules:
        return ""
    rank = record.coordinate.get("pipe", 0)
    claimed: list[tuple[int, Action]] = []
    for window, size in enumerate(windows):
        schedule = evidence.schedules.get(size)
        if schedule is None:
            return f"no schedule is claimed for its window of {size} micro-batches"
        claimed += [(window, action) for action in schedule.computed(rank)]
    if claimed and not log:
        return "claims a schedule, but traces no computation"
    for number, (window, action) in enumerate(claimed):
        if number == len(log):
            return f"window {window}: {action} and what comes after it is never done"
        found = _action(log[number])
        if found != action:
            name = evidence.schedules[windows[window]].name
            before = log[number - 1] if number else None
            place = f"after {_action(before)}" if before is not None else "first"
            return f"window {window}: does {found} {place}, where {name} has {action}"
        if log[number].window != window:
            return f"window {window}: {action} was done before, in window {log[number].window}"
    if len(log) > len(claimed):
        return f"does {_action(log[len(claimed)])} after all that the schedule has"
    return ""


def _computed_nothing(evidence: Figures, log: Log, events: Sequence[LoggedEvent]) -> str:
    """Every F runs each unit of its stage once, every B or BW goes back through each."""
    facts = evidence.model_facts
    if facts is None or not evidence.schedules:
        return ""
    schedule = next(iter(evidence.schedules.values()))
    ranges = split_units(facts.options, len(facts.units), schedule.stages)
    at = 0
    trained = {unit for t in facts.trainable for unit in t.units}
    for row in log:
        while at < len(events) and events[at][0] < row.begin:
            at += 1
        inside = []
        while at < len(events) and events[at][0] < row.end:
            inside.append((events[at][1], events[at][2]))
            at += 1
        kind = "forward" if row.op == "F" else "backward"
        for unit in ranges[row.stage] if row.op != "W" else ():
            name = facts.units[unit]
            times, wanted = inside.count((kind, name)), facts.called(name)
            if kind == "backward":
                times, wanted = min(times, 1), int(wanted > 0 and unit in trained)
            if times != wanted:
                return f"{_action(row)} runs {kind} of {name!r} {times} times, not {wanted}"
    return ""


def _held(log: Log) -> list[int]:
    """Micro-batches in flight after each computation of ``log``, over all chunks."""
    held, found = 0, []
    for row in log:
        held += (row.op == "F") - (row.op in ("W", "BW"))
        found.append(held)
    return found


def measured(evidence: Figures, step: int) -> dict[str, Any]:
    """Bubbles of the first window of ``step``, in the first data coordinate.

    By the ranks' clocks, and ``seconds`` are the mean over ranks of the work on one micro-batch by
    them.  ``cpu_seconds`` are the same for which a rank had a core: ranks that share cores wait in
    the midst of a computation.  With these times, as on a machine that has a core for every rank:
    ``closed``, the closed forms (``None``: there is none at these times); ``simulated``, the
    schedule; ``replayed``, the schedule where every computation takes its own time, so that stages
    that differ are in it.  Empty: nothing was computed.
    """
    ranks: dict[int, Log] = {}
    size = 0
    for record in evidence.records:
        coordinate = record.coordinate
        others = (at for axis, at in coordinate.items() if axis != "pipe")
        log = [row for row in actions_of(record, step) if row.window == 0]
        if log and not any(others):
            ranks[coordinate.get("pipe", 0)] = log
            size = record.steps[step].windows[0]
    schedule = evidence.schedules.get(size)
    if schedule is None or len(ranks) < schedule.ranks:
        return {}
    wall, cpu = defaultdict[str, float](float), defaultdict[str, float](float)
    busy, spans, took = [], [], dict[Action, float]()
    for log in ranks.values():
        for row in log:
            wall[row.op] += row.ended - row.began
            cpu[row.op] += row.cpu
            took[_action(row)] = row.cpu
        busy.append(sum(row.ended - row.began for row in log))
        spans.append(log[-1].ended - log[0].began)
    ends = [log[-1].ended for log in ranks.values()]
    makespan = max(ends) - min(log[0].began for log in ranks.values())
    idle = [span - work for span, work in zip(spans, busy, strict=True)]
    found = {"span": max(idle), "makespan": makespan - max(busy)}
    means = {op: seconds / (size * len(ranks)) for op, seconds in cpu.items()}
    halves = means.get("BW", 0.0) / 2
    setting = Setting(
        schedule.ranks,
        size,
        schedule.stages // schedule.ranks,
        *(Fraction(means.get(op, 0.0) + (op != "F") * halves) for op in ("F", "B", "W")),
    )
    ideal = float(setting.ideal)
    return {
        "ranks": evidence.case.world,
        "cores": min(record.cores for record in evidence.records),
        "seconds": {op: seconds / (size * len(ranks)) for op, seconds in wall.items()},
        "cpu_seconds": means,
        **_ratios(found, sum(busy) / len(busy)),
        "closed": _closed(schedule, setting),
        "simulated": _ratios(bubbles(schedule, setting), ideal),
        "replayed": _ratios(_idle(simulate(schedule, took=took)), ideal),
    }


def _closed(schedule: Schedule, setting: Setting) -> dict[str, float | None]:
    """The closed forms over a rank's work; ``None``: there is none."""
    form = FORMS.get(schedule.name)
    told: dict[str, float | None] = {}
    for kind in ("span", "makespan"):
        value = getattr(form, kind)(setting) if form is not None else None
        told[f"{kind}_bubble_over_ideal"] = None if value is None else float(value / setting.ideal)
    return told


# ------------------------------------------------------------------------------------ the memory


def why_not_measured(evidence: Figures) -> str:
    """Why activations are not judged here; empty: they are."""
    case, facts = evidence.case, evidence.model_facts
    if not memory_is_measurable(case, evidence.declaration.backends):
        return "no memory ledger"
    if facts is None or not evidence.schedules or not facts.inputs:
        return "no schedule or no model facts"
    if evidence.declaration.strategy not in OWN or facts.size("tensor") > 1:
        return "only whole stages of the suite's own cut are measured"
    if case.precision:
        return "mixed precision"
    if facts.options.get("recompute_every"):
        return "recomputation"
    return ""


def _name(case: Case, place: Sequence[int], shape: Sequence[int]) -> str:
    """Micro-batches of one name take the same: those of one shape, unless data choose branches."""
    branches = any(trait.startswith("conditional_") for trait in case.workload.traits)
    return f"{shape_key(shape)} at {shape_key(place)}" if branches else shape_key(shape)


def measure(evidence: Evidence) -> Iterator[ComparisonRow]:
    """What one micro-batch of a stage takes: ``phase`` says of what, ``bound`` the bytes.

    ``F``: held when its forward is over; ``W``: thereof what the gradients of weights need;
    ``input``: what is received for it.
    """
    if "pipe" not in evidence.case.mesh or why_not_measured(evidence):
        return
    from shardproof.checks.stage_bytes import stage_bytes

    schedule = next(iter(evidence.schedules.values()))
    facts = evidence.model_facts
    assert facts is not None
    ranges = split_units(facts.options, len(facts.units), schedule.stages)
    found = stage_bytes(evidence.case, ranges, partial(_name, evidence.case))
    for (stage, name), sizes in found.items():
        for phase, size in sizes.items():
            yield ComparisonRow(0, phase, f"stage {stage}", name, 0.0, float(size))


def _judge_activations(evidence: Figures, figures: dict[str, Any], note: str) -> Outcome:
    facts = evidence.model_facts
    assert facts is not None
    sizes = {
        (row.phase, row.name, row.owner): int(row.bound)
        for row in evidence.compared.get("schedule", ())
        if row.bound is not None
    }
    figures["activations"] = told = {}
    for record in evidence.records:
        share = evidence.data_coordinate[record.rank]
        for step in evidence.steps:
            names = [
                [
                    _name(evidence.case, (step, share, window, micro), shape)
                    for micro, shape in enumerate(shapes)
                ]
                for window, shapes in enumerate(facts.inputs[step][share])
            ]
            low, high = _bounds(record, step, names, sizes)
            peak = _peak(record, step)
            told[str(record.rank)] = {"peak": peak, "least": low, "most": high}
            if not low <= peak <= high:
                rank, bound = record.rank, low if peak < low else high
                most = max(_held(actions_of(record, step)), default=0)
                message = (
                    f"rank {rank}, step {step}: {peak:,} bytes of activations at the peak, "
                    f"{low:,} to {high:,} for up to {most} micro-batches in flight"
                )
                distance = float(abs(peak - bound))
                worst = Worst("activation bytes", step, "peak", f"rank {rank}", distance, 0.0)
                return Outcome("schedule", "fail", message, worst, figures)
    return Outcome("schedule", "pass", note, None, figures)


def _peak(record: RankRecord, step: int) -> int:
    """Most bytes of class ``activations`` on the device in forward or backward of ``step``."""
    phases: Counter[str] = Counter()
    for row in record.memory:
        chosen = (row.moment, row.step, row.kind) == ("peak", step, "activations")
        if chosen and row.where != "update" and row.device != "file":
            phases[row.where] += row.bytes
    return max(phases.values(), default=0)


def _bounds(
    record: RankRecord,
    step: int,
    names: Sequence[Sequence[str]],
    sizes: Mapping[tuple[str, str, str], int],
) -> tuple[int, int]:
    """Least and most bytes of activations at the peak of one rank and step."""
    log = actions_of(record, step)
    messages = [c for c in record.calls_of(step) if c.operation in ("send", "recv")]
    least = most = needed = taken = 0
    since = 0
    for row in log:
        name = names[row.window][row.micro]
        whole, weights, received = (
            sizes[kind, f"stage {row.stage}", name] for kind in ("F", "W", "input")
        )
        before = taken
        if row.op == "F":
            needed, taken = needed + whole, taken + whole + received
        elif row.op == "B":
            needed -= whole - weights
        else:
            needed -= weights if row.op == "W" else whole
            taken -= whole + received
        under_way = sum(
            c.payload_bytes
            for c in messages
            if c.issued < row.end and (c.waited is None or c.waited > since)
        )
        least = max(least, needed)
        most = max(most, max(before, taken) + under_way)
        since = row.end
    return least, most + _SCALARS + 16 * len(log)
