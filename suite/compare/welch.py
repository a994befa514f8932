"""Two ratios of two sessions, on one machine or on two: is their difference certain?

Seconds of two machines are never compared.  What is compared is a *log ratio* that each machine
measured by itself, side by side: ``r = ln(time of A / time of B)``, or the log of an efficiency.
Delta = r_X - r_Y, SE = sqrt(SE_X^2 + SE_Y^2), degrees of freedom by Welch (Biometrika 34, 1947);
the verdict is that of ``bench.stats``.  The margin is 5 %, or what the A/A pairs of both
sessions leave open of *their* difference, whichever is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardproof.bench import stats
from shardproof.compare.snapshot import Sample


@dataclass(frozen=True)
class Difference(stats.Estimate):
    """Delta of two log ratios; ``error`` is its standard error, ``freedom`` Welch's.

    ``blocks`` are those of both.  ``p`` is that of the interval, ``p_holm`` by Holm over all that
    were compared with it.
    """

    error: float
    freedom: float
    p_holm: float


def interval(sample: Sample) -> tuple[float, float]:
    """The paired t interval of a ratio itself (1: no difference)."""
    half = quantile(stats.CONFIDENCE, sample.blocks - 1) * sample.error
    return math.exp(sample.mean - half), math.exp(sample.mean + half)


def quantile(confidence: float, freedom: float) -> float:
    """Two-sided quantile of Student's t for any real degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


def difference(x: Sample, y: Sample, confidence: float = stats.CONFIDENCE) -> Difference:
    """Interval of ``x - y``: positive where ``x`` is the larger ratio.

    :raises ValueError: a sample of fewer than 2 blocks.
    """
    from scipy.special import stdtr

    if min(x.blocks, y.blocks) < 2:
        raise ValueError(f"an interval needs at least 2 blocks, not {min(x.blocks, y.blocks)}")
    mean, error = x.mean - y.mean, math.hypot(x.error, y.error)
    freedom = float(x.blocks + y.blocks - 2)
    if error > 0:
        freedom = 1 / sum((s.error / error) ** 4 / (s.blocks - 1) for s in (x, y))
    half = quantile(confidence, freedom) * error
    p = 2 * float(stdtr(freedom, -abs(mean) / error)) if error > 0 else float(mean == 0)
    blocks = x.blocks + y.blocks
    sd = error * math.sqrt(blocks)
    return Difference(
        blocks, mean, mean - half, mean + half, sd, p, False, error, freedom, p_holm=p
    )


def margin(x: Sample | None, y: Sample | None) -> float:
    """Smallest relevant difference in log units, from the A/A pairs of both sessions."""
    floor = math.log1p(stats.SMALLEST_MARGIN)
    known = [same for same in (x, y) if same is not None and same.blocks > 1]
    if not known:
        return floor
    if len(known) == 1:
        half = quantile(stats.CONFIDENCE, known[0].blocks - 1) * known[0].error
        return max(floor, half)
    return max(floor, difference(known[0], known[1]).half_width)


def smallest_effect(difference: Difference, least: float, power: float = stats.POWER) -> float:
    """The difference (log units) that as many blocks would find in ``power`` of all cases."""
    hurdle = max(least, quantile(stats.CONFIDENCE, difference.freedom) * difference.error)
    return hurdle + quantile(2 * power - 1, difference.freedom) * difference.error


def adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """The same differences, with ``p_holm`` for all of them together."""
    ps = stats.holm([item.p if item.p is not None else 1.0 for item in differences])
    return [replace(item, p_holm=p) for item, p in zip(differences, ps, strict=True)]
