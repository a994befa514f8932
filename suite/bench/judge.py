"""The verdict on a comparison, from raw times and what else its line holds.  Pure.

Sides that do not train the same are not compared: the faster one is no faster.  Ranks return the
losses of their first steps at the end of a launch; a step's loss is the sum over data coordinates.
If the first launch was stopped nobody knows, and times alone decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardproof.bench import stats
from shardproof.bench.lines import JudgedPair, MeasuredPair
from shardproof.bench.model import scorecard
from shardproof.bench.subjects import LOSS_TOLERANCE, RankTimes

#: Part of stored evidence.  Why times of sides whose losses are not known have no verdict.
UNKNOWN = (
    "the first launch was stopped before ranks reported losses: whether the sides train the "
    "same is not known"
)


def losses_of(records: Sequence[RankTimes], side: str) -> list[float]:
    """Sums over data coordinates; of each the share of the first rank that learns it."""
    by_coordinate: dict[int, list[list[float | None]]] = {}
    for record in records:
        coordinate = record.coordinates[side]
        if coordinate is not None:
            by_coordinate.setdefault(coordinate, []).append(record.losses[side])
    steps = zip(*(zip(*ranks, strict=True) for ranks in by_coordinate.values()), strict=True)
    return [
        math.fsum(next((v for v in ranks if v is not None), 0.0) for ranks in coordinates)
        for coordinates in steps
    ]


def targets_of(records: Sequence[RankTimes], side: str) -> int:
    """Targets of one step of ``side``: those of the first rank of each data coordinate."""
    first = {
        record.coordinates[side]: record.targets[side]
        for record in reversed(records)
        if record.coordinates[side] is not None
    }
    return sum(first.values())


def alike(
    first: Sequence[float] | None, second: Sequence[float] | None, tolerance: float
) -> tuple[bool | None, str]:
    """Whether losses differ by no more than ``tolerance``, relative; and why not.

    ``None``: not known, because the losses of a side are missing.
    """
    if not first or not second:
        return None, UNKNOWN
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        if not abs(a - b) <= tolerance * max(abs(a), abs(b)):
            difference = f"loss of step {step} is {a:.6g} and {b:.6g}"
            return False, f"the sides do not train the same: {difference}"
    return True, ""


def conclude(line: MeasuredPair, rows: Sequence[stats.TimedStep]) -> JudgedPair:
    """Verdict, reason and figures that raw times and the rest of the line give."""
    word: str
    word, blocks, figures = stats.judge(rows)
    reason = ""
    tolerance = line.pair.loss_tolerance or LOSS_TOLERANCE[line.pair.dtype]
    same, why = alike(line.losses.get("a"), line.losses.get("b"), tolerance)
    if line.problem is not None:
        word, reason = line.problem
    elif same is False:
        word, reason = "fail", why
    elif figures is None:
        reason = f"an interval needs at least 2 whole blocks, and there are {blocks}"
    elif same is None:
        word, reason = "inconclusive", why
    elif word == "inconclusive":
        reason = f"effects from {figures.smallest_effect:.1%} on can be seen with these blocks"
    goal = line.pair.goal
    met = None
    if goal is not None and figures is not None and same is not None:
        met = figures.high <= goal
    seconds = {} if figures is None else figures.median_seconds
    trains, samples = line.pair.action == "step", line.pair.workload.global_batch
    return JudgedPair(
        verdict=word,
        blocks=blocks,
        figures=figures,
        reason=reason,
        trained_alike=same,
        scorecard=scorecard.cards(line) if same else None,
        goal_met=met,
        targets_per_second={
            side: line.targets_per_step.get(side, 0) / s for side, s in seconds.items() if trains
        },
        samples_per_second={side: samples / s for side, s in seconds.items() if trains},
    )
