"""Do the sides of a comparison train the same?  If not, the faster one is no faster.  Pure.

Ranks tell the losses of their first steps when a launch ends; a step's loss is the sum over data
coordinates.  Where the first launch was stopped nobody knows, and times alone decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.bench.sides import LOSS_TOLERANCE

Record = Mapping[str, Any]
#: Why times of sides whose losses are not known have no verdict.
UNKNOWN = (
    "the first launch was stopped before its ranks told their losses: whether the sides train the "
    "same is not known"
)


def losses_of(records: Sequence[Record], side: str) -> list[float]:
    """Sums over data coordinates; of each the share of the first rank that learns it."""
    told: dict[int, list[list[float | None]]] = {}
    for record in records:
        coordinate = record["coordinates"][side]
        if coordinate is not None:
            told.setdefault(coordinate, []).append(record["warm_up"][side]["losses"])
    steps = zip(*(zip(*ranks, strict=True) for ranks in told.values()), strict=True)
    return [
        math.fsum(next((v for v in ranks if v is not None), 0.0) for ranks in coordinates)
        for coordinates in steps
    ]


def by_coordinate(records: Sequence[Record], side: str, key: str) -> list[Any]:
    """What the first rank of each data coordinate tells of ``side`` under ``key``."""
    found: dict[int, Any] = {}
    for record in records:
        coordinate = record["coordinates"][side]
        if coordinate is not None:
            found.setdefault(coordinate, record[key][side])
    return list(found.values())


def alike(
    first: Sequence[float] | None, second: Sequence[float] | None, dtype: str
) -> tuple[bool | None, str]:
    """Whether losses differ by no more than rounding in ``dtype``; and why not.

    ``None``: not known, for want of the losses of a side.
    """
    if not first or not second:
        return None, UNKNOWN
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        if not abs(a - b) <= LOSS_TOLERANCE[dtype] * max(abs(a), abs(b)):
            told = f"loss of step {step} is {a:.6g} and {b:.6g}"
            return False, f"the sides do not train the same: {told}"
    return True, ""
