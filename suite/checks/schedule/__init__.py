"""A pipeline runs the schedule that it announces; the schedule is sound and matches its name.

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
* messages, of the suite's own cut (:mod:`shardproof.checks.schedule.messages`): the log, played
  with every wait where it was made, has no larger bubble than the schedule, and no tensor that was
  sent or received outlives its last use;
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
nothing (then it says so and does not pass), nor what is computed outside of traced actions, nor
whether a receive is posted earlier than right before what waits for it, as schedules announce it.
Activations are not judged under mixed precision or recomputation, on a tensor axis, or of upstream
systems.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from shardproof import axes, strategies
from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.checks import Needs, Outcome, Worst, first_problem, lacking, weighs
from shardproof.checks.schedule import announced, messages
from shardproof.checks.schedule.announced import BubbleRatios, WindowFigures
from shardproof.costs.model_facts import shape_key
from shardproof.costs.schedules import Setting
from shardproof.costs.stages import split_units
from shardproof.evidence.assembled import Figures
from shardproof.evidence.records import ComparisonRow, LoggedEvent, RankRecord
from shardproof.files import SparselyStored
from shardproof.ledgers.program_order import Done
from shardproof.schedules import Action, Timeline, most_in_flight, simulate

if TYPE_CHECKING:
    from shardproof.evidence.assembled import Evidence

NEEDS: Needs = ()

#: Bytes of losses and other numbers that live as long as a step.
_SCALARS = 64

Log = list[Done]


def decide(evidence: Figures) -> Outcome:
    """Judge the announced schedule, then the log of the run, then memory."""
    case = evidence.case
    if axes.cutting("layers") not in case.mesh:
        return Outcome("schedule", "skip", "the mesh has no pipe axis")
    schedules, strategy = evidence.schedules, evidence.declaration.strategy
    if wrong := announced.unsound_schedules(case, strategy, schedules):
        return announced.not_run(wrong)
    windows = {size: announced.window_figures(own) for size, own in schedules.items()}
    figures = ScheduleFigures(windows)
    if unlogged := lacking(("calls",), case, evidence.declaration):
        what = f"{unlogged}: what was run is not known"
        return Outcome("schedule", "skip", what, None, figures.to_dict())
    # In the order of causes: a wrong order of computations explains wrong waits, and both explain
    # what is in memory.
    problem = first_problem(evidence, partial(_wrong_run, evidence)) or _wrong_waits(evidence)
    if problem:
        return Outcome("schedule", "fail", problem, None, figures.to_dict())
    figures.in_flight = {
        str(record.rank): _most_in_flight(record, evidence.steps[-1]) for record in evidence.records
    }
    if not schedules:
        unjudged = "its soundness, its bubble and the order of its run are not judged"
        traced = any(record.actions for record in evidence.records)
        what = f"no schedule is claimed: {unjudged}{'' if traced else '; nothing was traced'}"
        return Outcome("schedule", "skip", what, None, figures.to_dict())
    figures.measured = measured(evidence, evidence.steps[-1]) or {}
    if why_not := why_not_measured(evidence):
        figures.activations = f"not judged: {why_not}"
    elif failure := _judge_activations(evidence, figures):
        return Outcome("schedule", "fail", *failure, figures.to_dict())
    elif problem := first_problem(evidence, partial(_wrong_boundary, evidence, figures)):
        return Outcome("schedule", "fail", problem, None, figures.to_dict())
    notes = "; ".join(filter(None, map(announced.bubble_unjudged, schedules.values())))
    return Outcome("schedule", "pass", notes, None, figures.to_dict())


@dataclass(frozen=True)
class MeasuredFigures(BubbleRatios):
    """Bubbles of one window: see :func:`measured`."""

    ranks: int
    cores: int
    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    closed: dict[str, float | None]
    simulated: BubbleRatios
    replayed: BubbleRatios


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations of one rank: the peak, and its bounds."""

    peak: int
    least: int
    most: int


@dataclass
class ScheduleFigures(SparselyStored):
    """By size of the window, and by rank; ``activations`` may be the reason why not judged.

    ``boundary``: most tensors received from other stages that are alive when a computation begins.
    """

    windows: dict[int, WindowFigures]
    in_flight: dict[str, int] | None = None
    measured: MeasuredFigures | dict[str, float] | None = None
    activations: dict[str, ActivationBytes] | str | None = None
    boundary: dict[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The stored form, in which every window has a key of its own."""
        data = super().to_dict()
        windows = data.pop("windows")
        return {f"window of {size}": window for size, window in windows.items()} | data


# --------------------------------------------------------------------------------------- the run


def actions_of(record: RankRecord, step: int) -> Log:
    """The computations of a rank in ``step``, in the order of begins."""
    return sorted((row for row in record.actions if row.step == step), key=lambda row: row.begin)


def _action(row: Done) -> Action:
    return Action(row.op, row.stage, row.micro)


def _wrong_run(evidence: Figures, record: RankRecord, step: int) -> str:
    """The problem of the log of one rank and step."""
    log = actions_of(record, step)
    if problem := _wrong_order(evidence, record, log, record.steps[step].windows):
        return problem
    for one, other in pairwise(log):
        if other.begin < one.end:
            return f"{_action(other)} begins before {_action(one)} has ended"
    events = record.events_of(step)
    finals = [n for n, *event in events if event == ["observe", "gradients_final"]]
    for late in (row for row in log if finals and row.end > finals[0]):
        return f"{_action(late)} is not over when gradients are reported as final"
    return _computed_nothing(evidence, log, events)


def _wrong_order(evidence: Figures, record: RankRecord, log: Log, windows: Sequence[int]) -> str:
    """The first computation that is not the one claimed, window by window."""
    if not evidence.schedules:
        return ""
    rank = record.coordinate.get(axes.cutting("layers"), 0)
    claimed: list[tuple[int, Action]] = []
    for window, size in enumerate(windows):
        if (schedule := evidence.schedules.get(size)) is None:
            return f"no schedule is claimed for its window of {size} micro-batches"
        claimed += [(window, action) for action in schedule.computed(rank)]
    if claimed and not log:
        return "claims a schedule, but traces no computation"
    for number, (window, action) in enumerate(claimed):
        if number == len(log):
            return f"window {window}: {action} and all actions after it are never done"
        done = _action(log[number])
        if done != action:
            name = evidence.schedules[windows[window]].name
            place = f"after {_action(log[number - 1])}" if number else "first"
            return f"window {window}: does {done} {place}, where {name} has {action}"
        if log[number].window != window:
            return f"window {window}: {action} was done before, in window {log[number].window}"
    if len(log) > len(claimed):
        return f"does {_action(log[len(claimed)])} after the last action of the schedule"
    return ""


def _computed_nothing(evidence: Figures, log: Log, events: Sequence[LoggedEvent]) -> str:
    """Every F runs each unit of its stage once, every B or BW goes back through each."""
    facts = evidence.model_facts
    if facts is None or not evidence.schedules:
        return ""
    schedule = next(iter(evidence.schedules.values()))
    ranges = split_units(facts.options, len(facts.units), schedule.stages)
    trained = {unit for t in facts.trainable for unit in t.units}
    for row in log:
        first, last = (bisect_left(events, at, key=itemgetter(0)) for at in (row.begin, row.end))
        inside = [(kind, name) for _, kind, name in events[first:last]]
        kind = "forward" if row.op == "F" else "backward"
        for unit in ranges[row.stage] if row.op != "W" else ():
            name = facts.units[unit]
            times, wanted = inside.count((kind, name)), facts.called(name)
            if kind == "backward":
                # How often backward enters a unit that is called several times is not asked.
                times, wanted = min(times, 1), int(wanted > 0 and unit in trained)
            if times != wanted:
                return f"{_action(row)} runs {kind} of {name!r} {times} times, not {wanted}"
    return ""


def _wrong_waits(evidence: Figures) -> str:
    """Of the suite's own cut: where waits cost time."""
    if not strategies.of(evidence.declaration.strategy).own_stages or not evidence.schedules:
        return ""
    for step in evidence.steps:
        if problem := messages.waits_too_long(evidence, step):
            return f"step {step}, {problem}"
    return ""


def _wrong_boundary(
    evidence: Figures, figures: ScheduleFigures, record: RankRecord, step: int
) -> str:
    """The first boundary tensor that one rank kept too long in one step."""
    made, log = messages.messages_of(evidence, record, step), actions_of(record, step)
    # Threads of native backends let go late.
    if made is None or not BACKENDS[evidence.case.backend].threads:
        return ""
    over = [number for number, kind, _ in record.events_of(step) if kind == "observe"]
    alive = {str(record.rank): messages.most_alive(made, log)}
    figures.boundary = (figures.boundary or {}) | alive
    return messages.kept_too_long(made, log, over[0]) if over else ""


def _most_in_flight(record: RankRecord, step: int) -> int:
    return most_in_flight(row.op for row in actions_of(record, step))


def measured(evidence: Figures, step: int) -> MeasuredFigures | None:
    """Bubbles of the first window of ``step``, in the first data coordinate.

    By the ranks' clocks, and ``seconds`` are the mean over ranks of the work on one micro-batch by
    them.  ``cpu_seconds`` are the same for which a rank had a core: ranks that share cores wait in
    the midst of a computation.  With these times, as on a machine that has a core for every rank:
    ``closed``, the closed forms (``None``: there is none at these times); ``simulated``, the
    schedule; ``replayed``, the schedule where every computation takes its own time, so that stages
    that differ are in it.  ``None``: nothing was computed.
    """
    ranks: dict[int, Log] = {}
    along, size = axes.cutting("layers"), 0
    for record in evidence.records:
        others = (at for axis, at in record.coordinate.items() if axis != along)
        log = [row for row in actions_of(record, step) if row.window == 0]
        if log and not any(others):
            ranks[record.coordinate.get(along, 0)] = log
            size = record.steps[step].windows[0]
    schedule = evidence.schedules.get(size)
    if schedule is None or len(ranks) < schedule.ranks:
        return None
    wall, cpu = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in itertools.chain(*ranks.values()):
        wall[row.op] += row.ended - row.began
        cpu[row.op] += row.cpu
    busy = [sum(row.ended - row.began for row in log) for log in ranks.values()]
    spans = [log[-1].ended - log[0].began for log in ranks.values()]
    ended = max(log[-1].ended for log in ranks.values())
    makespan = ended - min(log[0].began for log in ranks.values())
    played = Timeline({}, {}, tuple(busy), tuple(spans), makespan)
    means = {op: seconds / (size * len(ranks)) for op, seconds in cpu.items()}
    # The closed forms ask for both halves of a backward: one that is not split counts half each.
    halves = means.get("BW", 0.0) / 2
    times = (Fraction(means.get(op, 0.0) + (op != "F") * halves) for op in ("F", "B", "W"))
    setting = Setting(schedule.ranks, size, schedule.stages // schedule.ranks, *times)
    ideal = float(setting.ideal)
    took = {_action(row): row.cpu for log in ranks.values() for row in log}
    ratios = BubbleRatios.of(announced.idle_of(played), sum(busy) / len(busy))
    replayed = announced.idle_of(simulate(schedule, took=took))
    return MeasuredFigures(
        **vars(ratios),
        ranks=evidence.case.world,
        cores=min(record.cores for record in evidence.records),
        seconds={op: seconds / (size * len(ranks)) for op, seconds in wall.items()},
        cpu_seconds=means,
        closed=announced.closed_ratios(schedule, setting),
        simulated=BubbleRatios.of(announced.bubbles(schedule, setting), ideal),
        replayed=BubbleRatios.of(replayed, ideal),
    )


# ------------------------------------------------------------------------------------ the memory


def why_not_measured(evidence: Figures) -> str:
    """Why activations are not judged here; empty: they are."""
    case, facts = evidence.case, evidence.model_facts
    if not weighs(case, evidence.declaration):
        return "no memory ledger"
    if facts is None or not evidence.schedules or not facts.inputs:
        return "no schedule or no model facts"
    is_own = strategies.of(evidence.declaration.strategy).own_stages
    if not is_own or facts.parts("widths") > 1:
        return "only whole stages of the suite's own cut are measured"
    if facts.parts("positions") > 1:
        return "ranks of one stage have parts of samples, only whole ones are measured"
    if facts.option("experts", None):
        return "ranks of one stage compute each other's tokens, only their own ones are measured"
    if case.precision:
        return "mixed precision"
    return "recomputation" if facts.options.get("recompute_every") else ""


def _name(case: Case, place: Sequence[int], shape: Sequence[int]) -> str:
    """Micro-batches of one name take the same: those of one shape, unless data choose branches."""
    branches = any(trait.startswith("conditional_") for trait in case.workload.traits)
    return f"{shape_key(shape)} at {shape_key(place)}" if branches else shape_key(shape)


def measure(evidence: Evidence) -> Iterator[ComparisonRow]:
    """The size of one micro-batch of a stage: ``phase`` says of what, ``bound`` the bytes.

    ``F``: held when its forward is over; ``W``: thereof what the gradients of weights need;
    ``input``: what is received for it.
    """
    if axes.cutting("layers") not in evidence.case.mesh or why_not_measured(evidence):
        return
    from shardproof.checks.schedule.stage_bytes import stage_bytes

    schedule, facts = next(iter(evidence.schedules.values())), evidence.model_facts
    assert facts is not None
    ranges = split_units(facts.options, len(facts.units), schedule.stages)
    by_stage = stage_bytes(evidence.case, ranges, partial(_name, evidence.case))
    for (stage, name), sizes in by_stage.items():
        for phase, size in sizes.items():
            yield ComparisonRow(0, phase, f"stage {stage}", name, 0.0, float(size))


def _judge_activations(evidence: Figures, figures: ScheduleFigures) -> tuple[str, Worst] | None:
    """A sentence about the first peak that is out of bounds, and it; ``None``: all are within."""
    facts = evidence.model_facts
    assert facts is not None
    sizes = {
        (row.phase, row.name, row.owner): int(row.bound)
        for row in evidence.compared.get("schedule", ())
        if row.bound is not None
    }
    figures.activations = by_rank = dict[str, ActivationBytes]()
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
            by_rank[str(record.rank)] = ActivationBytes(peak, low, high)
            if not low <= peak <= high:
                distance = float(max(low - peak, peak - high))
                owner, most = f"rank {record.rank}", _most_in_flight(record, step)
                bounds = f"{low:,} to {high:,} for up to {most} micro-batches in flight"
                held = f"{peak:,} bytes of activations at the peak"
                worst = Worst("activation bytes", step, "peak", owner, distance, 0.0)
                return f"{owner}, step {step}: {held}, {bounds}", worst
    return None


def _peak(record: RankRecord, step: int) -> int:
    """Most bytes of class ``activations`` on the device in forward or backward of ``step``."""
    phases = Counter[str]()
    for row in record.memory:
        chosen = (row.moment, row.step, row.kind) == ("peak", step, "activations")
        if chosen and row.where != "update" and row.device != "file":
            phases[row.where] += row.bytes
    return max(phases.values(), default=0)


#: What of a micro-batch, its stage and its name -> bytes.
Sizes = Mapping[tuple[str, str, str], int]


def _bounds(
    record: RankRecord, step: int, names: Sequence[Sequence[str]], sizes: Sizes
) -> tuple[int, int]:
    """Least and most bytes of activations at the peak of one rank and step."""
    log = actions_of(record, step)
    sent = [c for c in record.calls_of(step) if c.operation in ("send", "recv")]
    #     op    needed changes by      taken changes by
    #     F     + whole                + whole + received
    #     B     - (whole - weights)    nothing: it may keep all until W
    #     W     - weights              - (whole + received)
    #     BW    - whole                - (whole + received)
    least = most = needed = taken = since = 0
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
            for c in sent
            if c.issued < row.end and (c.waited is None or c.waited > since)
        )
        least = max(least, needed)
        most = max(most, max(before, taken) + under_way)
        since = row.end
    return least, most + _SCALARS + 16 * len(log)
