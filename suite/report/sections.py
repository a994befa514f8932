"""The sections of a report, in order: page, Markdown and terminal walk this list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from shardproof import verdicts
from shardproof.report import (
    brief,
    bubbles,
    capability_matrix,
    cases,
    coverage,
    environment,
    kills,
    limits,
    memory,
    scenarios,
    tables,
)
from shardproof.report.drawings import bars, timelines
from shardproof.report.section import TEMPLATES, Section, folded, rendered
from shardproof.runs.run_folder import Run
from shardproof.table import Table
from shardproof.wings import wings, wings_of

Tables = Callable[[Run], Sequence[Table]]


_MODULES = (
    *(bars, brief, bubbles, capability_matrix, cases, coverage, environment, kills),
    *(limits, memory, scenarios, tables, timelines, verdicts),
)
#: What templates of the core may ask, by name.
_ASKED = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


@dataclass(frozen=True)
class SectionOfCore(Section):
    """A section of the core: what each form of a report shows of it, and of which ``run``.

    On the page that is the template ``<anchor>.html``, if it gives anything; in ``report.md`` the
    ``lines``, and each of the ``tables`` that has rows; on a ``terminal`` the tables after a run of
    cases.  ``label`` is its name in the page's list of sections, where that is not the title.
    """

    anchor: str
    title: str
    tables: Tables = lambda run: ()
    lines: Callable[[Run], Iterable[str]] = lambda run: ()
    terminal: Tables = lambda run: ()
    readme: Callable[[Run], str] = lambda run: ""
    label: str = ""
    folded: bool = False
    run: Any = None

    def html(self) -> Markup:
        """The text below the heading on ``report.html``."""
        template = TEMPLATES / f"{self.anchor}.html"
        return rendered(template, run=self.run, **_ASKED)

    def markdown(self) -> Iterator[str]:
        """Lines of ``report.md``, with the heading."""
        yield from self.lines(self.run)
        yield from (table.section(2) for table in self.tables(self.run) if table.rows)


def _results(run: Run) -> str:
    table = tables.table(run.cases, detailed=False)
    return f"{table.markdown()}\n{tables.closing(run)}."


def _faults(run: Run) -> Sequence[Table]:
    return [kills.table(judged)] if (judged := kills.judged(run.kills)) else []


def _killed(run: Run) -> str:
    return f"\n{kills.verdict_counts(run.kills)}" if run.kills else ""


#: Sections of the core: those above what wings say of cases, one between that and what wings say of
#: their own results, and those below.
ABOVE = (
    SectionOfCore("broke", "What broke", lines=cases.broken_lines),
    SectionOfCore(
        "capabilities", "Capabilities", lambda run: [capability_matrix.matrix(run).table()]
    ),
    SectionOfCore("cases", "Every case"),
    SectionOfCore(
        "results",
        "Results",
        lambda run: [tables.table(run.cases)],
        terminal=lambda run: [tables.table(run.cases).titled("")],
        readme=_results,
    ),
    SectionOfCore("traffic", "Traffic against formula", label="Traffic", folded=True),
    SectionOfCore(
        "memory",
        "Memory against formula",
        lambda run: [memory.table(run.cases), memory.allocator(run.cases)],
        terminal=lambda run: [memory.table_of_scenarios(run.cases)],
        readme=lambda run: folded(memory.table(run.cases)),
        label="Memory",
        folded=True,
    ),
    SectionOfCore(
        "pipelines",
        "Pipelines",
        lambda run: bubbles.tables(run.cases),
        terminal=lambda run: bubbles.tables(run.cases),
        readme=lambda run: "\n".join(map(folded, bubbles.tables(run.cases))),
        folded=True,
    ),
)
COVERAGE = SectionOfCore(
    "coverage", "Coverage", lambda run: [coverage.seen_table(run.cases)], folded=True
)
BELOW = (
    SectionOfCore("faults", "Planted faults", _faults, readme=_killed, folded=True),
    SectionOfCore(
        "random",
        "Planted faults under random cases",
        lambda run: [kills.by_n(run)],
        label="Random cases",
    ),
    SectionOfCore("limits", "Not checked", lines=limits.lines, folded=True),
    SectionOfCore("scenarios", "Scenarios", folded=True),
    SectionOfCore(
        "where", "Run and machine", lambda run: [environment.environment(run)], folded=True
    ),
)


def of_wings(run: Run) -> list[Section]:
    """The sections that wings add to the reports of ``run``."""
    return [section for wing in wings_of(run) for section in wing.sections(run)]


def sections(run: Run) -> list[Section]:
    """All sections of the reports of ``run``, in order."""
    above, below = ([replace(part, run=run) for part in parts] for parts in (ABOVE, BELOW))
    of_cases = [section for wing in wings() for section in wing.sections_of_cases(run)]
    return [*above, *of_cases, replace(COVERAGE, run=run), *of_wings(run), *below]
