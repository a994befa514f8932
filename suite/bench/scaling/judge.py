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


# ------------------------------------------------------------------------------------- tables

HEADINGS = (
    *("scaling", "system", "backend", "ranks", "verdict"),
    *("E, plain T1 [95 %]", "E, wrapped T1 [95 %]", "modelled E"),
    *("T1 plain ms", "T1 wrapped ms", "T_N ms", "tokens/s 1", "tokens/s N"),
    *("achieved / predicted", "exposed", "memory / formula"),
)
#: Those that a terminal has room for; the others are in Markdown and in the report.
NARROW = (*HEADINGS[:9], HEADINGS[10], HEADINGS[13])


def narrow(row: Sequence[str]) -> tuple[str, ...]:
    """The texts of :data:`NARROW` in a row of :func:`table`."""
    return tuple(text for text, heading in zip(row, HEADINGS, strict=True) if heading in NARROW)


def table(lines: Sequence[Line]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: one for each measured cell, one for all oversubscribed worlds of a system.

    The modelled figures of every world: :func:`modelled_table`.
    """
    rows: list[tuple[str, ...]] = []
    for members in _groups(lines):
        refused = [line for line in members if line["verdict"] == "oversubscribed"]
        rows += [_row(line) for line in members if line not in refused]
        if refused:
            rows.append(_refused_row(refused))
    return HEADINGS, rows


def modelled_table(lines: Sequence[Line]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows of modelled efficiencies: a row a system and backend, a column a world."""
    worlds = sorted({line["world"] for line in lines if _modelled(line) is not None})
    rows = []
    for members in _groups(lines):
        found = {line["world"]: _modelled(line) for line in members}
        if any(value is not None for value in found.values()):
            texts = (_share(found.get(world)) for world in worlds)
            first = members[0]
            rows.append((first["mode"], _name(first), first["backend"], *texts))
    return ("scaling", "system", "backend", *(f"{world:,}" for world in worlds)), rows


MODELLED_TITLE = (
    "Modelled efficiency by ranks: measured compute of one rank + alpha-beta communication, alpha "
    "and beta probed in the same run; not measured"
)


def _groups(lines: Sequence[Line]) -> list[list[Line]]:
    found: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        found[line["cell"]["name"], _name(line), line["backend"]].append(line)
    return [sorted(members, key=lambda line: int(line["world"])) for members in found.values()]


def _name(line: Line) -> str:
    label = line["cell"]["label"]
    return str(line["implementation"]) + (f"+{label}" if label else "")


def _row(line: Line) -> tuple[str, ...]:
    found, card = line["efficiency"] or {}, line.get("scorecard") or {}
    return (
        *(line["mode"], _name(line), line["backend"], str(line["world"]), line["verdict"]),
        *(_efficiency(found.get(base)) for base in BASES),
        _share(_modelled(line)),
        *_seconds(line, *BASES, "ranks"),
        *_rates(line, "plain", "ranks"),
        *(_number(card.get("achieved_over_predicted")), _share(card.get("exposed_share"))),
        _number(card.get("memory_over_formula")),
    )


def _refused_row(lines: Sequence[Line]) -> tuple[str, ...]:
    first, last = lines[0], lines[-1]
    worlds = str(first["world"]) if first is last else f"{first['world']} to {last['world']:,}"
    told = [(line["world"], _modelled(line)) for line in lines if _modelled(line) is not None]
    ends = dict([told[0], told[-1]]) if told else {}
    figures = ", ".join(f"{_share(value)} at {world:,}" for world, value in ends.items()) or "-"
    return (
        *(first["mode"], _name(first), first["backend"], worlds, "oversubscribed", "-", "-"),
        *(figures, *_seconds(first, *BASES), "-", *_rates(first, "plain"), "-", "-", "-", "-"),
    )


def _modelled(line: Line) -> float | None:
    told = line.get("modelled")
    return None if told is None else told.get("efficiency")


def _interval(found: Line) -> str:
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _efficiency(found: Line | None) -> str:
    if found is None:
        return "-"
    return f"{found['ratio']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(line: Line, *sides: str) -> list[str]:
    told = line["median_seconds"]
    return [f"{1e3 * told[side]:.1f}" if side in told else "-" for side in sides]


def _rates(line: Line, *sides: str) -> list[str]:
    told = line["tokens_per_second"]
    return [f"{told[side]:,.0f}" if side in told else "-" for side in sides]


def remarks(lines: Sequence[Line]) -> list[str]:
    """Below the tables on a terminal: :func:`remarks_by_system`, indented."""
    told = []
    for heading, items in remarks_by_system(lines):
        told += [heading, *(f"    {item}" for item in items)]
    return told


def remarks_by_system(lines: Sequence[Line]) -> list[tuple[str, list[str]]]:
    """How each system was measured, and what to make of single rows."""
    told = []
    for members in _groups(lines):
        first = members[0]
        cell = first["cell"]
        base, size = cell["base"], f" {cell['size']}" if cell["size"] else ""
        batch = "in a step" if first["mode"] == "strong" else "a rank"
        target = f"target {first['target']:.0%}"
        heading = (
            f"{cell['name']}::{_name(first)}::{first['backend']}: {base['name']}{size}, "
            f"{base['global_batch']} samples {batch}, {base['micro_batches']} micro-batch(es), "
            f"{cell['optimizer']['name']} foreach=False, {cell['dtype']}; {target}"
        )
        items = [f"{line['world']} ranks: {text}" for line in members for text in _remarks(line)]
        missing = [line for line in members if (line["modelled"] or {}).get("problem")]
        if missing:
            why = missing[0]["modelled"]["problem"]
            items.append(f"not modelled from {missing[0]['world']:,} ranks on: {why}")
        told.append((heading, items))
    return told


def _remarks(line: Line) -> list[str]:
    told = []
    if line["reason"] and line["verdict"] != "oversubscribed":
        told.append(f"{line['verdict']}: {line['reason']}")
    if line["efficiency"] is not None:
        alone = line["wrapping"]
        told.append(
            f"{line['blocks']} blocks over {line['launches']} launches in {line['seconds']:.0f} s; "
            f"the wrapped system alone takes {_interval(alone)} of the plain program's time"
        )
    differ = line["launches_differ_p"]
    if differ is not None and differ < 0.01:
        told.append(f"caution: launches differ (p {differ:.1g}), the interval is too narrow")
    return told
