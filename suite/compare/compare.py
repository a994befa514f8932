"""Two snapshots: what can be compared, and what of it changed.  Pure functions.

A case is compared with the one of its id, where suite, torch, cell and data set are the same; what
is not, is said with why.  Exact figures have tolerance 0.  Times are ratios that each run measured
by itself, so hardware may differ; torch's release may not, its build (``+cpu``) may, as it goes
with the hardware.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from shardproof import verdicts
from shardproof.compare import exact_figures
from shardproof.compare.snapshot import FAULTS, Entry, Snapshot, Version
from shardproof.table import Table, grouped, some
from shardproof.wings import first

if TYPE_CHECKING:
    from shardproof.compare import policy

#: Verdicts of results whose figures say nothing: they were not run to their end, or not judged.
UNDECIDED = verdicts.RED | verdicts.OPEN | {"xfail", "skip"}
#: Figures that one note names.
NAMED = 4


@dataclass(frozen=True)
class FigureChange:
    """An exact figure that differs.  ``detail`` tells where, if the figure is a digest.

    ``unlike``: what only runs that share it have the same, and these do not; empty: all have.
    """

    id: str
    figure: str
    before: exact_figures.Scalar
    after: exact_figures.Scalar
    word: exact_figures.Word
    detail: str = ""
    unlike: str = ""

    @property
    def exact(self) -> bool:
        """Whether no difference of what they ran on explains it."""
        return not self.unlike

    def sentence(self) -> str:
        values = f"{exact_figures.show(self.before)}, now {exact_figures.show(self.after)}"
        why = f" (not judged: {self.unlike})" if self.unlike else ""
        return f"{self.figure} {self.word}: {self.detail or values}{why}"


@dataclass(frozen=True)
class Pairing:
    """A result of both runs that can be compared."""

    before: Entry
    after: Entry
    changes: tuple[FigureChange, ...]
    figures: int

    @property
    def decided(self) -> bool:
        """Whether the figures of both sides say something; else the verdict says it all."""
        return not UNDECIDED & {self.before.verdict, self.after.verdict}

    @property
    def id(self) -> str:
        return self.after.id


class ComparedTimes(list[Any]):
    """Ratios of times that both runs have, as a wing compares them; without a wing there are none.

    Each has an ``id``, a ``verdict``, whether it ``moved``, the ``rule`` and ``message`` of the
    gate, and the JSON form ``to_dict()``.
    """

    def table(self, only_changed: bool) -> Table:
        """A row a ratio."""
        return Table("Times", (), ())

    def allowed(self, rules: policy.Times, today: datetime.date) -> Self:
        """The same, with the margins that a policy allows."""
        return self


@dataclass
class RunComparison:
    """How ``after`` differs from ``before``, the reference."""

    before: Snapshot
    after: Snapshot
    pairs: list[Pairing] = field(default_factory=list)
    times: ComparedTimes = field(default_factory=lambda: ComparedTimes())
    #: Id -> why its results cannot be compared.
    apart: dict[str, str] = field(default_factory=dict)
    #: Ids of one side only; what the run says it left out (with its reason) is not missing.
    missing: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    #: Planted faults: name, killed in the reference, killed now.
    kills: list[FigureChange] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def changes(self) -> list[FigureChange]:
        """Every exact figure that differs, worse ones first, and of these the verdicts."""
        order = ("worse", "changed", "better")
        changes = [change for pair in self.pairs for change in pair.changes] + self.kills
        return sorted(
            changes,
            key=lambda c: (order.index(c.word), c.figure != exact_figures.VERDICT, c.id, c.figure),
        )

    @property
    def comparable(self) -> int:
        return len({pair.id for pair in self.pairs} | {time.id for time in self.times})

    @property
    def unchanged(self) -> bool:
        """Whether all was compared and nothing differs: figures, ratios, results that there are."""
        moved = any(time.moved for time in self.times)
        gone = self.missing or self.left_out or self.new or self.apart
        return not (self.changes or moved or gone)

    @property
    def obstacle(self) -> str:
        """Why nothing could be compared, most frequent reason first; ``""``: something was."""
        if self.comparable:
            return ""
        first = [f"{why} ({len(ids):,} results)" for why, ids in reasons(self.apart)[:3]]
        return "; ".join(first) or "the runs have no result in common"


def compare(before: Snapshot, after: Snapshot) -> RunComparison:
    """The differences of ``after`` from the reference ``before``."""
    comparison = RunComparison(before, after)

    # What no result of the reference has is news of the suite.
    known = {name for entry in before.results.values() for name in entry.figures}
    others = _other_cpu(before, after), _other_nodes(before, after)
    gone: list[str] = []
    for part in ("cases", "timed"):
        olds, news = getattr(before, part), getattr(after, part)
        for name, new in news.items():
            old = olds.get(name)
            if old is None:
                comparison.new.append(name)
            elif why := apart(old, new):
                comparison.apart[name] = why
            else:
                comparison.pairs.append(_pairing(old, new, known, others))
        gone += [name for name in olds if name not in news]
    times = first(lambda wing: wing.compared(comparison.pairs))
    comparison.times = times or ComparedTimes()
    for name, was in before.kills.items():
        fault, killed = f"{FAULTS}{name}", after.kills.get(name)
        if killed is None:
            gone.append(fault)
        elif was != killed:
            old, new = ("killed" if side else "survives" for side in (was, killed))
            word: exact_figures.Word = "better" if killed else "worse"
            comparison.kills.append(FigureChange(fault, "fault", old, new, word))
    comparison.missing = [name for name in gone if name not in after.left_out]
    comparison.left_out = {name: after.left_out[name] for name in gone if name in after.left_out}
    comparison.notes = list(_notes(before, after, comparison.pairs))
    return comparison


def apart(old: Entry, new: Entry) -> str:
    """Why two results of one id cannot be compared (``""``: they can)."""
    if old.version.suite != new.version.suite:
        return f"suite {old.version.suite}, now {new.version.suite}"
    if release(old.version) != release(new.version):
        return f"torch {old.version.torch}, now {new.version.torch}"
    if old.cell != new.cell:
        return f"another case had this id: {exact_figures.first_difference(old.cell, new.cell)}"
    if old.data and new.data and old.data != new.data:
        return "different data sets, by their digests"
    return ""


def release(version: Version) -> str:
    """Torch's release without its build: ``2.13.0`` of ``2.13.0+cpu``."""
    return version.torch.split("+")[0]


def _other_cpu(before: Snapshot, after: Snapshot) -> str:
    """The differences in what chooses kernels; empty: none, or unknown."""
    for key, what in (("cpu", "another CPU"), ("kernels", "other kernels of torch")):
        both = before.machine.get(key), after.machine.get(key)
        if None not in both and both[0] != both[1]:
            return what
    return ""


def _other_nodes(before: Snapshot, after: Snapshot) -> str:
    """Whether ranks were on other nodes; empty: they were not."""
    one, other = (of.hardware.partition(", as ")[2] for of in (before, after))
    return "ranks on other nodes" if one != other else ""


def _pairing(old: Entry, new: Entry, known: set[str], others: tuple[str, str]) -> Pairing:
    changes, both = [], (old.verdict, new.verdict)
    if old.verdict != new.verdict:
        word = exact_figures.word(exact_figures.VERDICT, *both)
        changes.append(FigureChange(new.id, exact_figures.VERDICT, *both, word))
    if UNDECIDED & {*both}:
        return Pairing(old, new, tuple(changes), 1)
    return Pairing(old, new, (*changes, *_changes(old, new, known, others)), len(new.figures) + 1)


def _changes(
    old: Entry, new: Entry, known: set[str], others: tuple[str, str]
) -> Iterator[FigureChange]:
    cpu, nodes = others
    if old.figures == new.figures:
        return
    depths = [entry.figures.get(exact_figures.DEPTH) for entry in (old, new)]
    told = None not in depths and depths[0] != depths[1]
    for name in sorted({*old.figures, *new.figures} & known):
        both = name in old.figures and name in new.figures
        if told and not both and name != exact_figures.DEPTH:
            continue  # what only one depth has: that the depth differs says it all
        was, now = old.figures.get(name), new.figures.get(name)
        if both and was == now and type(was) is type(now):
            continue
        word: exact_figures.Word = "changed"
        detail = "is gone" if name in old.figures else "is new"
        if both:
            word, detail = exact_figures.word(name, was, now), ""
            if name in old.deep and name in new.deep:
                detail = exact_figures.first_difference(old.deep[name], new.deep[name])
        unlike = ""
        if name in exact_figures.OF_ONE_CPU:
            same = old.version.torch == new.version.torch
            unlike = cpu if same else "another build of torch"
        elif name in exact_figures.OF_ONE_PYTHON:
            unlike = nodes if old.version.python == new.version.python else "another Python"
        yield FigureChange(new.id, name, was, now, word, detail, unlike)


def _notes(before: Snapshot, after: Snapshot, pairs: Sequence[Pairing]) -> Iterator[str]:
    if before.hardware != after.hardware:
        yield f"other hardware: {before.hardware}; now {after.hardware}"
    if cpu := _other_cpu(before, after):
        hang_on_it = ", ".join(sorted(exact_figures.OF_ONE_CPU))
        yield f"{cpu}: {hang_on_it} are shown where they differ, not judged"
    for name in ("suite", "torch", "python", "commit"):
        was, now = (
            ", ".join(dict.fromkeys(str(getattr(v, name)) or "unknown" for v in snapshot.versions))
            for snapshot in (before, after)
        )
        if was != now:
            yield f"other {name}: {was}; now {now}"
    if before.keys and after.keys:
        for key, what in (("scenarios", "planned cases"), ("data", "data sets")):
            one, other = ({str(keys.get(key)) for keys in s.keys} for s in (before, after))
            if not one & other:
                yield f"the runs had different {what}: the cases of both are compared"
    # A narrow run lacks what its cases do not measure: only what both ran can lose a figure.
    known, seen = (
        {name for pair in pairs if pair.decided for name in getattr(pair, side).figures}
        for side in ("before", "after")
    )
    for names, when in ((seen - known, "only now"), (known - seen, "no longer")):
        if names:
            yield f"figures that are recorded {when}: {some(sorted(names), NAMED)}"


def reasons(apart: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    groups = grouped((why, name) for name, why in apart.items())
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
