"""``report.html``: one self-contained page that opens offline, without any script if need be.

Style, script and drawings are inline; a policy in the page forbids any request, and any script but
the one that sorts tables and filters cases.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shardproof import verdicts
from shardproof.report import bubbles, capability_matrix, kills, memory, summary, tables
from shardproof.report.drawings import bars, curves, forest, heat, timelines
from shardproof.report.environment import environment
from shardproof.report.limits import limits
from shardproof.report.matrix import matrix
from shardproof.report.summary import Break, cases_by_gravity
from shardproof.report.tables import Result, error_text, world_of
from shardproof.runs.run_folder import Run

TEMPLATES = Path(__file__).parent / "templates"
#: Cases that broke and are told at once; the others stand below, folded by implementation.
TOLD = 12
#: With at most so many cases every group of them is open.
FEW = 40
#: Longest reason in a table of cases; what broke tells reasons in full.
_REASON = 300


@dataclass(frozen=True)
class CaseRow:
    """One line of a table of cases; ``about`` are numbers of columns of the matrix."""

    verdict: str
    id: str
    world: int
    seconds: float
    error: str
    sent: str
    reason: str
    broken: str
    about: str


@dataclass(frozen=True)
class Group:
    """Cases of one implementation on one backend."""

    anchor: str
    implementation: str
    backend: str
    counts: Counter[str]
    red: bool
    rows: tuple[CaseRow, ...]


@dataclass(frozen=True)
class Told:
    """Something that broke, with its map of errors."""

    anchor: str
    item: Break
    map: heat.Map | None


def html(run: Run) -> str:
    """The page of ``run``; reads records of failed cases and of pipelines for its drawings."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["look"] = look
    jinja.filters["parts"] = parts
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    found = matrix(run)
    told = _told(run)
    anchors = {item.item.name: item.anchor for item in told}
    grouped = _groups(run.cases, [name for name, _ in found.columns], anchors)
    drawn, more = timelines.timelines(run.path, run.cases)
    judged = kills.judged(run.kills)
    columns, marks = kills.kill_matrix(judged)
    headings, facts = environment(run)
    return jinja.get_template("report.html").render(
        run=run,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        headline=summary.headline(run),
        provenance=tables.provenance(run),
        started=_moment(run.header["invocations"][0].get("started")),
        tiles=_tiles(run),
        told=told[:TOLD],
        more_told=_by_implementation(told[TOLD:]),
        causes=[
            (name, cause, f"{times:,}")
            for name, cause, times in summary.by_cause([item.item for item in told])
        ],
        maps_missing=_maps_missing(told),
        matrix=found,
        group_of={(group.implementation, group.backend): group.anchor for group in grouped},
        broken_anchors=anchors,
        headings=tables.HEADINGS,
        rows=tables.rows(run.cases),
        red_kinds=verdicts.RED,
        traffic_headings=bars.TRAFFIC_HEADINGS,
        traffic=bars.traffic_bars(run.cases),
        operations=(*bars.OPERATIONS, "other"),
        memory_headings=bars.MEMORY_HEADINGS,
        memory=bars.memory_bars(run.cases),
        classes=bars.CLASSES,
        accounting=memory.ACCOUNTING,
        bubbles=bubbles.tables(run.cases),
        timeline_headings=timelines.HEADINGS,
        timelines=drawn,
        more_timelines=more,
        panels=curves.panels(run.scalings),
        scaling_headings=curves.HEADINGS,
        scaling=curves.rows(run.scalings),
        scaling_remarks=curves.remarks(run.scalings),
        comparison_headings=forest.HEADINGS,
        comparisons=forest.comparisons(run.benches),
        axis=forest.axis(run.benches),
        lost=forest.lost(run.benches),
        kill_columns=columns,
        kills=list(zip(judged, marks, strict=True)),
        kill_marks=kills.MARKS,
        kill_counts=kills.kill_counts(judged) if judged else "",
        limits=limits(run),
        groups=grouped,
        open_groups=len(run.cases) <= FEW,
        invocations=headings,
        facts=facts,
    )


def look(verdict: object) -> str:
    """The style of a verdict of a case, a check, a cell of the matrix or a timing."""
    head = summary.verdicts_head(verdict)
    if verdict in ("working precision only", verdicts.WORKING_PRECISION_ONLY):
        return "working"
    if verdict in ("not run", ""):
        return "none"
    if head in ("holds", "faster", "same", "killed"):
        return "pass"
    if head in ("slower", "below", "small difference", "open"):
        return "open"
    if head == "oversubscribed":
        return "skip"
    if head == "survives":
        return "fail"
    kind = verdicts.kind(str(verdict))
    if kind in verdicts.RED:
        return "fail"
    return "open" if kind in verdicts.OPEN else kind


def parts(name: str) -> Markup:
    """An id that a line may be broken in between its parts, and not inside of a word."""
    return Markup("::<wbr>").join(name.split("::"))


def _told(run: Run) -> list[Told]:
    """Everything that broke; the first failed cases with a map of their errors."""
    found, drawn = [], 0
    for number, item in enumerate(summary.breaks(run), 1):
        picture = None
        if item.kind == "case" and drawn < heat.MOST:
            picture = heat.heat_map(run.path, item.line)
            drawn += picture is not None
        found.append(Told(f"b-{number}", item, picture))
    return found


def _maps_missing(told: Sequence[Told]) -> int:
    """Failed cases without a map because there are too many of them."""
    if sum(item.map is not None for item in told) < heat.MOST:
        return 0
    last = max(number for number, item in enumerate(told) if item.map is not None)
    return sum(item.item.kind == "case" for item in told[last + 1 :])


def _by_implementation(told: Sequence[Told]) -> list[tuple[str, list[Told]]]:
    found: dict[str, list[Told]] = {}
    for item in told:
        case = item.item.line.get("case")
        found.setdefault(case["implementation"] if case else f"{item.item.kind}s", []).append(item)
    return sorted(found.items())


def _groups(
    results: list[dict[str, Any]], columns: Sequence[str], anchors: dict[str, str]
) -> list[Group]:
    """Cases by implementation and backend, gravest first."""
    numbers = {name: str(number) for number, name in enumerate(columns)}
    members: dict[tuple[str, str], list[Result]] = {}
    for result in cases_by_gravity(results):
        key = result["case"]["implementation"], result["case"]["backend"]
        members.setdefault(key, []).append(result)
    found = []
    for number, (place, cases) in enumerate(sorted(members.items()), 1):
        counts = verdicts.count(cases)
        red = any(counts[verdict] for verdict in verdicts.RED)
        rows = tuple(_case_row(result, numbers, anchors) for result in cases)
        found.append(Group(f"g-{number}", *place, counts, red, rows))
    return found


def _case_row(result: Result, numbers: dict[str, str], anchors: dict[str, str]) -> CaseRow:
    case = result["case"]
    reason = result["reason"]
    error, bound = result.get("worst_error"), result.get("bound")
    sent, expected = result.get("bytes_sent"), result.get("bytes_expected")
    about = capability_matrix.capabilities(case)
    return CaseRow(
        result["verdict"] if len(result["verdict"]) < 60 else verdicts.kind(result["verdict"]),
        result["id"],
        world_of(case),
        float(result["seconds"]),
        error_text(*(None if v is None else float(v) for v in (error, bound))),
        "-" if not sent else ("= formula" if sent == expected else f"{sent} / {expected}"),
        reason if len(reason) <= _REASON else f"{reason[:_REASON]} ...",
        anchors.get(result["id"], ""),
        " ".join(numbers[name] for name in about if name in numbers),
    )


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(look, number, what) of the figures at the top."""
    counts = verdicts.count(run.cases)
    found = [(look(v), f"{counts[v]:,}", v) for v in verdicts.VERDICTS if counts[v]]
    if run.left_out:
        found.append(("none", f"{len(run.left_out):,}", "left out"))
    judged = kills.judged(run.kills)
    if judged:
        alive = len(kills.survivors(run.kills))
        state = "fail" if alive else "pass"
        found.append((state, f"{len(judged) - alive:,}/{len(judged):,}", "faults killed"))
    for what, lines in (("comparisons", run.benches), ("scaling", run.scalings)):
        if lines:
            heads = Counter(summary.verdicts_head(told["verdict"]) for told in lines)
            found += [(look(word), f"{n:,}", f"{what}: {word}") for word, n in heads.items()]
    return found


def _moment(told: object) -> str:
    return str(told or "").replace("T", " ").replace("+00:00", " UTC")
