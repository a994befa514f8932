"""From raw times to efficiencies and verdicts: pure functions, called again by `verify`.

A block is ``plain, wrapped, ranks, ranks, wrapped, plain``: whatever drifts meets all three alike.
Its value is ``ln E``, the sample of a paired t interval (:mod:`shardproof.bench.stats`):

    strong   E = T1 / (N T_N)     weak   E = T1 / T_N

with T1 the median step of the block's plain (wrapped) segments and T_N that of its ranks segments.
The verdicts are those of docs/scaling.md.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardproof.bench import stats
from shardproof.bench.judge import alike
from shardproof.bench.lines import CellFigures, Efficiency, Interval, JudgedCell, MeasuredCell
from shardproof.bench.scaling import modelled
from shardproof.bench.subjects import ALONE_ORDER, BASES, LOSS_TOLERANCE, ORDER

#: Verdicts that are about a measured efficiency.
MEASURED = ("holds", "below", "inconclusive")


def judge(rows: Iterable[stats.TimedStep], mode: str, world: int) -> CellFigures:
    """Efficiencies against both bases with 95 % intervals, and median seconds of a step by side."""
    rows = list(rows)
    together = any(row.side == "ranks" for row in rows)
    order = ORDER if together else ALONE_ORDER
    times = stats.step_times(rows, len(order), BASES)
    medians: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    every: dict[str, list[float]] = defaultdict(list)
    for (launch, _, block, side), seconds in times.items():
        medians[launch, block][side] = statistics.median(seconds)
        every[side] += seconds
    launches = [launch for launch, _ in medians]
    efficiency = wrapping = differ = None
    if len(medians) >= 2:
        wrapping = _ratio([math.log(b["wrapped"] / b["plain"]) for b in medians.values()])
    if len(medians) >= 2 and together:
        ideal = math.log(world) if mode == "strong" else 0.0
        logs = {
            base: [math.log(block[base] / block["ranks"]) - ideal for block in medians.values()]
            for base in BASES
        }
        efficiency = {base: _ratio(values) for base, values in logs.items()}
        differ = stats.launches_differ(list(zip(launches, logs["plain"], strict=True)))
    return CellFigures(
        blocks=len(medians),
        launches=len(set(launches)),
        median_seconds={side: statistics.median(seen) for side, seen in sorted(every.items())},
        efficiency=efficiency,
        wrapping=wrapping,
        launches_differ_p=differ,
    )


def _ratio(logs: Sequence[float]) -> Efficiency:
    log = stats.estimate(logs)
    return Efficiency(**log.ratios(), log=log)


def verdict(efficiency: Interval, target: float) -> str:
    """Whether an efficiency with its interval reaches ``target``."""
    if efficiency.low >= target:
        return "holds"
    return "below" if efficiency.high < target else "inconclusive"


def conclude(line: MeasuredCell, rows: Sequence[stats.TimedStep]) -> JudgedCell:
    """Verdict, reason and figures that raw times and the rest of the line give.

    Of a cell that was refused as oversubscribed, ``rows`` are those of the launch in which its
    single rank was measured.  Where all of its ranks were, too, sharing cores, their seconds are
    told, and no efficiency.
    """
    cell, room = line.cell, line.room
    judged = judge(rows, cell.mode, cell.world)
    seconds = dict(judged.median_seconds)
    if line.refused:
        if not line.crowded:
            seconds.pop("ranks", None)
        none = dict.fromkeys(("efficiency", "launches_differ_p"))
        judged = judged.model_copy(update=none | {"median_seconds": seconds})
    efficiency, reason = judged.efficiency, ""
    same, why = _trained_alike(line)
    if line.problem is not None:
        word, reason = line.problem
    elif same is False:
        word, reason = "fail", why
    elif line.refused and room is not None:
        word = "oversubscribed"
        threads = "" if room.threads == 1 else f" of {room.threads} threads"
        what = "no efficiency" if line.crowded else "not measured"
        reason = f"{cell.world} ranks{threads}, {room.ranks} {room.of}: {what}"
    elif efficiency is None:
        word, reason = (
            "inconclusive",
            f"an interval needs at least 2 whole blocks, and there are {judged.blocks}",
        )
    elif same is None:
        word, reason = "inconclusive", why
    else:
        word = verdict(efficiency["plain"], cell.target)
        if word == "inconclusive":
            needed = stats.blocks_needed(efficiency["plain"].log.sd)
            holds = f"the interval holds the target of {cell.target:.0%}"
            reason = f"{holds}; {needed} blocks give a half-width of 5 % here"
    targets = line.targets_per_step
    is_scored = word in MEASURED and "ranks" in seconds
    return JudgedCell(
        **dict(judged),
        verdict=word,
        reason=reason,
        trained_alike=same,
        tokens_per_second={k: targets[k] / s for k, s in seconds.items() if k in targets},
        modelled=modelled.modelled(line, seconds.get("plain")),
        scorecard=modelled.scorecard(line, seconds["ranks"]) if is_scored else None,
    )


def _trained_alike(line: MeasuredCell) -> tuple[bool | None, str]:
    """Whether the sides of one batch train the same (``None``: not known), and why not."""
    cell, losses = line.cell, line.losses
    for side in ["wrapped", *(["ranks"] if cell.mode == "strong" and line.together else [])]:
        same, why = alike(losses.get("plain"), losses.get(side), LOSS_TOLERANCE[cell.dtype])
        if same is False:
            what = "the wrapped system alone" if side == "wrapped" else f"{cell.world} ranks"
            why = f"the plain program and {what}: {why}"
        if not same:
            return same, why
    return True, ""
