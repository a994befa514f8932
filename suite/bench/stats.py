"""Statistics of paired step times; pure functions of numbers, so that a stored run is judged again.

Units: a *step time* is in seconds, the maximum over ranks; a *block* is A B B A; its *log ratio* is
``ln(median of A's steps / median of B's)``, 0.1 when A takes 10 % longer.  The blocks of a session
are the sample of a paired t interval: within a block both sides meet the same machine.  Measured
reasons (single launches called different in 82 % of A/A pairs, bootstrap false alarms of 12 to 17 %
at small samples, paired t on logs 3.5 to 5 %): docs/speed.md.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import get_args

import numpy as np

from shardproof.bench import ratios
from shardproof.bench.lines import InReport, PairFigures, PairLine, Twin
from shardproof.table import grouped

#: Up to this many blocks the permutation is exact (2^20 half sums); beyond, signs are drawn.
EXACT_BLOCKS = 40
_DRAWS, _DRAWS_AT_ONCE = 200_000, 1_000

#: Verdicts on what broke, and those that leave a question open.
BROKEN = ("crash", "hang", "fail")
OPEN = ("inconclusive", "precondition", "over budget")


def estimate(logs: Sequence[float], confidence: float = ratios.CONFIDENCE) -> ratios.Estimate:
    """Paired t interval of the mean log ratio.

    :raises ValueError: fewer than 2 blocks.
    """
    count = len(logs)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 blocks, not {count}")
    mean, sd = statistics.fmean(logs), statistics.stdev(logs)
    half = ratios.t_quantile(confidence, count - 1) * sd / math.sqrt(count)
    p, exact = sign_flip_p(logs) if count >= 6 else (None, True)
    return ratios.Estimate(count, mean, mean - half, mean + half, sd, p, exact)


def sign_flip_p(logs: Sequence[float]) -> tuple[float, bool]:
    """Share of sign assignments whose sum is at least as far from 0 as the one seen; whether exact.

    Exact by meeting in the middle: sums of both halves of the blocks, one of them sorted.
    """
    values = np.asarray(logs, dtype=np.float64)
    seen = abs(float(values.sum()))
    limit = seen - 1e-12 * max(1.0, float(np.abs(values).sum()))  # ties count whatever the order
    if len(values) <= EXACT_BLOCKS:
        sums = lambda so_far, value: np.concatenate([so_far + value, so_far - value])  # noqa: E731
        left, right = (reduce(sums, part, np.zeros(1)) for part in np.array_split(values, 2))
        left.sort()  # so that the search below goes through memory once
        right.sort()
        above = len(right) - np.searchsorted(right, limit - left, side="left")
        below = np.searchsorted(right, -limit - left, side="right")
        total = len(left) * len(right)
        return min(1.0, float(above.sum() + below.sum()) / total), True
    generator, extreme = np.random.default_rng(0), 0
    for _ in range(_DRAWS // _DRAWS_AT_ONCE):  # all of a thousand blocks would be 1.6 GB
        drawn = generator.integers(0, 2, (_DRAWS_AT_ONCE, len(values)), dtype=np.int8)
        extreme += int((np.abs((drawn * 2 - 1) @ values) >= limit).sum())
    return (extreme + 1) / (_DRAWS + 1), False


def margin(same: ratios.Estimate | None) -> float:
    """Smallest relevant difference, in log units: 5 %, or what an A/A pair here leaves open."""
    floor = math.log1p(ratios.SMALLEST_MARGIN)
    return floor if same is None else max(floor, same.half_width)


def blocks_needed(sd: float, half_width: float = math.log1p(ratios.SMALLEST_MARGIN)) -> int:
    """Blocks from which on an interval is at most ``half_width`` (log units) to each side."""
    count = 2
    while ratios.t_quantile(ratios.CONFIDENCE, count - 1) * sd / math.sqrt(count) > half_width:
        count += 1
    return count


def family(lines: Iterable[PairLine]) -> dict[str, InReport]:
    """Comparison -> what becomes of it in a report that shows all of ``lines``.

    The hypotheses are "A and B take the same time", one a comparison that has a verdict of its
    own (none where it is not known whether the sides train the same); p is that of the interval,
    so a report of one has the verdict of the comparison.  A difference that does not survive
    becomes inconclusive.  A/A pairs are controls and claim nothing; "same"
    claims that a difference is small, errs in at most 5 of 100 each, and is left as it is.
    """
    claims = get_args(ratios.Verdict)
    claiming = [line for line in lines if line.verdict in claims and line.trained_alike]
    ps = {
        line.id: ratios.difference_p(line.figures.log)
        for line in claiming
        if line.figures is not None
    }
    adjusted = dict(zip(ps, ratios.holm(list(ps.values())), strict=True))
    report = {}
    for line in claiming:
        if (p := adjusted.get(line.id)) is not None:
            lost = line.verdict in ratios.DIFFERENT and p >= 1 - ratios.CONFIDENCE
            word = "inconclusive" if lost else line.verdict
            report[line.id] = InReport(p=ps[line.id], p_holm=p, verdict=word)
    return report


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A raw time: ``seconds`` of one step on one rank.

    ``pair`` is "ab" or "aa" (of a scaling cell "scaling"); block -1 is the warm-up.
    """

    launch: int
    pair: str
    block: int
    segment: int
    side: str
    step: int
    rank: int
    seconds: float


def step_times(
    rows: Iterable[TimedStep], segments: int = 4, alone: Collection[str] = ()
) -> dict[tuple[int, str, int, str], list[float]]:
    """(launch, pair, block, side) -> its step times, each the maximum over ranks.

    A block has so many ``segments``; the sides in ``alone`` run on rank 0 only.  Blocks that some
    rank did not end (a launch that was stopped) are left out.
    """
    by_step: dict[tuple[int, str, int], dict[tuple[str, int, int], dict[int, float]]]
    by_step = defaultdict(lambda: defaultdict(dict))
    ranks: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        if row.block < 0:
            continue
        block = by_step[row.launch, row.pair, row.block]
        block[row.side, row.segment, row.step][row.rank] = row.seconds
        ranks[row.launch].add(row.rank)
    times: dict[tuple[int, str, int, str], list[float]] = defaultdict(list)
    for (launch, pair, number), steps in sorted(by_step.items()):
        whole = len({segment for _, segment, _ in steps}) == segments
        wanted = {side: {0} if side in alone else ranks[launch] for side, _, _ in steps}
        if whole and all(set(seen) == wanted[side] for (side, _, _), seen in steps.items()):
            for (side, _, _), seen in sorted(steps.items()):
                times[launch, pair, number, side].append(max(seen.values()))
    return dict(times)


def log_ratios(rows: Iterable[TimedStep]) -> dict[str, list[tuple[int, float]]]:
    """Pair -> (launch, log ratio) of every whole block; "ab" is A over B, "aa" A over its twin."""
    times = step_times(rows)
    logs: dict[str, list[tuple[int, float]]] = {"ab": [], "aa": []}
    for (launch, pair, block, side), first in times.items():
        if side != "a":
            continue
        second = times[launch, pair, block, "b" if pair == "ab" else "twin"]
        ratio = math.log(statistics.median(first) / statistics.median(second))
        logs[pair].append((launch, ratio))
    return logs


def judge(rows: Iterable[TimedStep]) -> tuple[ratios.Verdict, int, PairFigures | None]:
    """The verdict on a comparison by its times alone, the number of whole blocks, and its figures
    (none below 2 blocks).
    """
    rows = list(rows)
    logs, times = log_ratios(rows), step_times(rows)
    if len(logs["ab"]) < 2:
        return "inconclusive", len(logs["ab"]), None
    log = estimate([value for _, value in logs["ab"]])
    same = estimate([value for _, value in logs["aa"]]) if len(logs["aa"]) > 1 else None
    least, twin = margin(same), None
    if same is not None:
        about = {"sd": same.sd, "blocks": same.blocks, "blocks_needed": blocks_needed(same.sd)}
        twin = Twin.model_validate(same.ratios() | about)
    medians = {
        side: statistics.median(
            t for (_, pair, _, s), seen in times.items() if s == side and pair == "ab" for t in seen
        )
        for side in ("a", "b")
    }
    figures = PairFigures(
        **log.ratios(),
        sd=log.sd,
        launches=len({launch for launch, _ in logs["ab"]}),
        p=log.p,
        p_exact=log.exact,
        margin=math.expm1(least),
        smallest_effect=math.expm1(ratios.smallest_effect(log, least)),
        aa=twin,
        median_seconds=medians,
        launches_differ_p=launches_differ(logs["ab"]),
        log=log,
    )
    return ratios.verdict(log, least), log.blocks, figures


def launches_differ(logs: Sequence[tuple[int, float]]) -> float | None:
    """p of an analysis of variance between launches; ``None`` where there is nothing to compare.

    Blocks of one launch share its memory layout: where launches differ (p < 0.01) the interval,
    which takes blocks for independent, is too narrow.
    """
    several = [values for values in grouped(logs).values() if len(values) > 1]
    if len(several) < 2 or len({value for values in several for value in values}) < 2:
        return None
    from scipy.stats import f_oneway  # ranks import this module, and have no scipy on a node

    return float(f_oneway(*several).pvalue)
