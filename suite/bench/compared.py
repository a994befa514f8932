"""Times of two runs or machines side by side, for ``compare`` and ``gate``.

Compared are ratios that each run measured by itself (:mod:`shardproof.bench.ratios`), so hardware
may differ.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shardproof.bench import lines, ratios
from shardproof.bench.lines import CellLine, Memory, PairLine
from shardproof.bench.model.step_time import Scorecard
from shardproof.bench.ratios import Difference, Estimate
from shardproof.bench.subjects import LETTERS, Subject
from shardproof.compare import snapshot
from shardproof.compare.compare import ComparedTimes, Pairing, RunComparison
from shardproof.compare.exact_figures import Scalar
from shardproof.runs.run_folder import Run
from shardproof.strategies import REPLICATION
from shardproof.table import Mark, Table

if TYPE_CHECKING:
    from shardproof.compare import policy


#: Names of ratios that are better when larger; those of times are better when smaller.
EFFICIENCY = "efficiency"
_MARKS: dict[str, Mark] = {"slower": "bad", "faster": "good"}
_NOTE = (
    "Each run measured its ratios with both systems side by side; seconds of two runs are "
    "never compared. Change: the ratio of the two ratios, its 95 % interval (Welch), p by Holm "
    "over this table. Margin: 5 %, or what the A/A pairs of both runs leave open."
)
_HARDWARE_NOTE = (
    "Each ratio was measured side by side on its own machine, with its 95 % interval; seconds of "
    "two machines are never compared. Next to it: the difference from the first column "
    "(Welch, p by Holm), where versions, cell and data are the same."
)
SCALING = "Scaling"
_TITLES = ("Time against DDP", "Time of A over B", SCALING)


@dataclass(frozen=True)
class Timing:
    """A ratio that both runs have.

    ``smallest`` is the effect (a share) that these blocks could have shown.  ``margin``, ``rule``
    and ``note`` are what a policy allows, if there is one.
    """

    id: str
    ratio: str
    before: snapshot.Sample
    after: snapshot.Sample
    difference: Difference
    margin: float
    smallest: float
    rule: str = "time"
    note: str = ""

    @property
    def verdict(self) -> str:
        """The verdict on the difference; ``slower`` also says that an efficiency is lower.

        ``inconclusive``: nothing is certain, or not beside all others that were compared.
        """
        if self.before == self.after:
            return "same"  # one measurement, looked at twice
        found = self.difference
        if self.ratio.startswith(EFFICIENCY):
            found = replace(found, mean=-found.mean, low=-found.high, high=-found.low)
        verdict = ratios.verdict(found, self.margin)
        lost = verdict in ratios.DIFFERENT and found.p_holm >= 1 - ratios.CONFIDENCE
        return "inconclusive" if lost else verdict

    @property
    def words(self) -> str:
        """The verdict, in words that fit the ratio."""
        if self.verdict == "inconclusive":
            return f"inconclusive (could see {self.smallest:.0%})"
        efficient = {"slower": "less efficient", "faster": "more efficient"}
        return (efficient if self.ratio.startswith(EFFICIENCY) else {}).get(
            self.verdict, self.verdict
        )

    @property
    def moved(self) -> bool:
        """Whether the ratio differs for certain."""
        return self.verdict not in ("same", "inconclusive")

    @property
    def change(self) -> dict[str, float]:
        """The ratio of the two ratios, and its 95 % interval."""
        difference = self.difference
        ends = {end: math.exp(getattr(difference, end)) for end in ("low", "high")}
        return {"ratio": math.exp(difference.mean), **ends}

    @property
    def message(self) -> str:
        """The finding of the gate."""
        share = f"{math.expm1(self.margin):.1%}"
        changed = f"{self.ratio} changed by x{_shown(self.change)}"
        return f"{self.words}: {changed}, margin {share}{self.note}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        difference = {key: getattr(self.difference, key) for key in ("freedom", "p", "p_holm")}
        return {
            "id": self.id,
            "ratio": self.ratio,
            "reference": {**ratios.interval(self.before), "blocks": self.before.blocks},
            "now": {**ratios.interval(self.after), "blocks": self.after.blocks},
            "change": self.change | difference,
            "margin": math.expm1(self.margin),
            "smallest_effect": self.smallest,
            "verdict": self.verdict,
        }


class Timings(ComparedTimes):
    """The ratios that two runs have in common."""

    def table(self, only_changed: bool) -> Table:
        """A row a ratio."""
        shown: list[Timing] = [time for time in self if time.moved or not only_changed]
        rows = [
            (
                *(time.id, time.ratio, _interval(time.before), _interval(time.after)),
                *(_shown(time.change), f"{time.difference.p_holm:.2g}"),
                *(f"{math.expm1(time.margin):.1%}", time.words),
            )
            for time in shown
        ]
        headings = (
            *("pair", "ratio", "reference [95 %]", "now [95 %]", "change [95 %]", "p", "margin"),
            "verdict",
        )
        marks = [_MARKS.get(time.verdict, "") for time in shown]
        return Table("Times, as ratios of each run", headings, rows, marks, [_NOTE])

    def allowed(self, rules: policy.Times, today: datetime.date) -> Timings:
        """The same, with the margins that a policy allows."""
        return Timings(_allowed(time, rules, today) for time in self)


def _allowed(time: Timing, rules: policy.Times, today: datetime.date) -> Timing:
    matching = [e for e in rules.allow if fnmatchcase(time.id, e.pairs)]
    lasting = [e for e in matching if e.until is None or e.until >= today]
    share, rule, note = rules.slowdown, "time", ""
    if matching:
        allowed = max(lasting or matching, key=lambda e: e.slowdown)
        note = f"; {allowed.slowdown:.0%} allowed: {allowed.reason}"
        if lasting:
            share = allowed.slowdown
        else:
            rule, note = "expired", f"{note}, expired on {allowed.until}"
    return replace(time, margin=max(time.margin, math.log1p(share)), rule=rule, note=note)


def compared(pairs: Iterable[Pairing]) -> Timings:
    """The ratios that both results of ``pairs`` have."""
    timed = [
        (pair, name, pair.before.samples[name], after)
        for pair in pairs
        for name, after in pair.after.samples.items()
        if name in pair.before.samples and min(pair.before.samples[name].blocks, after.blocks) > 1
    ]
    if not timed:
        return Timings()  # scipy is slow to import
    differences = ratios.adjusted([ratios.difference(now, was) for _, _, was, now in timed])
    found = Timings()
    for (pair, name, before, after), difference in zip(timed, differences, strict=True):
        least = ratios.margin(pair.before.same, pair.after.same)
        smallest = math.expm1(ratios.smallest_effect(difference, least))
        found.append(Timing(pair.id, name, before, after, difference, least, smallest))
    return found


def by_hardware(
    names: Sequence[str],
    reference: snapshot.Snapshot,
    others: Sequence[RunComparison],
    only_changed: bool,
) -> list[Table]:
    """Each machine's own ratios, a column a machine; ``names`` are those of the machines."""
    columns = [reference, *(c.after for c in others)]
    found = [{}, *({(time.id, time.ratio): time for time in c.times} for c in others)]
    apart = [{}, *(c.apart for c in others)]
    rows: dict[str, list[tuple[str, ...]]] = {title: [] for title in _TITLES}
    beside: list[tuple[str, ...]] = []
    for name, entry in _in_order(columns).items():
        here = [run.timed.get(name) for run in columns]
        present = [one for one in here if one is not None]
        for ratio in dict.fromkeys(ratio for one in present for ratio in one.samples):
            times = [timings.get((name, ratio)) for timings in found]
            if only_changed and not any(time is not None and time.moved for time in times):
                continue
            each = zip(here, times, apart, strict=True)
            texts = [_text(one, ratio, time, name in why) for one, time, why in each]
            title = _title(ratio, entry)
            kind = [ratio] if title == SCALING else []
            rows[title].append((*_what(name, entry), *kind, *texts))
        for figure in dict.fromkeys(figure for one in present for figure in one.beside):
            if not figure.startswith("resident_bytes"):
                values = [None if one is None else one.beside.get(figure) for one in here]
                shown = ("-" if value is None else f"{value:.3f}" for value in values)
                beside.append((*_what(name, entry), figure.replace("_", " "), *shown))
    made, where = [], ("what", "backend", "world")
    for title, of_title in rows.items():
        kind = ["ratio"] if title == SCALING else []
        made.append(Table(title, (*where, *kind, *names), of_title, notes=[_HARDWARE_NOTE]))
    title = "Modelled, and the dimensionless scorecard"
    made.append(Table(title, (*where, "figure", *names), beside))
    return [table for table in made if table.rows]


def _text(one: snapshot.Entry | None, ratio: str, time: Timing | None, is_apart: bool) -> str:
    """A ratio on one machine, and how it differs from the first."""
    if one is None or ratio not in one.samples:
        return "-" if one is None else one.verdict
    more = time.words if time is not None else "(not comparable)" if is_apart else ""
    return f"{_interval(one.samples[ratio])} {more}".rstrip()


def _in_order(columns: Sequence[snapshot.Snapshot]) -> dict[str, snapshot.Entry]:
    """Timed results as name -> lines; results that differ in nothing but ranks, by their number."""
    found: dict[str, snapshot.Entry] = {}
    for run in columns:
        for name, entry in sorted(
            run.timed.items(),
            key=lambda item: (item[1].implementation, item[1].backend, item[1].world, item[0]),
        ):
            found.setdefault(name, entry)
    return found


def _title(ratio: str, entry: snapshot.Entry) -> str:
    if ratio != "time":
        return SCALING
    against = entry.implementation.split(" v ")[-1]
    return _TITLES[0] if against.endswith(f"/{REPLICATION}") else _TITLES[1]


def _what(name: str, entry: snapshot.Entry) -> tuple[str, str, str]:
    """The timed subject, its backend and its number of ranks."""
    parts = name.split("::")
    workload = f", {parts[-1]}" if len(parts) > 3 else ""
    what = f"{entry.implementation} ({parts[1]}{workload})" if len(parts) > 1 else name
    return what, entry.backend, str(entry.world)


def _interval(sample: snapshot.Sample) -> str:
    return f"{sample.ratio:.3f}" if sample.blocks < 2 else _shown(ratios.interval(sample))


def _shown(interval: dict[str, float]) -> str:
    return "{ratio:.3f} [{low:.3f}, {high:.3f}]".format(**interval)


#: Keys of a pair or cell that say what is run; the rest of it is in its id.
_CELL = ("workload", "base", "optimizer", "dtype", "size", "mode")
#: Verdicts of a line without a ratio that means anything.
_NO_RATIO = frozenset({"fail", "crash", "hang", "precondition", "refused"})


def entries(run: Run, version: Callable[[str], snapshot.Version]) -> Iterator[snapshot.Entry]:
    """An entry for each comparison and scaling cell of ``run``.

    :raises SelectionError: a line that cannot be read.
    """
    for pair in lines.pairs(run):
        yield _of_pair(pair, version(pair.id))
    for cell in lines.cells(run):
        yield _of_cell(cell, version(cell.id))


def _of_pair(line: PairLine, version: snapshot.Version) -> snapshot.Entry:
    pair, figures = line.pair, line.figures
    known = figures is not None and _means_something(line)
    twin = None if figures is None else figures.aa
    beside: dict[str, float] = {}
    exact: dict[str, Scalar] = {}
    if isinstance(memory := line.memory, Memory):
        if memory.kind == "ledger":
            exact = {"memory.ledger_bytes_a": memory.a, "memory.ledger_bytes_b": memory.b}
        else:
            beside = {"resident_bytes_a": float(memory.a), "resident_bytes_b": float(memory.b)}
    for letter, card in (line.scorecard or {}).items():
        if isinstance(card, Scorecard):
            scores = _numbers(asdict(card))
            beside |= {f"{name}, {letter.upper()}": value for name, value in scores.items()}
    cell = snapshot.cell_of(pair.to_dict(), _CELL)
    cell["sides"] = {letter: {"options": pair.side(letter).options} for letter in LETTERS}
    cell["meshes"] = {letter: line.meshes.get(letter, {}) for letter in LETTERS}
    return snapshot.Entry(
        **_shared(line, pair),
        implementation=pair.versus,
        strategy=snapshot.strategy_of(pair.a.implementation),
        verdict=snapshot.TIMED if known else line.verdict,
        version=version,
        figures=exact,
        cell=snapshot.cell_of(cell, tuple(cell)),
        samples={"time": _sample(figures.log)} if known and figures is not None else {},
        same=None if twin is None else snapshot.Sample(math.log(twin.ratio), twin.sd, twin.blocks),
        beside=beside,
    )


def _of_cell(line: CellLine, version: snapshot.Version) -> snapshot.Entry:
    known = (line.efficiency or {}) if _means_something(line) else {}
    samples = {f"efficiency ({base})": _sample(one.log) for base, one in known.items()}
    # A cell that was refused repeats what its source measured.
    if samples and line.wrapping is not None:
        samples["time (wrapped / plain)"] = _sample(line.wrapping.log)
    beside: dict[str, object] = {"modelled efficiency": line.modelled_efficiency}
    if line.scorecard is not None:
        beside |= asdict(line.scorecard)
    return snapshot.Entry(
        **_shared(line, line.cell),
        implementation=line.title,
        strategy=snapshot.strategy_of(line.implementation),
        verdict=line.verdict,
        version=version,
        figures={},
        cell=snapshot.cell_of(line.cell.to_dict(), (*_CELL, "system")),
        samples=samples,
        beside=_numbers(beside),
    )


def _shared(line: PairLine | CellLine, subject: Subject) -> dict[str, Any]:
    where = {"backend": subject.backend, "world": subject.world}
    return {"id": line.id, "reason": line.reason, **where}


def _numbers(figures: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _means_something(line: PairLine | CellLine) -> bool:
    """Whether the ratios of a timed line are those of sides that train the same."""
    return line.verdict not in _NO_RATIO and bool(line.trained_alike)


def _sample(log: Estimate) -> snapshot.Sample:
    return snapshot.Sample(log.mean, log.sd, log.blocks)
