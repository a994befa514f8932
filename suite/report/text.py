"""A run as Markdown: the tables of the README, and ``report.md`` with all that the page says."""

from __future__ import annotations

import re
from pathlib import Path

from shardproof.errors import Problem, SelectionError, printable
from shardproof.files import write_whole
from shardproof.report import summary
from shardproof.report.section import safe
from shardproof.report.sections import ABOVE, BELOW, sections
from shardproof.runs.run_folder import Run
from shardproof.table import markdown_text

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def markdown(run: Run) -> str:
    """The README's tables: implementation x backend, options and worlds together; kill count."""
    told = [text for part in (*ABOVE, *BELOW) if (text := part.readme(run))]
    return "\n".join([*told, "", run.provenance]) + "\n"


def document(run: Run) -> str:
    """``report.md``: what ``report.html`` says, without its drawings."""
    answer = summary.headline(run)
    lines = [f"# Shardproof: run {run.path.name}", "", f"**{answer.sentence}**", ""]
    lines += [f"- {markdown_text(detail)}" for detail in answer.details]
    lines += ["", safe(run.provenance), ""]
    for section in sections(run):
        lines += section.markdown()
    return "\n".join(lines)


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
