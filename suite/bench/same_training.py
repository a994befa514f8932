"""Do the sides of a comparison train the same?  If not, the faster one is no faster.  Pure.

Ranks return the losses of their first steps at the end of a launch; a step's loss is the sum over
data coordinates.  If the first launch was stopped nobody knows, and times alone decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardproof.bench.launches import RankTimes

#: Part of stored evidence.  Why times of sides whose losses are not known have no verdict.
UNKNOWN = (
    "the first launch was stopped before its ranks told their losses: whether the sides train the "
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
    first: dict[int, int] = {}
    for record in records:
        coordinate = record.coordinates[side]
        if coordinate is not None:
            first.setdefault(coordinate, record.targets[side])
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
