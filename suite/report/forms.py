"""The forms of a report: the page, Markdown, and a terminal; each walks the list of sections.

``report.html`` is one self-contained page that opens offline, without any script if need be: style,
script and drawings are inline; a policy in the page forbids any request, and any script but the one
that sorts tables and filters cases.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from shardproof import verdicts, wings
from shardproof.checks.results import CaseResult, Kill
from shardproof.errors import Problem, SelectionError, printable, shown
from shardproof.files import write_whole
from shardproof.report import brief, cases, kills, summary
from shardproof.report.looks import head, look
from shardproof.report.section import TEMPLATES, rendered, safe
from shardproof.report.sections import ABOVE, BELOW, sections
from shardproof.runs.blocks import NAMED, blocks, of_result, without_numbers
from shardproof.runs.header import Header
from shardproof.runs.run_folder import Run
from shardproof.table import grouped, markdown_text, number, shortened, some

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
#: Prints one renderable or text; rich's ``Console.print``.
Print = Callable[..., None]


def html(run: Run) -> str:
    """The page of ``run``; reads records of failed cases and of pipelines for its drawings."""
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    shown = [(section, section.html()) for section in sections(run)]
    return rendered(
        TEMPLATES / "report.html",
        run=run,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        headline=summary.headline(run),
        started=run.header.invocations[0].started.replace("T", " ").replace("+00:00", " UTC"),
        tiles=_tiles(run),
        sections=[(section, body) for section, body in shown if body],
        folded=len(run.cases) > cases.FEW,
    )


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(look, number, what) of the figures at the top."""
    counts = verdicts.count(run.cases)
    tiles = [(look(v), f"{counts[v]:,}", v) for v in verdicts.VERDICTS if counts[v]]
    if run.left_out:
        tiles.append(("none", f"{len(run.left_out):,}", "left out"))
    if judged := kills.judged(run.kills):
        killed = sum(kill.killed for kill in judged)
        state = "pass" if killed == len(judged) else "fail"
        tiles.append((state, f"{killed:,}/{len(judged):,}", "faults killed"))
    for kind, lines in run.known(judged_only=False).items():
        heads = Counter(head(line["verdict"]) for line in lines)
        tiles += [(look(word), f"{n:,}", f"{kind.label}: {word}") for word, n in heads.items()]
    return tiles


def markdown(run: Run) -> str:
    """The README's tables, below what broke: implementation x backend; kill count."""
    tables = [text for part in (*ABOVE, *BELOW) if (text := part.readme(run))]
    told = [*cases.broken_lines(run), *tables]
    return "\n".join([*told, "", run.provenance]) + "\n"


def document(run: Run) -> str:
    """``report.md``: what ``report.html`` says, without its drawings."""
    answer = summary.headline(run)
    lines = [f"# Shardproof: run {run.path.name}", "", f"**{answer.sentence}**", ""]
    lines += [f"- {markdown_text(detail)}" for detail in answer.details]
    shown = (line for section in sections(run) for line in section.markdown())
    return "\n".join([*lines, "", safe(run.provenance), "", *shown])


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
        remedy = f"put one line {begin} and below it one line {end} into the file"
        raise SelectionError(Problem("--into: expected 1 pair of marker lines", remedy, str(path)))
    new = pattern.sub(lambda _: f"{begin}\n{printable(text.rstrip())}\n{end}", old)
    write_whole(path, new)


def show(results: Sequence[CaseResult], write: Print, rows: bool = True) -> None:
    """The tables of cases that a terminal shows: results, then memory and pipelines, if any; one
    row for each family where many ``rows`` were not asked for.
    """
    run = Run(Path(), Header(invocations=[]), cases=[*results])
    first, *others = (table for part in ABOVE for table in part.terminal(run))
    if not rows and sum(len(table.rows) for table in (first, *others)) > brief.FEW:
        write(brief.of_cases(results))
        return
    write(first)
    for table in others:
        if table.rows:
            write()
            write(table)


def show_broken(results: Sequence[CaseResult], write: Print) -> None:
    """The failed and open cases, a block for each cause: the simplest case, and how to rerun it."""
    from rich.text import Text

    told = verdicts.RED | verdicts.OPEN
    broken = [of_result(r) for r in results if verdicts.kind(r.verdict) in told]
    if found := blocks(broken):
        told_cases, causes = number(len(broken), "case"), number(len(found), "cause")
        write(f"\nfailed or undecided: {told_cases}, {causes}")
    for block in found:
        first = block.first
        write(Text(shown(f"{first.verdict}: {first.id}"), style="bold red"), soft_wrap=True)
        sentences = map(shortened, first.reason.splitlines())
        more = (hint for wing in wings.wings() for hint in wing.hints(first))
        lines = [*sentences, f"rerun: {first.rerun}", *more, block.more()]
        for line in filter(None, lines):
            write(Text(shown(f"    {line}")), soft_wrap=True)


def show_kills(lines: Sequence[Kill], write: Print, rows: bool = True) -> None:
    """The outcome of planted faults: the kill matrix, or one row for each family where many
    ``rows`` were not asked for.
    """
    if judged := kills.judged(lines):
        whole = rows or len(judged) <= brief.FEW
        write(kills.table(judged).titled("") if whole else brief.of_kills(judged))


def show_survivors(lines: Sequence[Kill], write: Print) -> None:
    """The faults that survive, by the reason: the first, how to plant it again, and the others."""
    from rich.text import Text

    groups = grouped(((k.parent, without_numbers(k.why_not)), k) for k in kills.survivors(lines))
    for first, *others in groups.values():
        write(Text(shown(f"SURVIVES {first.name}: {first.why_not}"), style="red"), soft_wrap=True)
        write(f"    rerun: {kills.rerun(first)}", soft_wrap=True)
        if others:
            names = some([kill.name for kill in others], NAMED)
            write(f"    the same in {number(len(others), 'more fault')}: {names}", soft_wrap=True)
