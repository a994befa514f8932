"""A run as Markdown: the tables of the README, and ``report.md`` with all that the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shardproof.errors import Problem, SelectionError, printable
from shardproof.files import write_whole
from shardproof.report import bubbles, capability_matrix, kills, memory, nodes, summary, tables
from shardproof.report.coverage import seen_table
from shardproof.report.environment import environment
from shardproof.report.limits import NOT_RUN, limits
from shardproof.report.sections import sections
from shardproof.runs.run_folder import Run
from shardproof.table import Table, fenced, markdown_text

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
#: What broke is shown in full for so many; the others stand in a table.
IN_FULL = 50
#: Ids of cases that were not run, for each reason; the page has all.
NAMED = 20


def markdown(run: Run) -> str:
    """The README's tables: implementation x backend, options and worlds together; kill count."""
    lines = [tables.table(run.cases, detailed=False).markdown(), f"{tables.closing(run)}."]
    beside = [memory.table(run.cases), *bubbles.tables(run.cases)]
    lines += [folded(table) for table in beside if table.rows]
    if run.kills:
        lines += ["", kills.verdict_counts(run.kills)]
    lines += ["", run.provenance]
    return "\n".join(lines) + "\n"


def document(run: Run) -> str:
    """``report.md``: what ``report.html`` says, without its drawings."""
    answer = summary.headline(run)
    lines = [f"# Shardproof: run {run.path.name}", "", f"**{answer.sentence}**", ""]
    lines += [f"- {markdown_text(detail)}" for detail in answer.details]
    lines += ["", _safe(run.provenance), ""]
    for part in (_broken, _judged, _of_wings, _killed, _limits):
        lines += part(run)
    return "\n".join([*lines, environment(run).section(2)])


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
    new = pattern.sub(lambda _: f"{begin}\n{printable(text.rstrip())}\n{end}", old)
    write_whole(path, new)


def _broken(run: Run) -> Iterator[str]:
    broken = summary.broken_blocks(run)
    if not broken:
        return
    yield "## What broke\n"
    if len(broken) > IN_FULL:
        yield summary.by_cause(broken).markdown()
        yield f"The first {IN_FULL} of {len(broken)} causes:\n"
    for block in broken[:IN_FULL]:
        item = block.first
        name = item.id.replace("`", "'")
        yield f"- **{markdown_text(item.verdict)}** `{name}`"
        last = [line for text in (item.rerun, block.more()) if text for line in ("", text)]
        shown = fenced([*item.reason.splitlines(), *last])
        yield from ("", *(f"  {line}".rstrip() for line in shown), "")


def _judged(run: Run) -> Iterator[str]:
    matrix = capability_matrix.matrix(run).table()
    memories = memory.table(run.cases), memory.allocator(run.cases)
    shown = [matrix, tables.table(run.cases), *memories, *bubbles.tables(run.cases)]
    for table in (*shown, *nodes.tables(run), tables.slowest(run.cases), seen_table(run.cases)):
        if table.rows:
            yield table.section(2)


def _of_wings(run: Run) -> Iterator[str]:
    for section in sections(run):
        yield from section.markdown()


def _killed(run: Run) -> Iterator[str]:
    judged = kills.judged(run.kills)
    if judged:
        yield kills.table(judged).section(2)
    if (random := kills.by_n(run)).rows:
        yield random.section(2)


def _limits(run: Run) -> Iterator[str]:
    yield "## What was not checked\n"
    unchecked = limits(run)
    if not unchecked:
        yield "Nothing was left out, skipped or left open.\n"
    for limit in unchecked:
        yield f"### {limit.title}\n\n{limit.why}\n\n{limit.table.markdown()}"
        yield from limit.table.notes
        for names in limit.items if limit.title in NOT_RUN else ():
            rest = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
            yield "\n".join(["", *fenced([*names[:NAMED], *rest]), ""])


def folded(table: Table) -> str:
    """A part that a reader opens; blank lines make it Markdown inside of HTML."""
    notes = "".join(f"\n{note}\n" for note in table.notes)
    title = f"{_safe(table.title)} ({len(table.rows)} rows)"
    return f"\n<details>\n<summary>{title}</summary>\n\n{table.markdown()}{notes}\n</details>"


def _safe(text: str) -> str:
    """One line that may hold code, and no HTML, link or image."""
    return " ".join(text.split()).replace("<", "&lt;").replace("](", "]\\(")
