"""Comparisons in words: the cells of their table, and what stands below it.

Pure functions of lines of ``cases.jsonl``.  ``report`` is what ``bench.stats.family``
says of all comparisons that are shown together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardproof.bench.telemetry import sampling
from shardproof.table import Table

Line = Mapping[str, Any]
#: Comparison -> its adjusted p and verdict beside all others of a report.
Report = Mapping[str, Mapping[str, Any]]

HEADINGS = (
    *("pair", "verdict", "in this report (p, Holm)", "A / B [95 %]", "p", "A/A [95 %]", "margin"),
    *("A ms", "B ms", "A a second", "B a second", "peak A / B", "goal"),
)


def cells(line: Line, report: Report | None = None) -> tuple[str, ...]:
    """The texts of :data:`HEADINGS`; without a ``report`` the comparison stands for itself."""
    from shardproof.bench import stats  # scipy is slow to import, and every command imports this

    pair, same, seconds = line["pair"], line.get("aa"), line.get("median_seconds", {})
    p = line.get("p")
    met = line.get("goal_met")
    return (
        name(line),
        line["verdict"],
        _in_report(line, stats.family([line]) if report is None else report),
        interval(line) if "ratio" in line else "-",
        "-" if p is None else f"{p:.2g}{'' if line['p_exact'] else ' (drawn)'}",
        "-" if not same else f"{interval(same)} +-{same['half_width']:.1%}",
        f"{line['margin']:.1%}" if "margin" in line else "-",
        *(f"{1e3 * seconds[s]:.1f}" if s in seconds else "-" for s in ("a", "b")),
        *(rates(line, side) for side in ("a", "b")),
        _memory(line.get("memory")),
        "-" if met is None else f"{'met' if met else 'missed'} ({pair['goal']:.2f})",
    )


#: The columns of a terminal, which is narrower than a page; the others stand below it.
NARROW = ("pair", "verdict", HEADINGS[2], "A / B [95 %]", "A/A [95 %]", "A ms", "B ms", "goal")


def table(lines: Sequence[Line], headings: Sequence[str] = HEADINGS) -> Table:
    """Comparisons that are shown together, with the columns ``headings``."""
    from shardproof.bench import stats

    report = stats.family(lines)
    places = [HEADINGS.index(heading) for heading in headings]
    rows = [cells(line, report) for line in lines]
    return Table(
        "",
        headings,
        [[row[place] for place in places] for row in rows],
        marks=["bad" if line["verdict"] in ("slower", *stats.BROKEN) else "" for line in lines],
    )


def beside(line: Line) -> list[str]:
    """What :data:`HEADINGS` has and :data:`NARROW` has not, in lines."""
    texts = dict(zip(HEADINGS, cells(line), strict=True))
    if "ratio" not in line:
        return []
    p = "no p, which takes 6 blocks" if line.get("p") is None else f"p {texts['p']} by sign flips"
    return [
        f"    A {texts['A a second']}; B {texts['B a second']}",
        f"    {p}, margin {texts['margin']}, peak {texts['peak A / B']}",
    ]


def name(line: Line) -> str:
    """The pair's name, unless it was made on the command line, and both sides."""
    pair = line["pair"]
    sides = f"{pair['a']['implementation']} v {pair['b']['implementation']}"
    return sides if pair["name"] == "pair" else f"{pair['name']}: {sides}"


def _in_report(line: Line, report: Report) -> str:
    told = report.get(line["id"])
    return "-" if told is None else f"{told['verdict']} ({told['p_holm']:.2g})"


def interval(found: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def rates(line: Line, side: str) -> str:
    """Tokens and samples that a side trains in a second; of a classifier samples only."""
    samples = line.get("samples_per_second", {}).get(side)
    targets = line.get("targets_per_second", {}).get(side)
    if samples is None:  # of a run that was timed before samples were told
        return "-" if targets is None else f"{targets:,.0f} targets"
    # 0 targets: the first launch was stopped before its ranks told how many a step has.
    tokens = f"{targets:,.0f} tokens/s, " if targets and targets != samples else ""
    return f"{tokens}{samples:,.1f} samples/s"


def _memory(told: Mapping[str, Any] | None) -> str:
    if told is None or "problem" in told:
        return "-"
    advisory = "" if told["kind"] == "ledger" else " resident, advisory"
    mib = " / ".join(f"{told[side] / 2**20:.1f}" for side in ("a", "b"))
    return f"{mib} MiB = {told['ratio']:.3f}{advisory}"


def details(line: Line) -> list[str]:
    """Below the table: what was compared, and what to make of it."""
    pair = line["pair"]
    workload = pair["workload"]
    size = f" {pair['size']}" if pair["size"] else ""
    per_step = line.get("targets_per_step", {}).get("a")
    tokens = "" if per_step is None else f", {per_step} targets a step"
    told = [
        line["id"],
        f"    {workload['name']}{size}, {workload['micro_batches']} micro-batches{tokens}, "
        f"{pair['optimizer']['name']} foreach=False, {pair['dtype']}, {pair['world']} ranks",
    ]
    for letter in ("a", "b"):
        side, mesh = pair[letter], line["meshes"].get(letter) or {}
        shape = " x ".join(f"{axis}={n}" for axis, n in mesh.items())
        options = ", ".join(f"{k}={v}" for k, v in side["options"].items()) or "as it comes"
        told.append(f"    {letter.upper()}  {side['implementation']} ({shape}): {options}")
    if line.get("reason"):
        told.append(f"    {line['verdict']}: {line['reason']}")
    if "ratio" in line:
        told.append(
            f"    {line['blocks']} blocks over {line['launches']} launches in "
            f"{line['seconds']:.0f} s; effects from {line['smallest_effect']:.1%} on can be seen"
        )
    same, differ = line.get("aa"), line.get("launches_differ_p")
    if same:
        told.append(
            f"    A/A: SD of a block {same['sd']:.3f}; a half-width of 5 % takes "
            f"{same['blocks_needed']} blocks here"
        )
    if same and (same["low"] > 1 or same["high"] < 1):
        told.append("    caution: A differs from its own twin here: take no verdict from this run")
    if differ is not None and differ < 0.01:
        told.append(f"    caution: launches differ (p {differ:.1g}), the interval is too narrow")
    if line.get("memory") and "problem" in line["memory"]:
        told.append(f"    no memory figures: {line['memory']['problem']}")
    told += [f"    {text}" for text in _scorecards(line)]
    told += [f"    {text}" for text in sampling.texts(line.get("telemetry"))]
    return told + _profile(line.get("profile"))


#: Figures of a scorecard, their words and form.
_SCORES = {
    "achieved_over_predicted": ("achieved / predicted", "{:.3f}"),
    "exposed_share": ("exposed communication", "{:.1%}"),
    "memory_over_formula": ("memory / formula", "{:.2f}"),
    "achieved_over_probed": ("achieved / probed rates", "{:.2f}"),
}


def _scorecards(line: Line) -> list[str]:
    told = []
    for letter, card in sorted((line.get("scorecard") or {}).items()):
        if "problem" in card:
            told.append(f"no scorecard of {letter.upper()}: {card['problem']}")
            continue
        figures = [
            f"{words} {form.format(card[figure])}"
            for figure, (words, form) in _SCORES.items()
            if card.get(figure) is not None
        ]
        told.append(f"scorecard of {letter.upper()}: {', '.join(figures)}")
    return told


def _profile(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return []
    if "problem" in told:
        return [f"    no profile: {told['problem']}"]
    lines = ["    ms of a mean step, slowest rank     A        B"]
    notes = {"blocked": "  of it without a core", "threads": "  CPU of other threads, beside it"}
    for phase in told["a"]:
        both = f"{told['a'][phase]:10.1f} {told['b'][phase]:8.1f}"
        lines.append(f"      {phase:24} {both}{notes.get(phase, '')}")
    return lines


def lost(lines: Sequence[Line], report: Report) -> str | None:
    """A sentence if a difference that a comparison found does not stand beside the others."""
    changed = [
        name(line)
        for line in lines
        if line["id"] in report and report[line["id"]]["verdict"] != line["verdict"]
    ]
    if not changed:
        return None
    return (
        f"{len(report)} comparisons side by side: what looks like a difference may be chance in "
        f"{', '.join(changed)}"
    )
