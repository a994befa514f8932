"""Timelines of pipelines: when every rank computed what, from the clocks in the records.

A lane for each rank with its computations of the last step (F forward, B gradient of the input,
W gradient of the weights, BW both), the number of the micro-batch inside.  The strip below a lane
tells its calls to process groups, a tick at the issue and a bar to the wait: calls have no clock of
their own but stand in the program's order, so they lie between the computations around them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shardproof import verdicts
from shardproof.axes import parts
from shardproof.backends import BACKENDS
from shardproof.checks.results import CaseResult
from shardproof.report.drawings import svg
from shardproof.runs import records
from shardproof.table import Table, grouped

#: At most so many timelines, lanes in one, and blocks in one.
MOST, LANES, BLOCKS = 12, 16, 2000
HEADINGS = ("rank", "computations", "busy ms", "from first to last ms", "idle between")
_LEFT, _WIDTH, _RIGHT = 58.0, 960.0, 12.0
_TOP, _LANE, _BLOCK, _STRIP = 6.0, 32.0, 18.0, 6.0
_WORDS = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}


@dataclass(frozen=True)
class TimelineFigure:
    """One drawing; ``problem`` stands in its place where the record cannot be read."""

    heading: str
    case_id: str
    image: Markup | None
    rows: tuple[tuple[str, ...], ...]
    note: str
    problem: str = ""

    @property
    def table(self) -> Table:
        title = f"Work and idle time by rank: {self.heading}"
        return Table(title, HEADINGS, self.rows, align="rlrrr")


def timelines(folder: Path, results: Iterable[CaseResult]) -> tuple[list[TimelineFigure], int]:
    """The timelines of a run, and how many pipelines more there are that are not drawn."""
    chosen = _chosen(results)
    return [_timeline(folder, result) for result in chosen[:MOST]], max(0, len(chosen) - MOST)


def _chosen(results: Iterable[CaseResult]) -> list[CaseResult]:
    """One case of each pipeline: broken ones first, each implementation before the second of one.

    Ranks that are processes come before threads, which take turns.
    """
    best: dict[tuple[bool, int, tuple[str, int, int]], CaseResult] = {}
    drawn: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    piped = (r for r in results if parts(r.case.mesh, "layers") > 1 and r.record and r.checks)
    for result in sorted(piped, key=_telling):
        case = result.case
        key = (case.system, parts(case.mesh, "layers"), case.workload.micro_batches)
        if key not in (seen := drawn[case.system]):
            best[_telling(result)[0], len(seen), key] = result
            seen.add(key)
    return [best[place] for place in sorted(best)]


def _telling(result: CaseResult) -> tuple[bool, bool, int, int]:
    """Broken ones first, then processes, then those with more micro-batches and ranks to show."""
    case, broke = result.case, verdicts.kind(result.verdict) in verdicts.RED
    more = min(case.workload.micro_batches, 16), min(parts(case.mesh, "layers"), 4)
    return not broke, BACKENDS.of_record(case.backend).threads, -more[0], -more[1]


Action = Mapping[str, Any]


def _timeline(folder: Path, result: CaseResult) -> TimelineFigure:
    case = result.case
    shape = " x ".join(f"{axis} {n}" for axis, n in case.mesh.items())
    size = case.workload.micro_batches
    heading = f"{case.system} on {case.backend}, {shape}, {size} micro-batches"
    undrawn = TimelineFigure(heading, result.id, None, (), "")
    try:
        sections = records.sections(folder / (result.record or ""), "action", "call")
    except records.RecordError as error:
        return replace(undrawn, problem=str(error))
    last = max((row["step"] for row in sections["action"]), default=None)
    if last is None:
        problem = "its record holds no computation of a stage: the ranks did not get that far"
        return replace(undrawn, problem=problem)
    clocked = all(row.get("began") is not None for row in sections["action"])
    begin, end = ("began", "ended") if clocked else ("begin", "end")
    actions = [{**row, "from": row[begin], "to": row[end]} for row in sections["action"]]
    lanes = grouped((row["rank"], row) for row in actions if row["step"] == last)
    for lane in lanes.values():
        lane.sort(key=lambda row: row["begin"])
    notes = [] if clocked else ["No clocks in this record: distances are numbers of events."]
    if BACKENDS.of_record(case.backend).threads:
        notes.append("Ranks are threads here, which take turns in Python.")
    if len(lanes) > LANES:
        notes.append(f"The first {LANES} of {case.world} ranks.")
    shown = dict(sorted(lanes.items())[:LANES])
    if sum(map(len, shown.values())) > BLOCKS:
        problem = f"more than {BLOCKS} computations in a step: its record holds them"
        return replace(undrawn, problem=problem)
    image = _draw(heading, shown, actions, sections["call"], clocked)
    rows = tuple(_row(rank, lane) for rank, lane in shown.items()) if clocked else ()
    return replace(undrawn, image=image, rows=rows, note=" ".join(notes))


def _row(rank: int, lane: Sequence[Action]) -> tuple[str, ...]:
    busy = sum(row["to"] - row["from"] for row in lane)
    span = lane[-1]["to"] - lane[0]["from"]
    ops = Counter(row["op"] for row in lane)
    counts = ", ".join(f"{ops[op]} {op}" for op in _WORDS if ops[op])
    idle = f"{max(0.0, 1 - busy / span):.1%}" if span > 0 else "-"
    return str(rank), counts, f"{1e3 * busy:.2f}", f"{1e3 * span:.2f}", idle


def _draw(
    heading: str,
    lanes: Mapping[int, Sequence[Action]],
    actions: Iterable[Action],
    calls: Sequence[Mapping[str, Any]],
    clocked: bool,
) -> Markup:
    first = min(lane[0]["from"] for lane in lanes.values())
    final = max(row["to"] for lane in lanes.values() for row in lane)
    x = svg.PixelScale(first, max(final, first + 1e-9), _LEFT, _WIDTH - _RIGHT)
    stages = max(row["stage"] for lane in lanes.values() for row in lane) + 1
    every = grouped((row["rank"], row) for row in actions)
    bottom = _TOP + _LANE * len(lanes)
    parts = _ticks(x, final - first, bottom) if clocked else []
    for number, (rank, lane) in enumerate(lanes.items()):
        top = _TOP + _LANE * number
        parts.append(svg.text(_LEFT - 8, top + 13, f"rank {rank}", "lane-label", "end"))
        parts.append(svg.line(_LEFT, top + 28, _WIDTH - _RIGHT, top + 28, "grid"))
        for row in lane:
            # Where stages outnumber ranks, every other chunk of a rank is framed.
            chunk = " odd" if stages > len(lanes) and row["stage"] // len(lanes) % 2 else ""
            parts += _block(row, x, top, chunk, clocked)
        parts += _strip(lane, every[rank], [c for c in calls if c["rank"] == rank], x, top)
    took = f" in {1e3 * (final - first):.1f} ms" if clocked else ""
    text = f"{sum(map(len, lanes.values()))} computations of {len(lanes)} ranks{took}."
    for rank, lane in lanes.items():
        order = " ".join(f"{row['op']}{row['micro']}" for row in lane[:12])
        text += f" Rank {rank}: {order}{' ...' if len(lane) > 12 else ''}."
    size = _WIDTH, bottom + (22 if clocked else 4)
    return svg.drawing(f"Timeline of {heading}", text, size, parts, "timeline")


def _block(row: Action, x: svg.PixelScale, top: float, chunk: str, clocked: bool) -> list[Markup]:
    start, stop = x(row["from"]), x(row["to"])
    width = max(stop - start - 0.6, 0.8)
    took = f", {1e3 * (row['to'] - row['from']):.2f} ms" if clocked else ""
    word = _WORDS.get(row["op"], row["op"])
    hint = f"{word} of micro-batch {row['micro']}, stage {row['stage']}{took}"
    parts = [svg.rect(start, top, width, _BLOCK, f"a-{row['op']}{chunk}", hint)]
    if width >= 7 * len(str(row["micro"])) + 4:
        look = f"in-{row['op']}"
        parts.append(svg.text(start + width / 2, top + 13, row["micro"], look, "middle"))
    return parts


def _strip(
    lane: Sequence[Action],
    every: list[Action],
    calls: Iterable[Mapping[str, Any]],
    x: svg.PixelScale,
    top: float,
) -> list[Markup]:
    """``calls`` of a rank while it went through ``lane``, from issue to wait."""
    import numpy  # not above: most reports draw no pipeline

    ends = (((row["begin"], row["from"]), (row["end"], row["to"])) for row in every)
    numbers, clocks = zip(*sorted(itertools.chain(*ends)), strict=True)
    parts = []
    low, high = lane[0]["begin"], lane[-1]["end"]
    beyond = min((row["begin"] for row in every if row["begin"] > high), default=math.inf)
    for call in calls:
        number, is_shown = call["issued"], call["phase"] in ("forward", "backward")
        if not low <= number < beyond or not call["floating"] or not is_shown:
            continue
        waited = number if call["waited"] is None else call["waited"]
        # The clock at an event, evenly between the events whose clock is known.
        start, stop = (x(at) for at in numpy.interp((number, waited), numbers, clocks))
        hint = f"{call['operation']} along {call['axis']}, {call['payload_bytes']:,} bytes"
        parts.append(svg.rect(start, top + _BLOCK + 2, stop - start, _STRIP, "a-wait"))
        parts.append(svg.rect(start, top + _BLOCK + 2, 2.0, _STRIP, "a-call", hint))
    return parts[: 2 * BLOCKS]


def _ticks(x: svg.PixelScale, seconds: float, bottom: float) -> list[Markup]:
    """Round milliseconds since the first computation."""
    rounded = (digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5))
    step = next((size for size in rounded if seconds * 1e3 / size <= 8), seconds * 1e3)
    parts, value = [], 0.0
    while step > 0 and value <= seconds * 1e3 + 1e-9:
        at = x(x.low + value / 1e3)
        parts.append(svg.line(at, _TOP, at, bottom, "grid"))
        last = value + step > seconds * 1e3
        label = f"{value:g} ms" if last else f"{value:g}"
        anchor = "end" if last and at > _WIDTH - 60 else "middle"
        parts.append(svg.text(at, bottom + 14, label, "tick-label", anchor))
        value = round(value + step, 9)
    return parts
