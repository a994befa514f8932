"""The cases of a site as JavaScript that a page loads when it needs it.

A page that was opened as a file may load a script, but may not fetch, so data are calls:

    data/index.js                     SITE.take("index", {...}): ids, verdicts, capabilities
    data/<run>/<group>-<part>.js      SITE.take("<run>/<group>-<part>", [...]): evidence of cases

A *group* is the cases of one implementation on one backend.  A part has :data:`PART` cases of one
run, in the order of their ids, so the place of a case among the ids tells its part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.files import fast_json
from shardproof.report.capability_matrix import CAPABILITIES, capabilities
from shardproof.report.looks import look
from shardproof.report.tables import bytes_of, bytes_text, error_of, terms
from shardproof.runs.run_folder import Run
from shardproof.site.matrix import Place
from shardproof.site.shown import RunName
from shardproof.table import grouped

#: Cases of a file: about 250 kB.
PART = 40
#: Characters of a nested figure that are shown; the run folder has all of it.
_LONGEST = 4000
#: One for each verdict, and for each capability.
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
#: Stands for a case that a run left out, and for one that it does not have.
_LEFT_OUT, _ABSENT = ".", "-"


def call(name: str, value: object) -> bytes:
    """The JavaScript that hands ``value`` to the page under ``name``."""
    # JSON is JavaScript as it is, and in a file of its own nothing of it is read as HTML.
    return b"SITE.take(" + json.dumps(name).encode() + b"," + fast_json(value) + b");\n"


def group_name(place: Place) -> str:
    """The name of a group in addresses, which says little and has no odd character."""
    return hashlib.sha256("\n".join(place).encode()).hexdigest()[:10]


@dataclass
class Index:
    """Ids, verdicts and capabilities of every case; one run after the other is added."""

    runs: list[RunName] = field(default_factory=list)
    #: Place -> id -> the digits of its capabilities.
    _ids: dict[Place, dict[str, str]] = field(default_factory=dict)
    #: One for each run: id -> the digit of its verdict.
    _verdicts: list[dict[str, str]] = field(default_factory=list)

    def add(self, name: RunName, run: Run) -> Iterator[tuple[str, bytes]]:
        """Take in the cases of ``run``; names and contents of files with their evidence."""
        self.runs.append(name)
        letters = {verdict: DIGITS[at] for at, verdict in enumerate(verdicts.VERDICTS)}
        found: dict[str, str] = {}
        names = [*CAPABILITIES]
        groups = grouped(((r.case.implementation, r.case.backend), r) for r in run.cases)
        for place, members in groups.items():
            known = self._ids.setdefault(place, {})
            ordered = sorted(members, key=lambda result: result.id)
            for result in ordered:
                found[result.id] = letters[verdicts.kind(result.verdict)]
                if result.id not in known:
                    asked = capabilities(result.case)
                    known[result.id] = "".join(DIGITS[names.index(one)] for one in asked)
            for part, start in enumerate(range(0, len(ordered), PART)):
                file = f"{name.slug}/{group_name(place)}-{part}"
                rows = [evidence(result) for result in ordered[start : start + PART]]
                yield f"data/{file}.js", call(file, rows)
        for line in run.left_out:
            if line.case is not None and line.id not in found:
                place = line.case.implementation, line.case.backend
                self._ids.setdefault(place, {}).setdefault(line.id, "")
                found[line.id] = _LEFT_OUT
        self._verdicts.append(found)

    def sort(self) -> None:
        """Put the runs in the order of their dates; those of one day stay as they were added."""
        both = zip(self.runs, self._verdicts, strict=True)
        ordered = sorted(both, key=lambda one: one[0].snapshot.taken)
        self.runs = [name for name, _ in ordered]
        self._verdicts = [found for _, found in ordered]

    @property
    def count(self) -> int:
        """How many ids the runs have."""
        return sum(map(len, self._ids.values()))

    def file(self) -> tuple[str, bytes]:
        """The name and content of the index."""
        runs = [
            {"slug": r.slug, "name": r.snapshot.name, "label": r.label, "taken": r.snapshot.taken}
            for r in self.runs
        ]
        groups = []
        for place, ids in sorted(self._ids.items()):
            ordered = sorted(ids)
            told = (
                "".join(known.get(name, _ABSENT) for name in ordered) for known in self._verdicts
            )
            middle = f"::{place[0]}"
            heads = [name.replace(middle, "\t", 1) for name in ordered]
            about = [ids[name] for name in ordered]
            groups.append([*place, group_name(place), heads, about, [*told]])
        whole = {
            "runs": runs,
            "part": PART,
            "verdicts": [[verdict, look(verdict)] for verdict in verdicts.VERDICTS],
            "capabilities": [*CAPABILITIES.items()],
            "groups": groups,
        }
        return "data/index.js", call("index", whole)


def evidence(result: CaseResult) -> Mapping[str, Any]:
    """The content of a case's page for one run."""
    case = result.case
    sent = "-"
    if result.bytes_sent and result.bytes_expected:
        sent = bytes_text(*bytes_of([result]))
    return {
        "id": result.id,
        "verdict": result.verdict,
        "reason": result.reason,
        "seconds": round(result.seconds, 2),
        "error": error_of(result) + terms(result),
        "bytes": sent,
        "rerun": result.rerun,
        "source": case.source,
        "facts": _facts(result),
        "checks": [
            [one.check, one.status, one.message, _figures(one.figures)] for one in result.checks
        ],
    }


def _facts(result: CaseResult) -> list[tuple[str, str]]:
    case, workload = result.case, result.case.workload
    told = {
        "options": _short(case.options),
        "mesh": ", ".join(f"{axis} {ranks}" for axis, ranks in case.mesh.items()),
        "workload": workload.name + (f" {_short(workload.params)}" if workload.params else ""),
        "traits": ", ".join(workload.traits),
        "batch": f"{workload.global_batch} samples, {workload.micro_batches} micro-batches",
        "optimizer": case.optimizer.name,
        "clipping": str(case.optimizer.clip_norm or ""),
        "precision": _short(case.precision),
        "lane": case.lane,
        "steps": str(case.steps or ""),
        "known failure": case.xfail,
        "skipped because": case.skip,
        "conditions met": ", ".join(result.seen or ()),
    }
    return [(name, value) for name, value in told.items() if value and value != "{}"]


def _short(value: object) -> str:
    return json.dumps(value, default=str)


def _figures(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _shown(value)) for name, value in figures.items()]


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        text = fast_json(value).decode()
        left = len(text) - _LONGEST
        more = f" ... {left:,} characters more: see the run folder"
        return text[:_LONGEST] + more if left > 0 else text
    return "-" if value is None else str(value)
