"""Whether a method is non-inferior to dense training: pure functions of the runs' results.

A method and the dense system train with the same seeds: equal initial values, batches and order.
d = ln(steps of the method / steps of the dense system), one a seed, both to the same loss.

    non-inferior    the 95 % interval of the mean of d (paired t) ends below ln margin
    inferior        it begins above
    not shown       neither: more seeds would tell

A seed in which the method misses the target counts with all steps of the budget, whenever it ended
(one whose loss is no number ends early), and that is too few: the mean is only a lower bound, so
such a method is never non-inferior.  The interval is that of these numbers; neither of its ends is
a bound, for what a missed seed lacks would move the mean and spread the seeds.  Where the dense
system misses the target, or ranks broke, there is nothing to compare with: ``precondition``.

Seconds are compared in the same way, beside the verdict, of methods that reach the target with
every seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardproof.bench.lines import Estimate
from shardproof.bench.stats import estimate
from tools.studies.convergence.training import Trained

Verdict = Literal["non-inferior", "inferior", "not shown", "precondition"]


@dataclass(frozen=True)
class Judged:
    """``log``: of the ratio of steps; ``missed``: seeds that did not reach the target.

    ``sent``: the ratio of bytes to the target, the geometric mean over the seeds that reached it.
    ``seconds``: as ``log``, of the seconds to the target, where no seed was missed.
    """

    verdict: Verdict
    log: Estimate | None = None
    missed: Sequence[int] = ()
    sent: float | None = None
    problem: str = ""
    seconds: Estimate | None = None

    @property
    def ratio(self) -> str:
        """The ratio of steps with its interval."""
        return ("at least " if self.missed else "") + interval(self.log)

    @property
    def ratio_of_seconds(self) -> str:
        """The ratio of seconds with its interval."""
        return interval(self.seconds)

    def holds(self, expected: str) -> bool:
        """Whether the result is as expected."""
        if expected == "not non-inferior":
            return self.verdict in ("inferior", "not shown")
        return self.verdict == expected


@dataclass(frozen=True)
class Soonest:
    """The system with the least ``seconds`` to the target, by geometric mean.

    ``beside``: what else reached the target with every seed -> the ratio of seconds of the soonest
    to its own.
    """

    name: str
    beside: Mapping[str, Estimate]

    @property
    def open(self) -> list[str]:
        """The systems that it may not be faster than."""
        return [name for name, log in self.beside.items() if log.high >= 0]


def interval(log: Estimate | None) -> str:
    """A ratio with its interval, as text."""
    if log is None:
        return "-"
    mean, low, high = (math.exp(x) for x in (log.mean, log.low, log.high))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def judge(
    dense: Sequence[Trained], method: Sequence[Trained], margin: float, budget: int
) -> Judged:
    """Compare a method with the dense system, seed by seed; ``budget``: the most steps of a
    training.
    """
    for name, ends in (("dense", dense), ("method", method)):
        if broke := next((end.problem for end in ends if end.problem), ""):
            return Judged("precondition", problem=f"{name}: {broke}")
    if unmet := [seed for seed, end in enumerate(dense) if end.reached is None]:
        what = f"dense training misses the target with seeds {unmet}"
        return Judged("precondition", problem=f"{what}: give it more steps or an easier target")
    pairs = list(zip(dense, method, strict=True))
    log = estimate([math.log((other.reached or budget) / own.steps) for own, other in pairs])
    missed = [seed for seed, end in enumerate(method) if end.reached is None]
    met = [(own, other) for own, other in pairs if other.reached is not None]
    sent = None
    if met and all(own.sent and other.sent for own, other in met):
        sent = math.exp(statistics.fmean(math.log(o.sent / own.sent) for own, o in met))
    verdict: Verdict = "not shown"
    if log.low > math.log(margin):
        verdict = "inferior"
    elif log.high < math.log(margin) and not missed:
        verdict = "non-inferior"
    seconds, of_dense = _logs_of_seconds(method), _logs_of_seconds(dense)
    ratio = _paired(seconds, of_dense) if seconds and of_dense else None
    return Judged(verdict, log, missed, sent, seconds=ratio)


def soonest(ends: Mapping[str, Sequence[Trained]]) -> Soonest | None:
    """The system that reaches the target first; ``None`` if fewer than two report seconds."""
    told = {name: logs for name, own in ends.items() if (logs := _logs_of_seconds(own))}
    if len(told) < 2:
        return None
    first = min(told, key=lambda name: statistics.fmean(told[name]))
    return Soonest(first, {n: _paired(told[first], told[n]) for n in told if n != first})


def _logs_of_seconds(ends: Sequence[Trained]) -> list[float]:
    """Log seconds of each seed; empty if one missed the target or reports none."""
    logs = [math.log(end.seconds) for end in ends if end.reached is not None and end.seconds]
    return logs if len(logs) == len(ends) else []


def _paired(logs: Sequence[float], others: Sequence[float]) -> Estimate:
    return estimate([one - other for one, other in zip(logs, others, strict=True)])
