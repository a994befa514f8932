"""Tables of a run: on the terminal, as Markdown, and as one self-contained HTML file.

All forms are made from the same rows: implementation x backend x world, with counts of verdicts,
the worst error against its bound, bytes sent against the formula (and how many times the textbook's
they are, for native systems), and the median seconds of a case.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from suite import bubbles, verdicts
from suite.errors import Problem, SelectionError
from suite.results import Run

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """Cases of one implementation and backend, at one world size or at several."""

    implementation: str
    backend: str
    worlds: tuple[int, ...]
    counts: Counter[str]
    error: float | None
    bound: float | None
    sent: Fraction | None
    expected: Fraction | None
    textbook: str
    seconds: float

    @property
    def red(self) -> bool:
        """Whether a case broke."""
        return any(self.counts[verdict] for verdict in verdicts.RED)

    def cells(self) -> tuple[str, ...]:
        """The texts of :data:`HEADINGS`."""
        return (
            self.implementation,
            self.backend,
            _span(self.worlds),
            _counts(self.counts),
            _error(self.error, self.bound),
            _bytes(self.sent, self.expected) + self.textbook,
            f"{self.seconds:.2f}",
        )


HEADINGS = (
    "implementation",
    "backend",
    "world",
    "verdicts",
    "worst error / bound",
    "bytes sent / formula",
    "median s",
)


def rows(results: Iterable[Result], detailed: bool = True) -> list[Row]:
    """One row per (implementation with options, backend, world), or (implementation, backend)."""
    groups: dict[tuple[str, str, int], list[Result]] = defaultdict(list)
    for result in results:
        case = result["case"]
        name, world = case["implementation"], 0
        if detailed:
            name += f"+{case['label']}" if case.get("label") else ""
            world = world_of(case)
        groups[name, case["backend"], world].append(result)
    return [
        _row(implementation, backend, members)
        for (implementation, backend, _), members in sorted(groups.items())
    ]


def world_of(case: Mapping[str, Any]) -> int:
    """Number of ranks of a case in its JSON form."""
    return math.prod(case["mesh"].values())


def _row(implementation: str, backend: str, members: Sequence[Result]) -> Row:
    error = bound = None
    for result in members:
        if result.get("worst_error") is None or result.get("bound") is None:
            continue
        candidate = float(result["worst_error"]), float(result["bound"])
        if error is None or _share(*candidate) > _share(error, bound or 0.0):
            error, bound = candidate
    counted = [r for r in members if r.get("bytes_sent") and r.get("bytes_expected")]
    return Row(
        implementation,
        backend,
        tuple(sorted({world_of(result["case"]) for result in members})),
        verdicts.count(members),
        error,
        bound,
        sum((Fraction(r["bytes_sent"]) for r in counted), Fraction(0)) if counted else None,
        sum((Fraction(r["bytes_expected"]) for r in counted), Fraction(0)) if counted else None,
        _textbook(counted),
        statistics.median(float(result["seconds"]) for result in members),
    )


def _share(error: float, bound: float) -> float:
    """How much of its bound an error uses; a bitwise bound is 0, any error beyond it infinite."""
    if math.isnan(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


def _span(worlds: Sequence[int]) -> str:
    if len(worlds) > 2 and list(worlds) == list(range(worlds[0], worlds[-1] + 1)):
        return f"{worlds[0]}-{worlds[-1]}"
    return ", ".join(map(str, worlds))


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[v]} {v}" for v in verdicts.VERDICTS if counts[v])


def _error(error: float | None, bound: float | None) -> str:
    if error is None or bound is None:
        return "-"
    if bound == 0:
        return "equal bits" if error == 0 else f"{error:.2g} / equal bits"
    return f"{error:.2g} / {bound:.0e}"


def _bytes(sent: Fraction | None, expected: Fraction | None) -> str:
    if sent is None or expected is None:
        return "-"
    if sent == expected:
        return f"{_whole(sent)} = formula"
    factor = f" (x{float(sent / expected):.3g})" if expected else ""
    return f"{_whole(sent)} / {_whole(expected)}{factor}"


def _textbook(members: Iterable[Result]) -> str:
    """How many times the textbook's bytes the ``members`` send that have one (``""``: none do)."""
    sent, wanted, name = Fraction(0), Fraction(0), ""
    for result in members:
        checks = {check["check"]: check["figures"] for check in result["checks"]}
        told = checks.get("traffic", {})
        if "textbook" in told:
            sent += Fraction(result["bytes_sent"])
            wanted += Fraction(told["textbook_bytes"])
            name = told["textbook"]
    return f" ({float(sent / wanted):.3g} x {name})" if wanted else ""


def _whole(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"


def medians(results: Iterable[Result]) -> dict[str, float]:
    """Median seconds of a judged case by backend."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if verdicts.kind(result["verdict"]) != "skip":
            seconds[result["case"]["backend"]].append(float(result["seconds"]))
    return {backend: statistics.median(values) for backend, values in sorted(seconds.items())}


#: Reasons of skipped cases that are told one by one.
_SKIPS = 12


def skips(results: Iterable[Result]) -> list[str]:
    """Why cases were skipped: a line for each implementation and reason, most frequent first."""
    counts: Counter[str] = Counter(
        f"{result['case']['implementation']} {result['reason']}"
        for result in results
        if verdicts.kind(result["verdict"]) == "skip"
    )
    told = [f"skipped ({times}): {reason}" for reason, times in counts.most_common(_SKIPS)]
    rest = len(counts) - len(told)
    return [*told, *([f"skipped for {rest} more reasons: see report.html"] if rest else [])]


# -------------------------------------------------------------------------------------- memory

#: Resident model state on the rank that holds most.  *whole copies* is data parallelism with the
#: same options; *theory* leaves padding and step counters out, *limit* is that of many ranks.
MEMORY_HEADINGS = (
    "implementation",
    "optimizer",
    "precision",
    "world",
    "accounting",
    "bytes held",
    "whole copies",
    "measured",
    "promised",
    "theory",
    "limit",
)


MEMORY_TITLE = "Resident bytes of model state on the rank that holds most, against whole copies"
MEASURED = MEMORY_HEADINGS.index("measured")
#: Beside a measured ratio where the check found other bytes than promised.
FAILS = " (fail)"


def memory_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """How many times less is held than by whole copies, one row per distinct cell, by world."""
    found: dict[tuple[Any, ...], tuple[str, ...]] = {}
    for result in results:
        told = next((c for c in result["checks"] if c["check"] == "memory"), None)
        if told is None or "ratio_measured" not in told["figures"]:
            continue
        case, figures = result["case"], told["figures"]
        name = case["implementation"] + (f"+{case['label']}" if case.get("label") else "")
        policy = case.get("precision") or {}
        precision = ", ".join(f"{k} {v}" for k, v in policy.items()) or case["dtype"]
        theory, limit = figures["ratio_theory"], figures["ratio_limit"]
        most = "shard ranks" if limit is None else _ratio(limit)
        row = (
            name,
            case["optimizer"]["name"],
            precision,
            str(world_of(case)),
            figures["accounting"],
            f"{figures['bytes_held']:,}",
            f"{figures['bytes_whole']:,}",
            _times_less(figures, "ratio_measured") + (FAILS if told["status"] == "fail" else ""),
            "-" if figures["ratio_promised"] is None else _times_less(figures, "ratio_promised"),
            "-" if theory is None else f"{_ratio(theory)} = {theory}",
            "-" if theory is None else most,
        )
        found.setdefault((name, row[1], row[2], world_of(case), *row[5:]), row)
    return [row for _, row in sorted(found.items(), key=lambda item: item[0][:4])]


def _times_less(figures: Result, name: str) -> str:
    """A ratio to the whole copies; where all is on the host there is none."""
    nothing = Fraction(figures[name]) == figures["bytes_whole"]
    return "nothing held" if nothing else _ratio(figures[name])


def _ratio(text: str) -> str:
    return f"{float(Fraction(text)):.3f}x"


# --------------------------------------------------------------------------------- kill matrix


KILL_HEADINGS = ("fault", "parent", "verdict", "killed by", "also seen by", "lane", "error / bound")


def kill_cells(kill: Result) -> tuple[str, ...]:
    """The texts of :data:`KILL_HEADINGS` for one line of the kill matrix."""
    named, seen = list(kill["killed_by"]), list(kill["failing"])
    margin = kill.get("margin")
    return (
        kill["name"],
        kill["parent"],
        "killed" if kill["killed"] else f"SURVIVES: {kill['why_not']}",
        ", ".join(named),
        ", ".join(check for check in seen if check not in named) or "-",
        kill["lane"],
        "-" if margin is None else f"{float(margin):.1e}",
    )


def kill_matrix(kills: Sequence[Result]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Fault x check: ``K`` named and failing, ``x`` fails too, ``!`` named and silent."""
    columns = sorted({check for k in kills for check in (*k["killed_by"], *k["failing"])})
    lines = []
    for kill in kills:
        marks = []
        for check in columns:
            named, fails = check in kill["killed_by"], check in kill["failing"]
            marks.append("K" if named and fails else "!" if named else "x" if fails else "")
        lines.append((str(kill["name"]), marks))
    return columns, lines


def kill_counts(kills: Sequence[Result]) -> str:
    """Kills by lane, and how many faults a single check sees: dropping it would lose them."""
    lanes = Counter(str(kill["lane"]) for kill in kills if kill["killed"])
    by_lane = ", ".join(f"{lane} {count}" for lane, count in sorted(lanes.items())) or "none"
    lone = Counter(str(kill["failing"][0]) for kill in kills if len(kill["failing"]) == 1)
    only = ", ".join(f"{check} {count}" for check, count in sorted(lone.items()))
    return f"kills by lane: {by_lane}; seen by one check only: {lone.total()} ({only or 'none'})"


# ------------------------------------------------------------------------------------ Markdown


def markdown(run: Run) -> str:
    """The README's tables: implementation x backend, options and worlds together; kill count."""
    lines = [_markdown_row(HEADINGS), _markdown_row(["---"] * len(HEADINGS))]
    lines += [_markdown_row(row.cells()) for row in rows(run.cases, detailed=False)]
    lines.append("")
    lines.append(f"{closing(run)}.")
    memory = memory_rows(run.cases)
    if memory:
        lines.append("")
        lines += [f"{MEMORY_TITLE}:", ""]
        lines += [_markdown_row(MEMORY_HEADINGS), _markdown_row(["---"] * len(MEMORY_HEADINGS))]
        lines += [_markdown_row(row) for row in memory]
        lines += ["", f"Accounting, in {ACCOUNTING}."]
    for title, headings, cells, notes in bubbles.tables(run.cases):
        lines += ["", f"{title}:", ""]
        lines += [_markdown_row(headings), _markdown_row(["---"] * len(headings))]
        lines += [_markdown_row(row) for row in cells]
        lines += [part for note in notes for part in ("", note)]
    if run.kills:
        killed = sum(bool(kill["killed"]) for kill in run.kills)
        lines.append(f"Planted faults: {killed} of {len(run.kills)} killed by their named check.")
    lines.append("")
    lines.append(_provenance(run))
    return "\n".join(lines) + "\n"


def closing(run: Run) -> str:
    """Counts of all verdicts of the run, in words."""
    return verdicts.summary(verdicts.count(run.cases), len(run.left_out))


def _provenance(run: Run) -> str:
    last = run.header["invocations"][-1]
    machine = last.get("fingerprint", {})
    commit = str(last.get("commit") or "unknown")
    return (
        f"Run `{run.path.name}`: commit {commit[:12]}, torch {last['packages'].get('torch')}, "
        f"Python {last['python']}, {machine.get('cpu')}, {machine.get('cores')} cores."
    )


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def insert(text: str, path: Path) -> None:
    """Replace what stands between the markers in the file at ``path``.

    :raises SelectionError: no such file, or not exactly one pair of markers.
    """
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise SelectionError(Problem(f"--into: {why}", "name a text file", str(path))) from None
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if old.count(BEGIN) != 1 or len(pattern.findall(old)) != 1:
        remedy = f"put one line {BEGIN} and below it one line {END} into it"
        raise SelectionError(Problem("--into: no markers", remedy, str(path)))
    new = pattern.sub(lambda _: f"{BEGIN}\n{text.rstrip()}\n{END}", old)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(new, encoding="utf-8")
    partial.replace(path)


# ---------------------------------------------------------------------------------------- HTML


def html(run: Run) -> str:
    """One self-contained page: every case, red ones first, kill matrix, what was left out."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    template = Environment(loader=loader, autoescape=True).get_template("report.html")
    order = {verdict: index for index, verdict in enumerate(verdicts.VERDICTS)}
    columns, matrix = kill_matrix(run.kills)
    ordered = sorted(run.cases, key=lambda r: (order[verdicts.kind(r["verdict"])], r["id"]))
    return template.render(
        run=run,
        closing=closing(run),
        provenance=_provenance(run),
        headings=HEADINGS,
        rows=rows(run.cases),
        broken=[r for r in ordered if verdicts.kind(r["verdict"]) in verdicts.RED],
        cases=[(verdicts.kind(r["verdict"]), r) for r in ordered],
        memory_headings=MEMORY_HEADINGS,
        memory=memory_rows(run.cases),
        bubbles=bubbles.tables(run.cases),
        kill_headings=KILL_HEADINGS,
        kills=[(bool(kill["killed"]), kill_cells(kill)) for kill in run.kills],
        columns=columns,
        matrix=matrix,
        left_out=_left_out(run.left_out),
        green=verdicts.GREEN,
        red=verdicts.RED,
    )


def _left_out(lines: Sequence[Result]) -> dict[str, list[str]]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        by_reason[str(line["reason"])].append(str(line["id"]))
    return dict(by_reason)


# ------------------------------------------------------------------------------------ terminal

#: Prints one renderable or text; rich's ``Console.print``.
Print = Callable[..., None]


def show(run_cases: Sequence[Result], write: Print) -> None:
    """The table of results."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        numeric = heading in ("world", "median s")
        folds = heading == "verdicts"
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=not folds)
    for row in rows(run_cases):
        style = "red" if row.red else ""
        table.add_row(*(Text(cell, style=style) for cell in row.cells()))
    write(table)


#: What the accounting ids of memory tables mean.
ACCOUNTING = (
    "bytes a parameter, its gradient, its masters and optimizer state: A32 4+4+8, A16 2+2+12, "
    "M18 2+4+12, B8 2+2+4, S4 2+2+0"
)


def show_memory(run_cases: Sequence[Result], write: Print) -> None:
    """The table of memory, where a scenario asks for it by the beginning of its name."""
    from rich.table import Table

    told = memory_rows(r for r in run_cases if r["case"]["scenario"].startswith("memory"))
    if not told:
        return
    write()
    table = Table(box=None, pad_edge=False, header_style="bold", title=MEMORY_TITLE)
    for heading in MEMORY_HEADINGS:
        table.add_column(heading, no_wrap=True)
    for cells in told:
        table.add_row(*cells, style="red" if FAILS in cells[MEASURED] else "")
    write(table)
    write(ACCOUNTING, style="dim")


def show_bubbles(run_cases: Sequence[Result], write: Print) -> None:
    """The tables of pipelines, where a scenario asks for them by the beginning of its name."""
    from rich.table import Table

    for title, headings, cells, notes in bubbles.tables(run_cases):
        write()
        table = Table(box=None, pad_edge=False, header_style="bold", title=title)
        for number, heading in enumerate(headings):
            table.add_column(heading, no_wrap=True, justify="right" if number > 1 else "left")
        for row in cells:
            table.add_row(*row)
        write(table)
        for note in notes:
            write(note, style="dim", soft_wrap=True)


def show_kills(kills: Sequence[Result], write: Print) -> None:
    """The kill matrix: fault x check, then every survivor with what happened."""
    from rich.table import Table
    from rich.text import Text

    columns, lines = kill_matrix(kills)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("fault", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="center", no_wrap=True)
    table.add_column("lane", no_wrap=True)
    table.add_column("error / bound", justify="right", no_wrap=True)
    for kill, (name, marks) in zip(kills, lines, strict=True):
        style = "" if kill["killed"] else "red"
        margin = "" if kill["margin"] is None else f"{kill['margin']:.1e}"
        cells = (name, *marks, kill["lane"], margin)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    write(table)
    write("K killed by its named check, x fails too, ! named but silent", style="dim")
    write(kill_counts(kills))
    for kill in kills:
        if not kill["killed"]:
            write(Text(f"SURVIVES {kill['name']}: {kill['why_not']}", style="red"))
