"""From raw times to efficiencies, verdicts and the table: pure functions, called again by `verify`.

A block is ``plain, wrapped, ranks, ranks, wrapped, plain``: whatever drifts meets all three alike.
Its value is ``ln E``, the sample of a paired t interval (:mod:`shardproof.bench.stats`):

    strong   E = T1 / (N T_N)     weak   E = T1 / T_N

with T1 the median step of the block's plain (wrapped) segments and T_N that of its ranks segments.

    holds           certain to reach the target against the plain program
    below           certain to miss it
    inconclusive    neither
    oversubscribed  more ranks than physical cores (or GPUs): not measured; a modelled figure stands
                    beside it
    fail            the sides do not train the same
    crash, hang, precondition   there is nothing to judge
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardproof.bench import stats
from shardproof.bench.same_training import alike
from shardproof.bench.scaling import modelled
from shardproof.bench.scaling.matrix import ALONE_ORDER, BASES, ORDER, Cell, Room

#: Verdicts that are about a measured efficiency.
MEASURED = ("holds", "below", "inconclusive")

Line = Mapping[str, Any]


def judge(rows: Iterable[stats.TimedStep], mode: str, world: int) -> dict[str, Any]:
    """Efficiencies against both bases with 95 % intervals, and median seconds of a step by side.

    ``efficiency`` is ``None`` below 2 whole blocks, and where no more than one rank was timed.
    ``wrapping`` is the wrapped system alone over the plain program.
    """
    rows = list(rows)
    together = any(row.side == "ranks" for row in rows)
    order = ORDER if together else ALONE_ORDER
    times = stats.step_times(rows, len(order), BASES)
    medians: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    every: dict[str, list[float]] = defaultdict(list)
    for (launch, _, block, side), seconds in times.items():
        medians[launch, block][side] = statistics.median(seconds)
        every[side] += seconds
    told: dict[str, Any] = {
        "blocks": len(medians),
        "launches": len({launch for launch, _ in medians}),
        "median_seconds": {side: statistics.median(seen) for side, seen in sorted(every.items())},
        "efficiency": None,
        "wrapping": None,
        "launches_differ_p": None,
    }
    if len(medians) < 2:
        return told
    apart = [math.log(block["wrapped"] / block["plain"]) for block in medians.values()]
    told["wrapping"] = _figures(apart)
    if together:
        ideal = math.log(world) if mode == "strong" else 0.0
        logs = {
            base: [math.log(block[base] / block["ranks"]) - ideal for block in medians.values()]
            for base in BASES
        }
        told["efficiency"] = {base: _figures(values) for base, values in logs.items()}
        by_launch = [launch for launch, _ in medians]
        told["launches_differ_p"] = stats.launches_differ(
            list(zip(by_launch, logs["plain"], strict=True))
        )
    return told


def _figures(logs: Sequence[float]) -> dict[str, Any]:
    found = stats.estimate(logs)
    return {
        "ratio": math.exp(found.mean),
        "low": math.exp(found.low),
        "high": math.exp(found.high),
        "half_width": math.expm1(found.half_width),
        "log": asdict(found),
    }


def verdict(efficiency: Line, target: float) -> str:
    """Whether an efficiency with its interval reaches ``target``."""
    if efficiency["low"] >= target:
        return "holds"
    return "below" if efficiency["high"] < target else "inconclusive"


def conclude(line: Line, rows: Sequence[stats.TimedStep]) -> dict[str, Any]:
    """Verdict, reason and figures that raw times and the rest of the line give.

    Of a cell that was refused as oversubscribed, ``rows`` are those of the launch in which its
    single rank was measured.
    """
    cell = Cell.from_dict(line["cell"])
    room = Room(**line["room"])
    refused = room.oversubscribed(cell.world)
    judged = judge(rows, cell.mode, cell.world)
    if refused:
        judged["efficiency"] = judged["launches_differ_p"] = None
        judged["median_seconds"].pop("ranks", None)
    found, reason = judged["efficiency"], ""
    same, why = _trained_alike(line["losses"], cell, refused)
    if line["problem"] is not None:
        word, reason = line["problem"]
    elif same is False:
        word, reason = "fail", why
    elif refused:
        word = "oversubscribed"
        threads = "" if room.threads == 1 else f" of {room.threads} threads"
        reason = f"{cell.world} ranks{threads}, {room.ranks} {room.of}: not measured"
    elif found is None:
        word, reason = "inconclusive", f"{judged['blocks']} whole blocks: an interval needs 2"
    elif same is None:
        word, reason = "inconclusive", why
    else:
        word = verdict(found["plain"], cell.target)
        if word == "inconclusive":
            needed = stats.blocks_needed(found["plain"]["log"]["sd"])
            reason = (
                f"the interval holds the target of {cell.target:.0%}; {needed} blocks give a "
                "half-width of 5 % here"
            )
    rates = {
        side: line["targets_per_step"][side] / seconds
        for side, seconds in judged["median_seconds"].items()
        if side in line["targets_per_step"]
    }
    card = None
    if word in MEASURED and "ranks" in judged["median_seconds"]:
        card = modelled.scorecard(line, judged["median_seconds"]["ranks"])
    return {
        "verdict": word,
        "reason": reason,
        "trained_alike": same,
        **judged,
        "tokens_per_second": rates,
        "modelled": modelled.modelled(line, judged["median_seconds"].get("plain")),
        "scorecard": card,
    }


def _trained_alike(
    losses: Mapping[str, Sequence[float]], cell: Cell, refused: bool
) -> tuple[bool | None, str]:
    """Whether the sides of one batch train the same (``None``: not known), and why not."""
    for side in ["wrapped", *(["ranks"] if cell.mode == "strong" and not refused else [])]:
        same, why = alike(losses.get("plain"), losses.get(side), cell.dtype)
        if same is False:
            what = "the wrapped system alone" if side == "wrapped" else f"{cell.world} ranks"
            why = f"the plain program and {what}: {why}"
        if not same:
            return same, why
    return True, ""
