"""Comparisons in words: the rows of their table, and what stands below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardproof.bench import telemetry
from shardproof.bench.lines import Counted, InReport, Interval, Memory, NoFigures, PairLine, Sent
from shardproof.bench.subjects import LETTERS
from shardproof.report import brief
from shardproof.table import Mark, Table

HEADINGS = (
    *("pair", "verdict", "in this report (p, Holm)", "A / B [95 %]", "p", "A/A [95 %]", "margin"),
    *("A ms", "B ms", "A a second", "B a second", "peak A / B", "sent A / B", "goal"),
)
#: The columns of a terminal, without and with -v; all others are below the table with -v.
BYTES = ("peak A / B", "sent A / B")
BRIEF = ("pair", "verdict", "A / B [95 %]", *BYTES, "goal")
TIMES = ("A / B [95 %]", "A/A [95 %]", "A ms", "B ms")
NARROW = ("pair", "verdict", HEADINGS[2], *TIMES, *BYTES, "goal")


def rows(lines: Sequence[PairLine]) -> list[tuple[str, ...]]:
    """The texts of :data:`HEADINGS` of each of the comparisons, which are shown together."""
    from shardproof.bench import stats  # scipy is slow to import, and every command imports this

    family = stats.family(lines)
    return [_row(line, family.get(line.id)) for line in lines]


def _row(line: PairLine, beside: InReport | None) -> tuple[str, ...]:
    figures, met = line.figures, line.goal_met
    measured = ["-"] * 6
    if figures is not None:
        p, same = figures.p, figures.aa
        measured = [
            interval(figures),
            "-" if p is None else f"{p:.2g}{'' if figures.p_exact else ' (drawn)'}",
            "-" if same is None else f"{interval(same)} +-{same.half_width:.1%}",
            f"{figures.margin:.1%}",
            *(f"{1e3 * figures.median_seconds[letter]:.1f}" for letter in LETTERS),
        ]
    return (
        name(line),
        line.verdict,
        "-" if beside is None else f"{beside.verdict} ({beside.p_holm:.2g})",
        *measured,
        *(rates(line, letter) for letter in LETTERS),
        _memory(line.memory),
        _sent(line.sent),
        "-" if met is None else f"{'met' if met else 'missed'} ({line.pair.goal:.2f})",
    )


def table(lines: Sequence[PairLine], headings: Sequence[str] = HEADINGS) -> Table:
    """The table of the comparisons, with the columns ``headings``."""
    from shardproof.bench import stats

    places = [HEADINGS.index(heading) for heading in headings]
    marks: list[Mark] = ["bad" if a.verdict in ("slower", *stats.BROKEN) else "" for a in lines]
    return Table("", headings, [[row[at] for at in places] for row in rows(lines)], marks)


def by_family(lines: Sequence[PairLine]) -> Table:
    """A row for each system A: how its comparisons ended, and the one in which A is slowest."""
    from shardproof.bench import stats

    rows: list[tuple[str, ...]] = []
    marks: list[Mark] = []
    for system, members in brief.families(lines, lambda line: line.pair.side("a").implementation):
        counts = Counter(line.verdict for line in members)
        known = [line for line in members if line.figures is not None]
        slowest = max(
            known, key=lambda line: line.figures.ratio if line.figures else 0, default=None
        )
        worst = ("-", "-")
        if slowest is not None and slowest.figures is not None:
            worst = (interval(slowest.figures), slowest.pair.side("b").implementation)
        seconds = f"{sum(line.seconds for line in members):,.0f}"
        marks.append("bad" if counts.keys() & {"slower", *stats.BROKEN} else "")
        rows.append((system, brief.counted(counts, sorted(counts)), *worst, seconds))
    headings = ("A", "verdicts", "slowest A / B [95 %]", "B", "seconds")
    return Table("", headings, rows, marks, align="llllr")


def beside(line: PairLine) -> list[str]:
    """The columns of :data:`HEADINGS` that :data:`NARROW` omits, in lines."""
    if line.figures is None:
        return []
    texts = dict(zip(HEADINGS, *rows([line]), strict=True))
    known = line.figures.p is not None
    p = f"p {texts['p']} by sign flips" if known else "no p, which takes 6 blocks"
    return [
        f"    A {texts['A a second']}; B {texts['B a second']}",
        f"    {p}, margin {texts['margin']}",
    ]


def name(line: PairLine) -> str:
    """The pair's name, unless it was made on the command line, and both sides."""
    pair = line.pair
    return pair.versus if pair.name == "pair" else f"{pair.name}: {pair.versus}"


def interval(ratio: Interval) -> str:
    """A ratio with its interval."""
    return f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def rates(line: PairLine, side: str) -> str:
    """Tokens and samples that a side trains in a second; of a classifier samples only."""
    samples = (line.samples_per_second or {}).get(side)
    targets = line.targets_per_second.get(side)
    if samples is None:  # of a run of a version that did not count samples
        return "-" if targets is None else f"{targets:,.0f} targets"
    # 0 targets: the first launch was stopped before its ranks returned how many a step has.
    tokens = f"{targets:,.0f} tokens/s, " if targets and targets != samples else ""
    return f"{tokens}{samples:,.1f} samples/s"


def _memory(memory: Memory | NoFigures | None) -> str:
    if not isinstance(memory, Memory):
        return "-"
    if memory.device and memory.host:
        return f"{_mib(**memory.device)}, host {_mib(**memory.host)}"
    advisory = "" if memory.kind == "ledger" else " resident, advisory"
    return f"{_mib(memory.a, memory.b)}{advisory}"


def _sent(sent: Sent | NoFigures | None) -> str:
    return _mib(sent.a, sent.b) if isinstance(sent, Sent) else "-"


def _mib(a: int, b: int) -> str:
    """Both sizes, and their ratio if there is one."""
    sizes = f"{a / 2**20:.1f} / {b / 2**20:.1f} MiB"
    return f"{sizes} = {a / b:.3f}" if a and b else sizes


#: What the times of a checkpoint are of.
_ACTIONS = {
    "save": "time until a save is committed",
    "load": "a load",
    "stall": "time that a save stops training",
}


def _counted(one: Counted) -> str:
    above, below = one.bytes
    met = "missed" if one.missed else "met"
    asked = "" if one.limit is None else f", at most {one.limit:g}: {met}"
    return f"counted: {one.what} {one.ratio:.3f} ({above:,} / {below:,} bytes){asked}"


def details(line: PairLine) -> list[str]:
    """Below the table: what was compared, and what to make of it."""
    pair, figures = line.pair, line.figures
    workload = pair.workload
    size = f" {pair.size}" if pair.size else ""
    per_step = line.targets_per_step.get("a")
    tokens = "" if per_step is None else f", {per_step} targets a step"
    what = f"{workload.micro_batches} micro-batches{tokens}, {pair.optimizer.name} foreach=False"
    if pair.action != "step":
        what = f"{_ACTIONS[pair.action]}, {pair.optimizer.name}"
    texts = [f"{workload.name}{size}, {what}, {pair.dtype}, {pair.world} ranks"]
    for letter in LETTERS:
        side = pair.side(letter)
        shape = " x ".join(f"{axis}={n}" for axis, n in line.meshes.get(letter, {}).items())
        options = ", ".join(f"{k}={v}" for k, v in side.options.items()) or "as it comes"
        texts.append(f"{letter.upper()}  {side.implementation} ({shape}): {options}")
    if line.reason:
        texts.append(f"{line.verdict}: {line.reason}")
    if figures is not None:
        same, differ = figures.aa, figures.launches_differ_p
        blocks = f"{line.blocks} blocks over {figures.launches} launches in {line.seconds:.0f} s"
        texts.append(f"{blocks}; effects from {figures.smallest_effect:.1%} on can be seen")
        if same is not None:
            needed = f"a half-width of 5 % takes {same.blocks_needed} blocks here"
            texts.append(f"A/A: SD of a block {same.sd:.3f}; {needed}")
        if same is not None and same.differs:
            texts.append("caution: A differs from its own twin here: take no verdict from this run")
        if differ is not None and differ < 0.01:
            texts.append(f"caution: launches differ (p {differ:.1g}), the interval is too narrow")
    texts += map(_counted, line.counted)
    if isinstance(line.memory, NoFigures):
        texts.append(f"no memory figures: {line.memory.problem}")
    texts += [*_scorecards(line), *telemetry.texts(line.telemetry)]
    return [line.id, *(f"    {text}" for text in texts)]


#: Figures of a scorecard, their words and form.
_SCORES = {
    "achieved_over_predicted": ("achieved / predicted", "{:.3f}"),
    "exposed_share": ("exposed communication", "{:.1%}"),
    "memory_over_formula": ("memory / formula", "{:.2f}"),
    "achieved_over_probed": ("achieved / probed rates", "{:.2f}"),
}


def _scorecards(line: PairLine) -> list[str]:
    texts = []
    for letter, card in sorted((line.scorecard or {}).items()):
        if isinstance(card, NoFigures):
            texts.append(f"no scorecard of {letter.upper()}: {card.problem}")
            continue
        values = {figure: getattr(card, figure) for figure in _SCORES}
        known = [(*_SCORES[figure], n) for figure, n in values.items() if n is not None]
        figures = ", ".join(f"{words} {form.format(n)}" for words, form, n in known)
        texts.append(f"scorecard of {letter.upper()}: {figures}")
    return texts


def lost(lines: Sequence[PairLine]) -> str:
    """A sentence if a difference of a comparison is not significant among the others."""
    from shardproof.bench import stats

    family = stats.family(lines)
    changed = [name(a) for a in lines if a.id in family and family[a.id].verdict != a.verdict]
    what = f"{len(family)} comparisons side by side: what looks like a difference may be chance in "
    return f"{what}{', '.join(changed)}" if changed else ""
