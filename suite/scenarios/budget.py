"""The cases that fit into a time budget.

Every (implementation, label, backend) gives one case in turn, until the estimated time is used up.
So a small budget still covers each of them.  Cases without room are reported, never dropped.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.case import Case
from shardproof.runs.durations import Durations

#: Seconds per case without an earlier duration (4 ranks, two cores).
DEFAULT_SECONDS = {"in_memory": 0.4}
OTHER_SECONDS = 0.8
#: Starting and stopping the launcher.
START_SECONDS = 4.0


@dataclass(frozen=True)
class CaseSchedule:
    """``chosen`` in the order to run; ``seconds`` is the estimated wall-clock time."""

    chosen: list[Case]
    left_out: list[Case]
    seconds: float


def fit_cases(
    cases: Sequence[Case], durations: Durations, jobs: int, minutes: float | None
) -> CaseSchedule:
    """Choose the ``cases`` that ``jobs`` leaders can run in ``minutes`` (``None``: all)."""
    estimates = _estimates(cases, durations)
    if minutes is None:
        used = START_SECONDS + sum(estimates.values()) / jobs
        return CaseSchedule(list(cases), [], used if cases else 0.0)
    chosen: list[Case] = []
    left_out: list[Case] = []
    used = START_SECONDS
    for case in _in_turn(cases):
        cost = estimates[case.id] / jobs
        if used + cost <= minutes * 60:
            used += cost
            chosen.append(case)
        else:
            left_out.append(case)
    return CaseSchedule(chosen, left_out, used if chosen else 0.0)


def _estimates(cases: Sequence[Case], durations: Durations) -> dict[str, float]:
    known = {case.id: durations.estimate(case.id) for case in cases}
    by_backend: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        seconds = known[case.id]
        if seconds is not None:
            by_backend[case.backend].append(seconds)
    typical = {backend: statistics.median(values) for backend, values in by_backend.items()}
    seconds_of = {}
    for case in cases:
        seconds = known[case.id]
        if seconds is None:
            default = DEFAULT_SECONDS.get(case.backend, OTHER_SECONDS)
            seconds = typical.get(case.backend, default)
        seconds_of[case.id] = seconds
    return seconds_of


def _in_turn(cases: Sequence[Case]) -> list[Case]:
    """One case of each (implementation, label, backend) after the other, larger worlds first."""
    queues: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: (case.tier != "quick", -case.world)):
        queues[case.implementation, case.label, case.backend].append(case)
    rounds = itertools.zip_longest(*queues.values())
    return [case for turn in rounds for case in turn if case is not None]
