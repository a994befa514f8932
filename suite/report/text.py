"""A run as Markdown: the tables of the README, and ``report.md`` with all that the page tells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shardproof.bench import tables as times
from shardproof.errors import Problem, SelectionError
from shardproof.files import write_whole
from shardproof.report import bubbles, kills, memory, summary, tables
from shardproof.report.drawings import curves
from shardproof.report.environment import environment
from shardproof.report.limits import limits
from shardproof.report.matrix import matrix
from shardproof.runs.run_folder import Run

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
#: What broke is told in full for so many; the others stand in a table.
TOLD = 50


def markdown(run: Run) -> str:
    """The README's tables: implementation x backend, options and worlds together; kill count."""
    lines = _table(tables.HEADINGS, (row.cells() for row in tables.rows(run.cases, False)))
    lines += ["", f"{tables.closing(run)}."]
    rows = memory.memory_rows(run.cases)
    if rows:
        accounting = f"Accounting, in {memory.ACCOUNTING}."
        table = _table(memory.HEADINGS, rows)
        lines += _folded(f"{memory.TITLE} ({len(rows)} rows)", [*table, "", accounting])
    for title, headings, cells, notes in bubbles.tables(run.cases):
        told = [part for note in notes for part in ("", note)]
        lines += _folded(f"{title} ({len(cells)} rows)", [*_table(headings, cells), *told])
    if run.kills:
        lines += ["", kills.verdict_counts(run.kills)]
    lines += ["", tables.provenance(run)]
    return "\n".join(lines) + "\n"


def document(run: Run) -> str:
    """``report.md``: what ``report.html`` tells, without its drawings."""
    told = summary.headline(run)
    lines = [f"# Shardproof: run {run.path.name}", "", f"**{told.sentence}**", ""]
    lines += [f"- {_safe(detail)}" for detail in told.details]
    lines += ["", _safe(tables.provenance(run))]
    for section in (_broken, _matrix, _results, _timed, _scaling, _killed, _limits, _environment):
        lines += section(run)
    return "\n".join(lines) + "\n"


def insert(text: str, path: Path, begin: str = BEGIN, end: str = END) -> None:
    """Replace what stands between two markers in the file at ``path``.

    :raises SelectionError: no such file, or not exactly one pair of markers.
    """
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise SelectionError(Problem(f"--into: {why}", "name a text file", str(path))) from None
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if old.count(begin) != 1 or len(pattern.findall(old)) != 1:
        remedy = f"put one line {begin} and below it one line {end} into it"
        raise SelectionError(Problem("--into: no markers", remedy, str(path)))
    new = pattern.sub(lambda _: f"{begin}\n{text.rstrip()}\n{end}", old)
    write_whole(path, new)


# ------------------------------------------------------------------------------------ sections


def _broken(run: Run) -> Iterator[str]:
    found = summary.breaks(run)
    if not found:
        return
    yield from ("", "## What broke", "")
    causes = summary.by_cause(found)
    if len(found) > TOLD:
        rows = [(name, cause, str(times)) for name, cause, times in causes]
        yield from _table(("implementation", "failed first", "cases"), rows)
        yield from ("", f"The first {TOLD} of {len(found)}:", "")
    for item in found[:TOLD]:
        yield f"- **{_safe(item.verdict)}** `{_code(item.name)}`"
        rerun = ["", item.rerun] if item.rerun else []
        fenced = _fenced([*item.reason.splitlines(), *rerun])
        yield from ("", *(f"  {line}".rstrip() for line in fenced), "")


def _matrix(run: Run) -> Iterator[str]:
    found = matrix(run)
    if not found.rows:
        return
    yield from ("", "## Capabilities", "")
    names = [name for name, _ in found.columns]
    rows = [
        (row.implementation, row.backend, *("" if c is None else c.text for c in row.cells))
        for row in found.rows
    ]
    yield from _table(("implementation", "backend", *names), rows)
    yield ""
    yield from (f"- {name}: {says}" for name, says in found.columns)


def _results(run: Run) -> Iterator[str]:
    if not run.cases:
        return
    yield from ("", "## Implementation x backend x world", "")
    yield from _table(tables.HEADINGS, (row.cells() for row in tables.rows(run.cases)))
    rows = memory.memory_rows(run.cases)
    if rows:
        yield from ("", "## Memory", "", f"{memory.TITLE}:", "")
        yield from _table(memory.HEADINGS, rows)
        yield from ("", f"Accounting, in {memory.ACCOUNTING}.")
    if bubbles.tables(run.cases):
        yield from ("", "## Pipelines", *_bubbles(run))


def _bubbles(run: Run) -> Iterator[str]:
    for title, headings, cells, notes in bubbles.tables(run.cases):
        yield from ("", f"{title}:", "", *_table(headings, cells))
        for note in notes:
            yield from ("", note)


def _timed(run: Run) -> Iterator[str]:
    if not run.benches:
        return
    yield from ("", "## Comparisons of times", "")
    from shardproof.bench import stats  # scipy is slow to import, and the gate does not need it

    family = stats.family(run.benches)
    yield from _table(times.HEADINGS, (times.cells(line, family) for line in run.benches))
    for line in run.benches:
        yield from ("", *_fenced(times.details(line)))


def _scaling(run: Run) -> Iterator[str]:
    if run.scalings:
        yield from ("", "## Scaling", "")
        yield from _table(curves.HEADINGS, curves.rows(run.scalings))
        yield ""
        for heading, items in curves.remarks(run.scalings):
            yield f"- {_safe(heading)}"
            yield from (f"  - {_safe(item)}" for item in items)


def _killed(run: Run) -> Iterator[str]:
    told = kills.judged(run.kills)
    if not told:
        return
    yield from ("", "## Planted faults", "")
    columns, rows = kills.kill_matrix(told)
    cells = [
        (
            name,
            str(kill["parent"]),
            "killed" if kill["killed"] else f"SURVIVES: {kill['why_not']}",
            *marks,
            str(kill["lane"]),
            "-" if kill["margin"] is None else f"{float(kill['margin']):.1e}",
        )
        for kill, (name, marks) in zip(told, rows, strict=True)
    ]
    yield from _table(("fault", "parent", "verdict", *columns, "lane", "error / bound"), cells)
    yield from ("", "; ".join(f"{mark} {says}" for mark, says in kills.MARKS.items() if mark) + ".")
    yield from ("", f"{kills.kill_counts(told)}.")


def _limits(run: Run) -> Iterator[str]:
    yield from ("", "## What was not checked")
    found = limits(run)
    if not found:
        yield from ("", "Nothing was left out, skipped or left open.")
    for limit in found:
        yield from ("", f"### {limit.title}", "", limit.why, "")
        yield from _table(limit.headings, limit.rows)
        if limit.rest:
            yield from ("", f"And {limit.rest} more rows.")


def _environment(run: Run) -> Iterator[str]:
    headings, rows = environment(run)
    yield from ("", "## What ran, and where", "")
    yield from _table(("fact", *headings), ((name, *texts) for name, texts in rows))


# --------------------------------------------------------------------------------------- forms


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    """A part that a reader opens; blank lines make it Markdown inside of HTML."""
    return ["", "<details>", f"<summary>{_safe(title)}</summary>", "", *lines, "", "</details>"]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(headings), _row(["---"] * len(headings)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_safe(cell).replace("|", "\\|") for cell in cells) + " |"


def _safe(text: str) -> str:
    """One line that no reader of Markdown takes for HTML, for a link or for an image."""
    return " ".join(text.split()).replace("<", "&lt;").replace("](", "]\\(")


def _fenced(lines: Iterable[str]) -> list[str]:
    """Lines as they are; the fence is longer than any within."""
    told = list(lines)
    fence = "~" * max([4, *(len(run) + 1 for line in told for run in re.findall("~{4,}", line))])
    return [f"{fence}text", *told, fence]


def _code(text: str) -> str:
    return text.replace("`", "'")
