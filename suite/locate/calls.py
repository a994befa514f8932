"""The first call, in program order, that is not as the cost model promises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from shardproof import checks
from shardproof.checks import traffic
from shardproof.costs import NoCostModel
from shardproof.evidence.assembled import Evidence
from shardproof.locate.recorded import Event, Recording

_PHASES = ("forward", "backward", "update")
_Key = tuple[str, str, bool]


@dataclass(frozen=True)
class Difference:
    """The last thing as promised, the first that is not, and the call of that."""

    right: str
    wrong: str
    event: Event


def first(evidence: Evidence, recordings: Mapping[int, Recording]) -> Difference | None:
    """The first difference; ``None``: calls and bytes are as promised, nothing is promised, or the
    scenario has a promise of its own.
    """
    if "traffic" not in evidence.case.checks or "traffic" in evidence.case.expect:
        return None
    for step in evidence.steps:
        try:
            model = traffic.promise_of(evidence, step)
            flows = () if model is None else model.sent()
        except NoCostModel:
            return None
        if model is None:
            return None
        promised: dict[_Key, tuple[Fraction, int]] = {}
        for flow in flows:
            key: _Key = (flow.axis, flow.operation, not flow.integers)
            total, most = promised.get(key, (Fraction(0), 0))
            promised[key] = total + flow.bytes, most + flow.range[1]
        made = _made(evidence, recordings, step)
        if step and (other := _unlike(recordings, step, made, promised)) is not None:
            return other
        beyond = (_beyond(own, promised.get(key), key, step) for key, own in made.items())
        surplus = [each for each in beyond if each is not None]
        if surplus:
            return min(surplus, key=lambda d: (d.event.number, d.event.rank))
        for key, (total, _) in promised.items():
            own = made.get(key, [])
            sent = sum((_bytes(e, key[2]) for e in own), Fraction(0))
            if sent < total:
                near = own or [e for each in made.values() for e in each]
                if near:
                    what = f"step {step} sends {_text(sent)} bytes by {key[1]} over axis {key[0]}"
                    right = f"{what}, expected {_text(total)}"
                    return Difference(right, f"the last such call is {near[-1].name}", near[-1])
        if (control := _control(evidence, recordings, step)) is not None:
            return control
    return None


def _unlike(
    recordings: Mapping[int, Recording],
    step: int,
    made: Mapping[_Key, list[Event]],
    promised: Mapping[_Key, tuple[Fraction, int]],
) -> Difference | None:
    """The first call of a step with a surplus that the step before, which had none, lacks."""
    beyond = {key for key, own in made.items() if _beyond(own, promised.get(key), key, step)}
    for recording in recordings.values() if beyond else ():
        calls = [e for e in recording.events if e.kind == "call" and e.phase in _PHASES]
        now, before = ([e for e in calls if e.step == s] for s in (step, step - 1))
        for place, event in enumerate(now):
            twin = before[place] if place < len(before) else None
            if twin is None or (twin.name, twin.more["loads"]) != (event.name, event.more["loads"]):
                right = (
                    f"on rank {event.rank} step {step} makes {place} calls as step {step - 1} does"
                )
                return Difference(right, f"the next is {event.more['text']}", event)
    return None


def _control(
    evidence: Evidence, recordings: Mapping[int, Recording], step: int
) -> Difference | None:
    """The largest call that moves integers, where the check says that they are too many."""
    outcome = checks.decide("traffic", evidence)
    if outcome.status != "fail":
        return None
    every = [e for r in recordings.values() for e in r.events if e.kind == "call"]
    own = [e for e in every if e.step == step and e.phase in _PHASES and _bytes(e, False)]
    if not own:
        return None
    model = traffic.promise_of(evidence, step)
    for record in evidence.records if model is not None else ():
        limits = model.agreements(record.rank) if model is not None else None
        told = [e for e in every if e.rank == record.rank and e.name == "broadcast"]
        told = [e for e in told if e.phase == "update" and _bytes(e, False)]
        if limits is not None and len(told) > limits[1]:
            late = told[limits[1]]
            return Difference(outcome.message, f"it does so in step {late.step}", late)
    largest = max(own, key=lambda e: (_bytes(e, False), -e.number))
    wrong = f"the largest call of integers on rank {largest.rank} is {largest.more['text']}"
    return Difference(outcome.message, wrong, largest)


def _made(
    evidence: Evidence, recordings: Mapping[int, Recording], step: int
) -> dict[_Key, list[Event]]:
    """The calls of a step by axis, operation and whether they move floats, rank by rank."""
    found: dict[_Key, list[Event]] = defaultdict(list)
    for recording in recordings.values():
        for event in recording.events:
            if event.kind != "call" or event.step != step or event.phase not in _PHASES:
                continue
            group = event.more["group"]
            if len(group) < 2:
                continue
            axis = traffic.axis_of(group, evidence.case.mesh)
            for floating in {bool(load[1]) for load in event.more["loads"]}:
                found[axis, event.name, floating].append(event)
    return found


def _beyond(
    made: list[Event], promised: tuple[Fraction, int] | None, key: _Key, step: int
) -> Difference | None:
    """The first call with which ranks send more than was promised."""
    axis, operation, floating = key
    if promised is None and not floating:
        return None
    total, most = promised or (Fraction(0), 0)
    sent = sum((_bytes(e, floating) for e in made), Fraction(0))
    if sent <= total and len(made) <= most:
        return None
    of = f"{operation} over axis {axis}" + ("" if floating else " of integers")
    if promised is None or not total:
        right = f"step {step} promises no {of}"
        return Difference(right, f"rank {made[0].rank} makes one", made[0])
    right = f"step {step} promises {_text(total)} bytes by {of} over all ranks"
    if sent == total:
        right = f"step {step} promises {most} calls of {of} over all ranks"
        by_number: dict[int, int] = defaultdict(int)
        ranks = len({e.rank for e in made})
        for event in sorted(made, key=lambda e: (e.number, e.rank)):
            by_number[event.rank] += 1
            if by_number[event.rank] > most // ranks:
                return Difference(
                    right, f"call {by_number[event.rank]} on rank {event.rank}", event
                )
    # Of calls of one kind the one that stands out is the largest, or the last.
    so_far, ranks = defaultdict[int, Fraction](Fraction), len({e.rank for e in made})
    for event in sorted(made, key=lambda e: (e.number, e.rank)):
        so_far[event.rank] += _bytes(event, floating)
        if so_far[event.rank] > total / ranks:
            wrong = f"rank {event.rank} exceeds its share with call number {event.more['number']}"
            return Difference(right, f"{_text(sent)} are sent: {wrong}", event)
    return Difference(right, f"{_text(sent)} are sent", made[-1])


def _bytes(event: Event, floating: bool) -> Fraction:
    loads = (load for load in event.more["loads"] if bool(load[1]) is floating)
    return sum((Fraction(load[3]) for load in loads), Fraction(0))


def _text(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.1f}"
