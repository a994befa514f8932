"""Findings of a gate as a Markdown summary, JUnit XML, annotations, and plain lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardproof.compare import tables
from shardproof.compare.gate import Gate, GateFinding, kind, ordered
from shardproof.runs import junit
from shardproof.runs.blocks import Failure, FailureBlock, blocks, size_of_cell
from shardproof.table import Table, fenced, grouped, markdown_text, some

#: Blocks that a summary lists, and commands; the JUnit file has all.
SUMMARY_ROWS, SUMMARY_COMMANDS = 100, 10
#: Annotations of a job that a code host shows, and blocks that one annotation names.
ANNOTATIONS, ANNOTATED_BLOCKS = 10, 3
#: Rules whose findings tell what became of one result; its reason has the cause.
_OF_VERDICTS = ("verdict", "expired")
#: Rules about what one of the runs does not have.
_OF_ABSENCE = ("missing", "left out", "new")
#: Of more results that are missing their share is told.
SINGLE_LINES = 5
NARROW = "the run covers a part of the baseline: set cases.scope in the policy to that part"


def lines(gate: Gate) -> Iterator[str]:
    """A line for each rule and cause, as in the summary; what breaks first, the outcome last."""
    for first, block in _blocks(gate, gate.findings):
        head = f"{first.state:8}  {first.rule}: "
        if first.rule == "missing" and len(block.failures) > SINGLE_LINES:
            ids = some([failure.id for failure in block.failures], tables.EXAMPLES)
            yield f"{head}{_share(gate, len(block.failures))}: {first.headline}: {ids}"
            yield f"          {NARROW}"
            continue
        yield f"{head}{first.id}: {first.headline}"
        if first.file:
            yield f"          {first.place}"
        if more := block.more():
            yield f"          {more}"
    yield from gate.comparison.notes
    yield gate.sentence()


def _share(gate: Gate, missing: int) -> str:
    """How many results are missing of those that the baseline has of the same kinds."""
    before, after = gate.comparison.before, gate.comparison.after
    kinds = {kind(name) for name in after.ids}
    known = sum(kind(name) in kinds for name in before.ids - before.left_out.keys())
    return f"{missing:,} of {known:,} results"


def summary(gate: Gate) -> str:
    """For a pull request: the outcome, the findings, and what changed."""
    comparison = gate.comparison
    parts = [f"## Shardproof gate: {markdown_text(gate.sentence())}\n"]
    if comparison.notes:
        parts += [*(f"- {markdown_text(note)}" for note in comparison.notes), ""]
    groups = _blocks(gate, gate.findings)
    if groups:
        headings = ("state", "rule", "results", "what", "where")
        rows = [
            (f.state, f.rule, "; ".join(filter(None, (f.id, block.more()))), f.headline, f.place)
            for f, block in groups
        ]
        table = Table("Findings", headings, rows).first(SUMMARY_ROWS, "the JUnit file has all")
        parts += [table.markdown(), *(f"{note}\n" for note in table.notes)]
    commands = [block.first.rerun for first, block in groups if first.state == "breaks"]
    if shown := [command for command in commands if command][:SUMMARY_COMMANDS]:
        parts += ["Repeat the simplest failing case with:\n", *fenced(shown), ""]
    for part in (
        tables.runs([comparison.before, comparison.after]),
        tables.groups(comparison, "", only_changed=True),
        comparison.times.table(only_changed=True),
    ):
        parts += [part.section(3)] if part.rows else []
    return "\n".join(parts)


def junit_xml(gate: Gate) -> str:
    """JUnit XML: a test a result of the run, and one for each finding about something else."""
    by_id = grouped((finding.id, finding) for finding in gate.findings)
    names = dict.fromkeys([*gate.comparison.after.results, *by_id])
    return junit.render("shardproof gate", [_test(name, by_id.get(name, ())) for name in names])


def _test(name: str, findings: Sequence[GateFinding]) -> junit.Item:
    findings = ordered(findings)
    text = "\n".join(f"{f.state}: {f.rule}: {f.message}" for f in findings)
    if not findings or findings[0].state == "reported":
        return junit.Item(name, text=text)
    first = findings[0]
    message = f"{first.rule}: {first.headline}"
    tag: junit.Tag = "failure" if first.state == "breaks" else "skipped"
    return junit.Item(name, tag, message, text, kind=first.rule)


def github(gate: Gate) -> Iterator[str]:
    """Workflow commands: one annotation a place and rule, and no more than a job shows."""
    groups = grouped(
        ((f.state, f.rule, _relative(f.file), f.line), f) for f in ordered(gate.findings)
    )
    for number, ((state, rule, file, line), members) in enumerate(groups.items(), 1):
        levels = {"breaks": "error", "excused": "notice"}
        level = levels.get(state, "notice" if rule in ("too good", "new") else "warning")
        places = [("file", file), ("line", str(line or ""))] if file else []
        properties = [*places, ("title", f"shardproof gate: {rule}")]
        shown = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties if value)
        if number == ANNOTATIONS < len(groups):
            more = f"and {len(groups) - number + 1:,} more places: the summary has all"
            yield f"::{level} title=shardproof gate::{_escaped(more)}"
            return
        blocks = _blocks(gate, members)
        messages = [
            "; ".join(filter(None, (f"{first.id}: {first.headline}", block.more())))
            for first, block in blocks[:ANNOTATED_BLOCKS]
        ]
        if len(blocks) > ANNOTATED_BLOCKS:
            messages.append(f"and {len(blocks) - ANNOTATED_BLOCKS:,} more causes")
        yield f"::{level} {shown}::" + _escaped("\n".join(messages))


def _blocks(gate: Gate, findings: Sequence[GateFinding]) -> list[tuple[GateFinding, FailureBlock]]:
    """The findings in blocks, one for each rule and cause; each with its first finding."""
    groups: dict[tuple[str, str], dict[Failure, GateFinding]] = defaultdict(dict)
    for finding in ordered(findings):
        groups[finding.state, finding.rule][_failure(gate, finding)] = finding
    return [(of[block.first], block) for of in groups.values() for block in blocks(of)]


def _failure(gate: Gate, finding: GateFinding) -> Failure:
    """The finding as what is put into blocks."""
    after, before = gate.comparison.after.results, gate.comparison.before.results
    entry = after.get(finding.id) or before.get(finding.id)
    reason = finding.headline
    if entry is None or finding.rule in _OF_ABSENCE:
        return Failure("case", finding.id, finding.rule, reason)
    if finding.rule in _OF_VERDICTS and entry.reason:
        reason = entry.reason
    size = size_of_cell(entry.world, entry.backend, entry.cell)
    system = entry.implementation.split("+")[0]
    return Failure("case", finding.id, entry.verdict, reason, entry.rerun, system, size)


def _relative(file: str) -> str:
    """Below the working folder a code host finds the file; elsewhere it stays as it is."""
    path = Path(file)
    if file and path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return file


def _escaped(text: str, also: str = "") -> str:
    """Percent-encodes what ends a workflow command or one of its properties."""
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
