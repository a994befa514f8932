"""Two ratios of two sessions, on one machine or on two: is their difference certain?

Seconds of two machines are never compared.  What is compared is a *log ratio* that each machine
measured by itself, side by side: ``r = ln(time of A / time of B)``, or the log of an efficiency.
Delta = r_X - r_Y, SE = sqrt(SE_X^2 + SE_Y^2), degrees of freedom by Welch (Biometrika 34, 1947);
the verdict is that of ``ratios.py``.  The margin is 5 %, or what the A/A pairs of both sessions
leave open of *their* difference, whichever is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardproof.compare import ratios
from shardproof.compare.snapshot import Sample


@dataclass(frozen=True)
class Difference(ratios.Estimate):
    """Delta of two log ratios.

    ``blocks`` are those of both.  ``p`` is that of the interval, ``p_holm`` by Holm over all that
    were compared with it.
    """

    welch: float
    p_holm: float = 1.0

    @property
    def freedom(self) -> float:
        return self.welch


def interval(sample: Sample) -> tuple[float, float]:
    """The paired t interval of a ratio itself (1: no difference)."""
    half = _half_width(sample)
    return math.exp(sample.mean - half), math.exp(sample.mean + half)


def _half_width(sample: Sample) -> float:
    return ratios.t_quantile(ratios.CONFIDENCE, sample.blocks - 1) * sample.error


def difference(x: Sample, y: Sample, confidence: float = ratios.CONFIDENCE) -> Difference:
    """Interval of ``x - y``: positive where ``x`` is the larger ratio.

    :raises ValueError: a sample of fewer than 2 blocks.
    """
    if min(x.blocks, y.blocks) < 2:
        raise ValueError(f"an interval needs at least 2 blocks, not {min(x.blocks, y.blocks)}")
    mean, error, blocks = x.mean - y.mean, math.hypot(x.error, y.error), x.blocks + y.blocks
    freedom = blocks - 2.0
    if error > 0:
        freedom = 1 / sum((s.error / error) ** 4 / (s.blocks - 1) for s in (x, y))
    half, sd = ratios.t_quantile(confidence, freedom) * error, error * math.sqrt(blocks)
    made = Difference(blocks, mean, mean - half, mean + half, sd, None, False, freedom)
    p = ratios.difference_p(made)
    return replace(made, p=p, p_holm=p)


def margin(x: Sample | None, y: Sample | None) -> float:
    """Smallest relevant difference in log units, from the A/A pairs of both sessions."""
    floor = math.log1p(ratios.SMALLEST_MARGIN)
    match [same for same in (x, y) if same is not None and same.blocks > 1]:
        case [one]:
            return max(floor, _half_width(one))
        case [one, other]:
            return max(floor, difference(one, other).half_width)
    return floor


def adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """The same differences, with ``p_holm`` for all of them together."""
    ps = ratios.holm([item.p if item.p is not None else 1.0 for item in differences])
    return [replace(item, p_holm=p) for item, p in zip(differences, ps, strict=True)]
