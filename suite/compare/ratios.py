"""Log ratios of times that one run measured side by side, and what may be said of them.

A *log ratio* is ``ln(time of A / time of B)``: 0.1 when A takes 10 % longer.  Here are the estimate
of one, and the verdict on it; wings measure ratios, :mod:`shardproof.compare.welch` compares those
of two runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

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
    """What the blocks say of A's time over B's; ``mean``, ``low``, ``high``, ``sd`` in log units.

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
    """The verdict on A beside B, where differences below ``least`` (log units) do not matter."""
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
