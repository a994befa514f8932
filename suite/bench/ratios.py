"""Log ratios of times that one run measured side by side, and what may be said of them.

A *log ratio* is ``ln(time of A / time of B)``: 0.1 when A takes 10 % longer.  Here are the estimate
of one, the verdict on it, and the difference of those of two sessions, on one machine or on two.

Seconds of two machines are never compared.  What is compared is a log ratio that each machine
measured by itself, or the log of an efficiency: Delta = r_X - r_Y, SE = sqrt(SE_X^2 + SE_Y^2),
degrees of freedom by Welch (Biometrika 34, 1947).  The margin is 5 %, or what the A/A pairs of both
sessions leave open of *their* difference, whichever is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from shardproof.compare.snapshot import Sample

#: A difference below this is called small even where it is certain.
SMALLEST_MARGIN = 0.05
#: Where an A/A pair leaves more than this open, nothing beyond it is called the same or small.
LARGEST_MARGIN = 0.10
CONFIDENCE = 0.95
#: The effect that a comparison "can see" is the one it would call different this often.
POWER = 0.8

#: Verdicts that claim a difference; in a report they stand if they survive all others beside them.
DIFFERENT = ("faster", "slower", "small difference")

Verdict = Literal["faster", "slower", "same", "small difference", "inconclusive"]


@dataclass(frozen=True)
class Estimate:
    """The estimate of A's time over B's from blocks; ``mean``, ``low``, ``high``, ``sd`` in log
    units.

    ``p`` is that of the sign-flip permutation, exact if ``exact``; ``None`` below 6 blocks, where
    it cannot get under 0.05.
    """

    blocks: int
    mean: float
    low: float
    high: float
    sd: float
    p: float | None
    exact: bool

    @property
    def error(self) -> float:
        """Standard error of the mean, in log units."""
        return self.sd / math.sqrt(self.blocks)

    @property
    def freedom(self) -> float:
        return self.blocks - 1

    @property
    def half_width(self) -> float:
        """Half the interval, in log units."""
        return (self.high - self.low) / 2

    @property
    def differs(self) -> bool:
        return self.low > 0 or self.high < 0

    def ratios(self) -> dict[str, float]:
        ratios = {key: math.exp(getattr(self, key)) for key in ("low", "high")}
        return ratios | {"ratio": math.exp(self.mean), "half_width": math.expm1(self.half_width)}


def _scipy() -> Any:
    """Its distributions, once something is judged: it is slow to import, and ranks, which import
    this for what they leave, have none on a node.
    """
    from scipy import stats

    return stats


@cache
def t_quantile(confidence: float, freedom: float) -> float:
    return float(_scipy().t.ppf((1 + confidence) / 2, freedom))


def verdict(estimated: Estimate, least: float) -> Verdict:
    """The verdict on A against B, where differences below ``least`` (log units) do not matter."""
    if estimated.differs:
        if abs(estimated.mean) >= least:
            return "slower" if estimated.mean > 0 else "faster"
        if _alike(estimated, least):
            return "same"
        small = abs(estimated.mean) < math.log1p(LARGEST_MARGIN)
        return "small difference" if small else "inconclusive"
    return "same" if _alike(estimated, least) else "inconclusive"


def _alike(estimated: Estimate, least: float) -> bool:
    limit = min(least, math.log1p(LARGEST_MARGIN))
    return -limit < estimated.low and estimated.high < limit


def smallest_effect(estimated: Estimate, least: float, power: float = POWER) -> float:
    """The difference (log units) that as many blocks as these call faster or slower so often.

    The mean has to clear the margin and its own half-width, so the effect lies beyond the larger.
    """
    hurdle = max(least, t_quantile(CONFIDENCE, estimated.freedom) * estimated.error)
    return hurdle + float(_scipy().t.ppf(power, estimated.freedom)) * estimated.error


def difference_p(estimated: Estimate) -> float:
    """p of "no difference" by the paired t: below 0.05 exactly where the interval excludes 0."""
    if estimated.sd == 0:
        return float(estimated.mean == 0)
    return 2 * float(_scipy().t.sf(abs(estimated.mean) / estimated.error, estimated.freedom))


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p of each hypothesis: rejecting those below a level errs at most so often in all.

    Source: Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979: the k-th smallest
    of m is multiplied by m - k + 1, and none is smaller than one before it.
    """
    adjusted, least = [0.0] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, (len(ps) - place) * ps[index]))
        adjusted[index] = least
    return adjusted


@dataclass(frozen=True)
class Difference(Estimate):
    """Delta of two log ratios.

    ``blocks`` are those of both.  ``p`` is that of the interval, ``p_holm`` by Holm over all that
    were compared with it.
    """

    welch: float
    p_holm: float = 1.0

    @property
    def freedom(self) -> float:
        return self.welch


def interval(sample: Sample) -> dict[str, float]:
    """A ratio (1: no difference), and its paired t interval from ``low`` to ``high``."""
    half = _half_width(sample)
    low, high = math.exp(sample.mean - half), math.exp(sample.mean + half)
    return {"ratio": sample.ratio, "low": low, "high": high}


def _half_width(sample: Sample) -> float:
    return t_quantile(CONFIDENCE, sample.blocks - 1) * sample.error


def difference(x: Sample, y: Sample, confidence: float = CONFIDENCE) -> Difference:
    """Interval of ``x - y``: positive where ``x`` is the larger ratio.

    :raises ValueError: a sample of fewer than 2 blocks.
    """
    if min(x.blocks, y.blocks) < 2:
        raise ValueError(f"an interval needs at least 2 blocks, not {min(x.blocks, y.blocks)}")
    mean, error, blocks = x.mean - y.mean, math.hypot(x.error, y.error), x.blocks + y.blocks
    freedom = blocks - 2.0
    if error > 0:
        freedom = 1 / sum((s.error / error) ** 4 / (s.blocks - 1) for s in (x, y))
    half, sd = t_quantile(confidence, freedom) * error, error * math.sqrt(blocks)
    made = Difference(blocks, mean, mean - half, mean + half, sd, None, False, freedom)
    p = difference_p(made)
    return replace(made, p=p, p_holm=p)


def margin(x: Sample | None, y: Sample | None) -> float:
    """Smallest relevant difference in log units, from the A/A pairs of both sessions."""
    floor = math.log1p(SMALLEST_MARGIN)
    match [same for same in (x, y) if same is not None and same.blocks > 1]:
        case [one]:
            return max(floor, _half_width(one))
        case [one, other]:
            return max(floor, difference(one, other).half_width)
    return floor


def adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """The same differences, with ``p_holm`` for all of them together."""
    ps = holm([item.p if item.p is not None else 1.0 for item in differences])
    return [replace(item, p_holm=p) for item, p in zip(differences, ps, strict=True)]
