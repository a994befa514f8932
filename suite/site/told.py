"""Defects and claims of a site: what broke, known failures, findings, and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardproof import verdicts
from shardproof.errors import Problem, SelectionError
from shardproof.files import read_input
from shardproof.report import summary
from shardproof.runs.blocks import FailureBlock
from shardproof.runs.run_folder import Run
from shardproof.scenarios.load import default_folder, files_of_wings, read_as
from shardproof.site.matrix import link
from shardproof.site.shown import RunName
from shardproof.table import Row, Table, TableCell, grouped

_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_EMPHASIS = re.compile(r"[*`]")


@dataclass(frozen=True)
class KnownFailure:
    """Cases of one system that fail as their scenario says; ``reason`` is empty in a baseline."""

    system: str
    scenario: str
    reason: str
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """Defects that a run shows."""

    name: RunName
    broken: Sequence[FailureBlock]
    known: Sequence[KnownFailure]


def found(name: RunName, run: Run) -> Found:
    """Failures of ``run``, a block for each cause, and those that are known."""
    expected = grouped(
        ((r.case.implementation, r.case.scenario, r.case.xfail or ""), r.id)
        for r in run.cases
        if verdicts.kind(r.verdict) == "xfail"
    )
    known = [KnownFailure(*key, tuple(ids)) for key, ids in sorted(expected.items())]
    return Found(name, summary.broken_blocks(run), known)


def known_failures(every: Sequence[Found]) -> Table:
    """A row for each system, scenario and reason; the reason of a baseline is that of a run which
    has the same failure.
    """
    groups = grouped(((k.system, k.scenario), (one, k)) for one in every for k in one.known)
    rows: list[Row] = []
    for (system, scenario), members in sorted(groups.items()):
        reasons = dict.fromkeys(known.reason for _, known in members if known.reason)
        ids = {name for _, known in members for name in known.ids}
        runs = dict.fromkeys(one.name.snapshot.hardware for one, _ in members)
        why = "; ".join(reasons) or f"see the scenario {scenario}"
        cases = TableCell(f"{len(ids):,}", link=f"{link(system)}&q={quote(scenario)}&verdict=xfail")
        rows.append((system, scenario, why, cases, "; ".join(runs)))
    headings = ("system", "scenario", "known failure", "cases", "seen on")
    return Table("Known failures", headings, rows, align="lllr")


def listed(page: Path) -> Table:
    """The first table of a page of Markdown, as texts: links and emphasis are left out.

    :raises SelectionError: it cannot be read, or has no table.
    """
    try:
        lines = read_input(page).decode("utf-8", "replace").splitlines()
    except OSError as error:
        why = f"--findings: cannot be read: {error.strerror}"
        raise SelectionError(Problem(why, "name a page of Markdown", str(page))) from None
    start = next((n for n, line in enumerate(lines) if re.match(r"\|[\s:|-]+\|\s*$", line)), 0)
    if not start:
        remedy = "name a page with a table, such as docs/findings.md"
        raise SelectionError(Problem("--findings: the page has no table", remedy, str(page)))
    heads = _cells(lines[start - 1])
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        rows.append([*cells, *[""] * len(heads)][: len(heads)])
    named = [name or "number" for name in heads]
    return Table("Findings", named, rows)


def _cells(line: str) -> list[str]:
    inner = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    texts = (_EMPHASIS.sub("", _LINK.sub(r"\1", cell)) for cell in inner)
    return [text.replace("\\|", "|").strip() for text in texts]


@dataclass(frozen=True)
class Sentence:
    """A claim: a sentence that was put to the test by the files of a wing."""

    number: str
    about: str
    verdict: str
    honest: str
    source: str
    figures: Table
    #: The cases of runs that measure it: its address.
    cases: str


def claims() -> list[Sentence]:
    """The sentences that this installation has files of, by their numbers.

    :raises ScenarioError: a faulty file.
    """
    return sorted(_claims(), key=lambda one: (not one.number.isdecimal(), one.number.zfill(6)))


def _claims() -> Iterator[Sentence]:
    for path, kind in files_of_wings(default_folder()).items():
        # A sentence that says what is right, whatever the wing calls such files.
        if not hasattr(model := kind.model(), "stated"):
            continue
        file: Any = read_as(path, model, kind.name)[0]
        rows = [(one.what, one.claimed or "-", one.honest) for one in file.figures]
        figures = Table(f"Figures of claim {file.claim}", ("figure", "claimed", "right"), rows)
        told = file.claim, file.about, file.stated, file.honest, file.source
        yield Sentence(*told, figures, f"cases.html#q=claim-{file.claim}")
