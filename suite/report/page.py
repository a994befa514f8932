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

from markupsafe import Markup

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.report import bubbles, capability_matrix, kills, memory, nodes, summary, tables
from shardproof.report.coverage import coverage_map, seen_table
from shardproof.report.drawings import bars, heat, timelines
from shardproof.report.environment import environment
from shardproof.report.limits import limits
from shardproof.report.looks import head, look
from shardproof.report.sections import sections
from shardproof.report.summary import cases_by_gravity
from shardproof.report.tables import error_of
from shardproof.runs.blocks import Failure, FailureBlock
from shardproof.runs.run_folder import Run

TEMPLATES = Path(__file__).parent / "templates"
#: Causes that are shown at once; the others stand below, folded by implementation.
SHOWN = 12
#: With at most so many cases every group of them is open.
FEW = 40


@dataclass(frozen=True)
class CaseGroup:
    anchor: str
    implementation: str
    backend: str
    counts: Counter[str]
    red: bool
    rows: list[CaseResult]


@dataclass(frozen=True)
class BrokenItem:
    anchor: str
    item: Failure
    #: Ids of the other cases of its cause.
    others: tuple[str, ...]
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
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    capabilities = capability_matrix.matrix(run)
    numbers = {name: str(number) for number, (name, _) in enumerate(capabilities.columns)}

    def about(case: Case) -> str:
        """Numbers of the columns that a case says something about, which the script filters by."""
        names = capability_matrix.capabilities(case)
        return " ".join(numbers[name] for name in names if name in numbers)

    jinja.filters |= {"look": look, "parts": parts, "kind": verdicts.kind, "error": error_of}
    jinja.filters |= {"sent": _sent, "about": about}
    causes = summary.broken_blocks(run)
    broken = _broken(run, causes)
    anchors = {name: one.anchor for one in broken for name in (one.item.id, *one.others)}
    grouped = _groups(run.cases)
    drawn, more = timelines.timelines(run.path, run.cases)
    judged = kills.judged(run.kills)
    return jinja.get_template("report.html").render(
        run=run,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        headline=summary.headline(run),
        provenance=run.provenance,
        started=run.header.invocations[0].started.replace("T", " ").replace("+00:00", " UTC"),
        tiles=_tiles(run),
        broken=broken[:SHOWN],
        more_broken=_by_implementation(broken[SHOWN:]),
        causes=summary.by_cause(causes),
        maps_missing=_maps_missing(broken),
        matrix=capabilities,
        group_of={(group.implementation, group.backend): group.anchor for group in grouped},
        broken_anchors=anchors,
        results=tables.table(run.cases),
        red_kinds=verdicts.RED,
        traffic=bars.traffic_table(run.cases),
        nodes=nodes.tables(run),
        operations=(*bars.OPERATIONS, "other"),
        memory=bars.memory_table(run.cases),
        classes=bars.CLASSES,
        accounting=memory.ACCOUNTING,
        allocator=memory.allocator(run.cases),
        bubbles=bubbles.tables(run.cases),
        timelines=drawn,
        more_timelines=more,
        sections=sections(run),
        coverage=coverage_map(run.cases),
        seen=seen_table(run.cases),
        kills=kills.table(judged),
        kills_by_n=kills.by_n(run),
        kill_counts=kills.kill_counts(judged) if judged else "",
        limits=limits(run),
        groups=grouped,
        slowest=tables.slowest(run.cases),
        open_groups=len(run.cases) <= FEW,
        environment=environment(run),
    )


def parts(name: str) -> Markup:
    """An id that a line may be broken in between its parts, and not inside of a word."""
    return Markup("::<wbr>").join(name.split("::"))


def _broken(run: Run, causes: Sequence[FailureBlock]) -> list[BrokenItem]:
    broken, drawn = [], 0
    for number, block in enumerate(causes, 1):
        item, picture = block.first, None
        if item.result is not None and drawn < heat.MOST:
            picture = heat.heat_map(run.path, item.result)
            drawn += picture is not None
        others = tuple(failure.id for failure in block.failures[1:])
        broken.append(BrokenItem(f"b-{number}", item, others, picture))
    return broken


def _maps_missing(broken: Sequence[BrokenItem]) -> int:
    """Causes without a map because there are too many of them."""
    if sum(item.map is not None for item in broken) < heat.MOST:
        return 0
    last = max(number for number, item in enumerate(broken) if item.map is not None)
    return sum(item.item.kind == "case" for item in broken[last + 1 :])


def _by_implementation(broken: Sequence[BrokenItem]) -> list[tuple[str, list[BrokenItem]]]:
    groups: dict[str, list[BrokenItem]] = {}
    for item in broken:
        name = item.item.implementation or item.item.kind
        groups.setdefault(name, []).append(item)
    return sorted(groups.items())


def _groups(results: Sequence[CaseResult]) -> list[CaseGroup]:
    members: dict[tuple[str, str], list[CaseResult]] = {}
    for result in cases_by_gravity(results):
        key = result.case.implementation, result.case.backend
        members.setdefault(key, []).append(result)
    groups = []
    for number, (place, cases) in enumerate(sorted(members.items()), 1):
        counts = verdicts.count(cases)
        red = any(counts[verdict] for verdict in verdicts.RED)
        groups.append(CaseGroup(f"g-{number}", *place, counts, red, cases))
    return groups


def _sent(result: CaseResult) -> str:
    sent, expected = result.bytes_sent, result.bytes_expected
    if not sent:
        return "-"
    return "= formula" if sent == expected else f"{sent} / {expected}" if expected else sent


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(look, number, what) of the figures at the top."""
    counts = verdicts.count(run.cases)
    tiles = [(look(v), f"{counts[v]:,}", v) for v in verdicts.VERDICTS if counts[v]]
    if run.left_out:
        tiles.append(("none", f"{len(run.left_out):,}", "left out"))
    judged = kills.judged(run.kills)
    if judged:
        alive = len(kills.survivors(run.kills))
        state = "fail" if alive else "pass"
        tiles.append((state, f"{len(judged) - alive:,}/{len(judged):,}", "faults killed"))
    for kind, lines in run.known(judged_only=False).items():
        heads = Counter(head(line["verdict"]) for line in lines)
        tiles += [(look(word), f"{n:,}", f"{kind.label}: {word}") for word, n in heads.items()]
    return tiles
