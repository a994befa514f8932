"""Events of a case that its records tell: what its checks had before them, and what they had not.

A check that is never given a strided tensor, an empty round or buckets that are cut anew passes for
nothing there.  The result of each case names the events that occurred; the report of a run counts
them and tells those that no case saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardproof.evidence.assembled import Figures
    from shardproof.evidence.records import RankRecord, StepRecord
    from shardproof.ledgers.traffic import LoggedCall

#: Phases of a step.
_INSIDE = ("forward", "backward", "update")
_NARROW = ("float16", "bfloat16")


def _calls(figures: Figures) -> Iterator[LoggedCall]:
    for record in figures.records:
        yield from (call for call in record.traffic if call.phase in _INSIDE)


def _of_calls(holds: Callable[[LoggedCall], bool]) -> Callable[[Figures], bool]:
    return lambda figures: any(map(holds, _calls(figures)))


def _of_steps(holds: Callable[[StepRecord], bool]) -> Callable[[Figures], bool]:
    return lambda figures: any(holds(step) for each in figures.records for step in each.steps)


def _in_flight(figures: Figures) -> Iterator[tuple[int, int | None]]:
    """Of each call that was waited for after the next one was issued: when both were waited for."""
    for record in figures.records:
        for one, other in pairwise(record.traffic):
            if one.waited is not None and one.issued < other.issued < one.waited:
                yield one.waited, other.waited


def _cut_anew(figures: Figures) -> bool:
    """Whether calls inside of backward have other sizes than in the step before."""

    def sizes(record: RankRecord, step: int) -> list[int]:
        """Bytes of the reductions that begin inside of backward, in order."""
        calls = record.calls_of(step)
        return [c.payload_bytes for c in calls if c.inside_backward and c.operation == "all_reduce"]

    return any(
        sizes(record, step) != sizes(record, step + 1) != []
        for record in figures.records
        for step, (now, then) in enumerate(pairwise(record.steps))
        if now.windows == then.windows
    )


def _silent_step(figures: Figures) -> bool:
    """Whether ranks sent nothing to each other in a step, on a mesh of several."""
    return figures.case.world > 1 and any(
        not any(call.phase in _INSIDE and len(call.group) > 1 for call in record.calls_of(step))
        for record in figures.records
        for step, told in enumerate(record.steps)
        if told.present
    )


def _unlike_ranks(figures: Figures) -> bool:
    """Whether ranks make different numbers of calls in a step."""
    steps = range(min(len(record.steps) for record in figures.records))
    return any(len({len(each.calls_of(step)) for each in figures.records}) > 1 for step in steps)


def _of_norm(holds: Callable[[float, float], bool]) -> Callable[[Figures], bool]:
    def found(figures: Figures) -> bool:
        limit = figures.case.optimizer.clip_norm
        norms = (step.norm for record in figures.records for step in record.steps)
        return limit is not None and any(holds(norm, limit) for norm in norms if norm is not None)

    return found


def _lacks_a_gradient(step: StepRecord) -> bool:
    """Whether a rank has a parameter and no gradient of it when they are final."""
    gradients = step.held.get("gradients_final", {}).get("gradients")
    parameters = step.held.get("after_update", {}).get("parameters", {})
    return gradients is not None and not parameters.keys() <= gradients.keys()


#: By name: whether it occurred in a case.
EVENTS: Mapping[str, Callable[[Figures], bool]] = {
    "a call of a strided tensor": _of_calls(lambda call: bool(call.strided)),
    "a collective without elements": _of_calls(
        lambda call: call.payload_bytes == 0 and call.operation not in ("barrier", "send", "recv")
    ),
    "a call of integers": _of_calls(lambda call: not call.floating and call.payload_bytes > 0),
    "a call in a narrow dtype": _of_calls(lambda call: call.dtype in _NARROW),
    "a call of one rank alone": _of_calls(lambda call: len(call.group) == 1),
    "a call of some of the ranks": lambda figures: any(
        1 < len(call.group) < figures.case.world for call in _calls(figures)
    ),
    "a message between two ranks": _of_calls(lambda call: call.operation == "send"),
    "a call inside of backward": _of_calls(lambda call: call.inside_backward),
    "two calls in flight": lambda figures: any(True for _ in _in_flight(figures)),
    "calls waited for in another order": lambda figures: any(
        other is not None and other < one for one, other in _in_flight(figures)
    ),
    "a call that nobody waited for": _of_calls(lambda call: call.waited is None),
    "buckets cut anew in a later step": _cut_anew,
    "a step that sends nothing": _silent_step,
    "ranks that make different calls": _unlike_ranks,
    "a window without micro-batches": _of_steps(
        lambda step: (
            step.share is not None and (0 in step.windows or (step.present and not step.windows))
        )
    ),
    "a step that is skipped": _of_steps(lambda step: step.skipped),
    "gradients that are clipped": _of_norm(lambda norm, limit: norm > limit),
    "gradients below the clip": _of_norm(lambda norm, limit: norm < limit),
    "a parameter without a gradient": _of_steps(_lacks_a_gradient),
    "a unit that is computed again": lambda figures: any(
        kind == "recompute" for record in figures.records for _, kind, _ in record.events
    ),
    "a weight gradient by itself": lambda figures: any(
        done.op == "W" for record in figures.records for done in record.actions
    ),
    "members that change": _of_steps(lambda step: not step.present),
    "a step taken again": _of_steps(lambda step: bool(step.attempt)),
}


#: Of a case that calls and does not train: the event, by the layout that a row names.
_LAYOUTS = {
    "strided": "a call of a strided tensor",
    "empty": "a collective without elements",
}


def of(figures: Figures) -> tuple[str, ...]:
    """The events that occurred in a case that trains or calls; what only draws has none."""
    if not figures.case.steps:
        names = (row.name.split(", ") for record in figures.records for row in record.calls)
        words = {word for name in names for word in name}
        return tuple(event for layout, event in _LAYOUTS.items() if layout in words)
    if not figures.records:
        return ()
    return tuple(name for name, occurred in EVENTS.items() if occurred(figures))
