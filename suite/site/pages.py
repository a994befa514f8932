"""The pages of a site, written one after the other; a run is read, shown and let go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardproof import verdicts
from shardproof.checks.results import Kill
from shardproof.compare import hardware, tables
from shardproof.compare.compare import RunComparison, compare
from shardproof.compare.snapshot import Snapshot
from shardproof.report import capability_matrix, kills, looks, summary
from shardproof.report import tables as of_cases
from shardproof.report.capability_matrix import CAPABILITIES, CapabilityCell
from shardproof.report.section import TEMPLATES as OF_REPORTS
from shardproof.report.section import rendered
from shardproof.report.sections import sections
from shardproof.runs.run_folder import Run
from shardproof.site import curves, matrix, series, told
from shardproof.site.data import Index
from shardproof.site.folder import SiteFolder, building
from shardproof.site.shown import RunName, ShownRun, expanded, opened, slugs
from shardproof.table import Mark, Row, Table, TableCell

_TEMPLATES = Path(__file__).parent / "templates"
#: Pages that every page leads to: file, and what it is called there.
MENU = (
    ("index.html", "Matrix"),
    ("machines.html", "Machines"),
    ("cases.html", "Cases"),
    ("history.html", "History"),
    ("compare.html", "Compare"),
    ("scaling.html", "Scaling"),
    ("faults.html", "Faults"),
    ("findings.html", "Findings"),
    ("claims.html", "Claims"),
)
#: With more runs, a run is compared with its neighbours and with the newest only.
ALL_PAIRS = 12
#: Changes that the page of two runs, or of a series, shows.
MOST_ROWS = 1000
#: Sections of reports that a site has in another form.
_ELSEWHERE = {"capabilities", "cases"}


@dataclass
class Published:
    """The part of a run that later pages need, once its own page is written."""

    name: RunName
    is_kept: bool
    headline: summary.Headline
    cells: Sequence[CapabilityCell]
    kills: Sequence[Kill]
    found: told.Found
    verdicts: str
    #: Sections of wings on the run's page: anchor and title.
    sections: Sequence[tuple[str, str]] = ()

    @property
    def snapshot(self) -> Snapshot:
        """The part that is compared."""
        return self.name.snapshot


@dataclass
class Site:
    """A site under construction in ``folder``."""

    folder: SiteFolder
    title: str
    index: Index = field(default_factory=Index)
    runs: list[Published] = field(default_factory=list)

    def page(self, name: str, template: str, heading: str, **values: Any) -> None:
        """Write the page ``name`` by a template; its links begin at the top of the site."""
        shown = rendered(
            _TEMPLATES / template,
            root="../" * name.count("/"),
            page=name,
            site=self.title,
            heading=heading,
            menu=MENU,
            link=matrix.link,
            text=matrix.text,
            **values,
        )
        self.folder.write(name, str(shown) + "\n")

    def add(self, name: str) -> None:
        """Write the page and the data of the run ``name``.

        :raises SelectionError: it cannot be read, or was edited.
        """
        with opened(name) as shown:
            taken = [one.name.slug for one in self.runs]
            slug = slugs([*taken, shown.snapshot.name])[-1]
            run_name = RunName(slug, shown.snapshot)
            for file, content in self.index.add(run_name, shown.run):
                self.folder.write(file, content)
            self.runs.append(self._published(run_name, shown))

    def _published(self, name: RunName, shown: ShownRun) -> Published:
        run = shown.run
        cells = capability_matrix.cells(run.cases, run.left_out)
        parts = [] if shown.is_kept else [(s, s.html()) for s in sections(run)]
        parts = [(s, body) for s, body in parts if body and s.anchor not in _ELSEWHERE]
        headline = summary.headline(run)
        self.page(
            f"runs/{name.slug}.html",
            "run.html",
            f"Run {name.snapshot.name}",
            about_run=name,
            run=run,
            is_kept=shown.is_kept,
            headline=headline,
            counts=_counts(run),
            matrix=matrix.by_capability([cells]),
            about=CAPABILITIES,
            kept=_kept(run) if shown.is_kept else None,
            sections=parts,
        )
        return Published(
            name,
            shown.is_kept,
            headline,
            [*cells, *matrix.every_case(run)],
            run.kills,
            told.found(name, run),
            tables.verdicts_of(name.snapshot.cases.values()),
            [(s.anchor, s.title) for s, _ in parts if s.anchor in ("times", "scaling")],
        )

    def finish(self, findings: Path | None) -> None:
        """Write the pages that need all runs."""
        self.runs.sort(key=lambda one: one.snapshot.taken)  # stable: as given within a day
        self.index.sort()
        self.folder.write(*self.index.file())
        snapshots = [one.snapshot for one in self.runs]
        self._matrices()
        self._comparisons()
        self._history(snapshots)
        self._scaling(snapshots)
        every = [one.found for one in self.runs]
        listed = None if findings is None else told.listed(findings)
        known = told.known_failures(every)
        self.page(
            "findings.html", "findings.html", "Findings", found=every, known=known, listed=listed
        )
        self.page("faults.html", "faults.html", "Planted faults", **_faults(self.runs))
        self.page("claims.html", "claims.html", "Claims", claims=told.claims())
        self.page("cases.html", "cases.html", "Cases", runs=self.runs, verdicts=verdicts.VERDICTS)
        self.page("case.html", "case.html", "Case")
        self._assets()

    def _matrices(self) -> None:
        cells = [one.cells for one in self.runs]
        made = matrix.by_capability(cells)
        values = {"runs": self.runs, "about": CAPABILITIES}
        self.page(
            "index.html", "index.html", self.title, matrix=made, count=self.index.count, **values
        )
        for capability in (matrix.EVERY, *made.columns):
            by_run = matrix.by_run(cells, capability)
            of = {"matrix": by_run, "capability": capability, "columns": made.columns, **values}
            if capability == matrix.EVERY:
                report = _by_hardware(self.runs)
                self.page("machines.html", "machines.html", "Machines", report=report, **of)
            else:
                name = f"by/{capability}.html"
                self.page(name, "machines.html", f"{capability} by machine", report=None, **of)

    def _comparisons(self) -> None:
        made = []
        for before, after in pairs(self.runs):
            found = compare(before.snapshot, after.snapshot)
            report = tables.report([found])
            ids = {*before.snapshot.cases, *after.snapshot.cases}
            shown = [
                _linked(t.first(MOST_ROWS, "`shardproof compare` has all"), ids, "../")
                for t in report.tables
            ]
            file = f"compare/{before.name.slug}..{after.name.slug}.html"
            ends = {"before": before.name, "after": after.name}
            self.page(
                file, "pair.html", report.heading, summary=report.summary, tables=shown, **ends
            )
            made.append((file, before, after, tables.sentence(found)))
        self.page("compare.html", "compare.html", "Compare two runs", pairs=made, runs=self.runs)

    def _history(self, snapshots: Sequence[Snapshot]) -> None:
        moves = series.moves(snapshots)
        panels, more = curves.limited(curves.over_runs(snapshots, moves))
        ids = {name for one in snapshots for name in one.cases}
        table = series.table(moves, snapshots).first(MOST_ROWS, "`shardproof history show` has all")
        table = _linked(table, ids, "")
        shown = {"panels": panels, "more": more, "table": table, "runs": self.runs}
        self.page("history.html", "history.html", "History", moves=len(moves), **shown)

    def _scaling(self, snapshots: Sequence[Snapshot]) -> None:
        panels, more = curves.limited(curves.over_ranks(snapshots))
        ratios = [t for t in _by_hardware(self.runs)[1] if t.title not in ("Machines", _STRATEGIES)]
        self.page(
            "scaling.html",
            "scaling.html",
            "Times and scaling",
            panels=panels,
            more=more,
            tables=ratios,
            runs=[one for one in self.runs if one.sections],
        )

    def _assets(self) -> None:
        for name in ("report.css", "report.js"):
            self.folder.write(name, (OF_REPORTS / name).read_bytes())
        for name in ("site.css", "site.js"):
            self.folder.write(name, (_TEMPLATES / name).read_bytes())


_STRATEGIES = "Verdicts by strategy"


def build(names: Sequence[str], output: Path, title: str, findings: Path | None) -> Site:
    """Write the runs ``names`` as a site into ``output``, which holds nothing or an earlier site.

    :raises SelectionError: a run, or ``output``, that cannot be used; nothing is written then.
    """
    with building(output) as folder:
        site = Site(folder, title)
        for name in expanded(names):
            site.add(name)
        site.finish(findings)
    return site


def pairs(runs: Sequence[Published]) -> Iterator[tuple[Published, Published]]:
    """The runs that are compared, the earlier one first."""
    last = len(runs) - 1
    for at, before in enumerate(runs):
        for other, after in enumerate(runs[at + 1 :], at + 1):
            if len(runs) <= ALL_PAIRS or other in (at + 1, last):
                yield before, after


def _counts(run: Run) -> list[tuple[str, str, str]]:
    """(look, number, what) of cases and faults."""
    found = verdicts.count(run.cases)
    shown = [(looks.look(v), f"{found[v]:,}", v) for v in verdicts.VERDICTS if found[v]]
    if judged := kills.judged(run.kills):
        killed = sum(kill.killed for kill in judged)
        state = "pass" if killed == len(judged) else "fail"
        shown.append((state, f"{killed:,}/{len(judged):,}", "faults killed"))
    return shown


def _kept(run: Run) -> Table:
    """A row for each system of a baseline, which has neither errors nor seconds."""
    whole = of_cases.table(run.cases)
    kept = [
        n
        for n, name in enumerate(whole.headings)
        if name not in ("worst error / bound", "median s")
    ]
    rows = [[row[n] for n in kept] for row in whole.rows]
    heads = [whole.headings[n] for n in kept]
    return Table("Results", heads, rows, whole.marks, whole.notes, align="llrll")


def _linked(table: Table, ids: Collection[str], root: str) -> Table:
    """``table`` with the names of rows that are ``ids`` of cases as links to their pages."""
    column = table.row_header
    rows = [
        [
            TableCell(str(cell), link=f"{root}case.html#id={quote(str(cell), safe='')}")
            if number == column and str(cell) in ids
            else cell
            for number, cell in enumerate(row)
        ]
        for row in table.rows
    ]
    return replace(table, rows=rows)


def _by_hardware(runs: Sequence[Published]) -> tuple[Sequence[str], Sequence[Table]]:
    """Differences between machines, in sentences and tables: the first run is the reference."""
    first, *others = (one.snapshot for one in runs)
    compared: list[RunComparison] = [compare(first, other) for other in others]
    report = hardware.report(first, compared)
    return report.summary, report.tables


def _faults(runs: Sequence[Published]) -> Mapping[str, Any]:
    """The table fault x run, and how many each run killed."""
    planted = [one for one in runs if one.kills]
    known = [{kill.name: kill for kill in one.kills if not kill.left_out} for one in planted]
    names = sorted({name for of_run in known for name in of_run})
    # Survivors first.
    names.sort(key=lambda name: all(of_run[name].killed for of_run in known if name in of_run))
    detailed = any(kill.killed_by for of_run in known for kill in of_run.values())
    rows: list[Row] = []
    marks: list[Mark] = []
    for name in names:
        here = [of_run.get(name) for of_run in known]
        told = [kill for kill in here if kill is not None]
        marks.append("" if all(kill.killed for kill in told) else "bad")
        rows.append((name, *map(_fate, here), *(_about(told) if detailed else ())))
    about = ("named check", "fails", "parent") if detailed else ()
    table = Table("Faults", ("fault", *(_hardware(one) for one in planted), *about), rows, marks)
    counts = [(one, kills.verdict_counts(one.kills)) for one in planted]
    return {"table": table, "counts": counts}


def _fate(kill: Kill | None) -> TableCell:
    return TableCell("-") if kill is None else looks.chip("killed" if kill.killed else "survives")


def _about(kills_of_one: Sequence[Kill]) -> tuple[str, str, str]:
    """The check that names a fault, those that fail, and its parent: of a run, not a baseline."""
    kill = next((kill for kill in kills_of_one if kill.killed_by), None)
    if kill is None:
        return "-", "-", "-"
    return ", ".join(kill.killed_by), ", ".join(kill.failing) or "none", kill.parent


def _hardware(one: Published) -> str:
    return one.snapshot.hardware
