"""The part of a run's reports about times: its sections, and undecided results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from shardproof.bench import collective_times, lines, tables
from shardproof.bench.collective_times import Timed
from shardproof.bench.drawings import bandwidth, by_bandwidth, curves, forest
from shardproof.bench.lines import CellLine, L, PairLine
from shardproof.bench.scaling import tables as scaling
from shardproof.commands.console import print_line
from shardproof.report import brief, looks, summary
from shardproof.report.limits import MOST, Limit
from shardproof.report.section import Section, folded, rendered
from shardproof.runs.run_folder import Run
from shardproof.table import fenced, markdown_text

if TYPE_CHECKING:
    from rich.console import Console

#: Comparisons or cells that a terminal shows with all that is known of them.
_FEW = 3
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Pairs(Section):
    """Comparisons of times."""

    anchor, title = "times", "Comparisons of times"

    pairs: Sequence[PairLine]

    def html(self) -> Markup:
        notes = [[text.strip() for text in tables.details(pair)] for pair in self.pairs]
        shown = {"table": forest.table(self.pairs), "lost": tables.lost(self.pairs)}
        return rendered(_TEMPLATES / "pairs.html", notes=notes, **shown)

    def markdown(self) -> Iterator[str]:
        yield tables.table(self.pairs).titled(self.title).section(2)
        for pair in self.pairs:
            yield from (*fenced(tables.details(pair)), "")

    def table(self) -> str:
        return tables.table(self.pairs).markdown()

    def show(self, console: Console, rows: bool = True, quiet: bool = False) -> None:
        many, rows = len(self.pairs) > brief.MOST, rows or len(self.pairs) <= _FEW
        few = tables.by_family(self.pairs) if many else tables.table(self.pairs, tables.BRIEF)
        if not quiet:
            console.print(tables.table(self.pairs, tables.NARROW) if rows else few)
        for pair in self.pairs if rows and not quiet else _broken(self.pairs):
            first, *rest = tables.details(pair)
            for text in (first, *tables.beside(pair), *rest):
                print_line(console, text)
        if caution := tables.lost(self.pairs):
            print_line(console, caution)


@dataclass(frozen=True)
class Cells(Section):
    """Efficiencies of scaling."""

    anchor, title = "scaling", "Scaling efficiency"

    cells: Sequence[CellLine]

    def html(self) -> Markup:
        return rendered(
            _TEMPLATES / "cells.html",
            panels=[*by_bandwidth.panels(self.cells), *curves.panels(self.cells)],
            table=curves.table(self.cells),
            remarks=scaling.remarks_by_system(self.cells),
        )

    def markdown(self) -> Iterator[str]:
        yield curves.table(self.cells).section(2)
        for heading, items in scaling.remarks_by_system(self.cells):
            yield f"- {markdown_text(heading)}"
            yield from (f"  - {markdown_text(item)}" for item in items)
        yield ""

    def table(self) -> str:
        return scaling.markdown(self.cells)

    def show(self, console: Console, rows: bool = True, quiet: bool = False) -> None:
        if quiet or not (rows or len(self.cells) <= _FEW):
            if not quiet:
                console.print(scaling.by_family(self.cells))
            for heading, items in scaling.remarks_by_system(_broken(self.cells)):
                print_line(console, "\n    ".join([heading, *items]))
            return
        console.print(scaling.table(self.cells, scaling.NARROW))
        if (modelled := scaling.modelled_table(self.cells)).rows:
            print_line(console, "")
            console.print(modelled)
        for text in scaling.remarks(self.cells):
            print_line(console, text)


@dataclass(frozen=True)
class Collectives(Section):
    """Times of collectives."""

    anchor, title = "collectives", "Collectives"

    timed: Sequence[Timed]

    def html(self) -> Markup:
        return rendered(
            _TEMPLATES / "collectives.html",
            panels=bandwidth.panels(self.timed),
            summary=collective_times.summary(self.timed),
            sizes=collective_times.by_size(self.timed),
        )

    def markdown(self) -> Iterator[str]:
        yield collective_times.summary(self.timed).section(2)
        yield folded(collective_times.by_size(self.timed))

    def table(self) -> str:
        return collective_times.summary(self.timed).markdown()

    def show(self, console: Console, rows: bool = True, quiet: bool = False) -> None:
        console.print(collective_times.summary(self.timed))


def _broken(lines: Sequence[L]) -> list[L]:
    """Those that failed or missed their goal, which a terminal always shows in full."""
    from shardproof.bench import stats  # scipy is slow to import, and the gate does not need it

    return [line for line in lines if looks.head(line.verdict) in stats.BROKEN or line.missed]


def sections(run: Run) -> list[Section]:
    """The sections of the kinds that ``run`` has.

    :raises SelectionError: a line that cannot be read.
    """
    pairs, cells, timed = lines.pairs(run), lines.cells(run), collective_times.of(run)
    made = (pairs and Pairs(pairs), cells and Cells(cells), timed and Collectives(timed))
    return [section for section in made if section]


def limits(run: Run) -> Iterator[Limit]:
    """Comparisons and cells of scaling that were not measured, or do not suffice for a verdict.

    A comparison that others beside it make undecided (Holm) is open as well.
    """
    pairs, cells = lines.pairs(run), lines.cells(run)
    if not pairs and not cells:
        return
    from shardproof.bench import stats  # scipy is slow to import, and the gate does not need it

    family = stats.family(pairs)
    rows = []
    timed: list[PairLine | CellLine] = [*pairs, *cells]
    for line in timed:
        word, why = line.verdict, line.reason
        beside = family[line.id].verdict if line.id in family else word
        if looks.head(beside) in summary.OPEN and beside != word:
            word, why = beside, f"{word} alone, not with {len(family)} comparisons (Holm)"
        if looks.head(word) in (*summary.OPEN, "oversubscribed"):
            rows.append((line.id, word, why))
    yield Limit(
        "Times that decide nothing",
        "Comparisons and efficiencies that were not measured, or whose interval is too wide.",
        ("timing", "verdict", "reason"),
        tuple(rows[:MOST]),
        rest=len(rows[MOST:]),
    )
