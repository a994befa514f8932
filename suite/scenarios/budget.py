"""The cases that fit into a time budget.

Every (implementation, label, backend) gives one case in turn, until the estimated time is used up.
So a small budget still covers each of them.  Cases without room are reported, never dropped.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.runs.durations import Durations
from shardproof.table import grouped

#: Starting and stopping the launcher.
START_SECONDS = 4.0


T = TypeVar("T")


@dataclass(frozen=True)
class CaseSchedule:
    """``chosen`` in the order to run; ``seconds`` is the estimated wall-clock time, ``expected``
    that of each case by its id.
    """

    chosen: list[Case]
    left_out: list[Case]
    seconds: float
    expected: Mapping[str, float] = field(default_factory=dict)


def fit_cases(
    cases: Sequence[Case], durations: Durations, jobs: int, minutes: float | None
) -> CaseSchedule:
    """Choose the ``cases`` that ``jobs`` leaders can run in ``minutes`` (``None``: all)."""
    seconds = estimates(
        [(case, durations.estimate(case.id)) for case in cases],
        like=lambda case: case.backend,
        guess=lambda case: BACKENDS[case.backend].default_seconds,
    )
    expected = {case.id: each for case, each in zip(cases, seconds, strict=True)}
    chosen: list[Case] = []
    left_out: list[Case] = []
    used = START_SECONDS
    for case in cases if minutes is None else _in_turn(cases):
        cost = expected[case.id] / jobs
        if minutes is None or used + cost <= minutes * 60:
            used += cost
            chosen.append(case)
        else:
            left_out.append(case)
    return CaseSchedule(chosen, left_out, used if chosen else 0.0, expected)


def estimates(
    past: Sequence[tuple[T, float | None]],
    like: Callable[[T], Hashable],
    guess: Callable[[T], float],
) -> list[float]:
    """Seconds of each: those of the ``past``, else the median of what is alike, else a guess."""
    alike = grouped((like(item), seconds) for item, seconds in past if seconds is not None)
    typical = {key: statistics.median(values) for key, values in alike.items()}
    return [s if s is not None else typical.get(like(one)) or guess(one) for one, s in past]


def _in_turn(cases: Sequence[Case]) -> list[Case]:
    """One case of each (implementation, label, backend) after the other, larger worlds first."""
    ordered = sorted(cases, key=lambda case: (case.tier != "quick", -case.world))
    queues = grouped(((case.implementation, case.label, case.backend), case) for case in ordered)
    rounds = itertools.zip_longest(*queues.values())
    return [case for turn in rounds for case in turn if case is not None]
