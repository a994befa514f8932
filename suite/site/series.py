"""A series of runs: a folder of baselines in the order in which they were added, and changes.

    results/history/0001-<run>.json
                    0002-<run>.json

Each file is a baseline, so `compare`, `gate` and `site` read it as well.  A run is added as one new
file; no file is written twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.compare import baseline
from shardproof.compare.compare import UNDECIDED, RunComparison, compare
from shardproof.compare.exact_figures import show
from shardproof.compare.snapshot import Entry, Snapshot, Version
from shardproof.errors import Problem, SelectionError
from shardproof.table import Mark, Table

_FILE = re.compile(r"(\d{4,})-[\w.-]+\.json")
_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)
#: Files of a folder that an error names.
_NAMED = 3
_MARKS: dict[str, Mark] = {
    **dict.fromkeys(("worse", "slower"), "bad"),
    **dict.fromkeys(("better", "faster"), "good"),
}


@dataclass(frozen=True)
class Move:
    """A verdict, figure or ratio that differs from the last run of the machine that has it.

    ``id`` and ``figure`` name it; ``before`` and ``after`` are its values as texts.  ``since`` is
    the version that last had the old one, ``at`` that of the first run with the new one, in the run
    number ``place`` of the series.
    """

    id: str
    figure: str
    word: str
    before: str
    after: str
    since: Version
    at: Version
    place: int

    @property
    def commits(self) -> str:
        """The commit at which it changed, and the one before, if another."""
        at, since = (version.commit or "unknown" for version in (self.at, self.since))
        return at if at == since else f"{at} (last at {since})"


def is_series(folder: Path) -> bool:
    """Whether ``folder`` holds a series, that is: baselines with numbers, and no run."""
    return folder.is_dir() and not (folder / "run.json").exists() and bool(_found(folder))


def _found(folder: Path) -> list[Path]:
    named = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return [p for _, p in sorted((int(name[1]), path) for name, path in named if name)]


def files(folder: Path) -> list[Path]:
    """The baselines of the series in ``folder``, in order.

    :raises SelectionError: no folder, or one that holds anything else.
    """
    if not folder.is_dir():
        remedy = "add a run to it: `shardproof history add RUN --series DIR`"
        raise SelectionError(Problem("this is no series of runs", remedy, str(folder)))
    found = _found(folder)
    if others := sorted(p.name for p in folder.iterdir() if p not in found and p.name[0] != "."):
        remedy = "name a new folder, or move these files out of it"
        what = f"holds files that are no part of a series: {', '.join(others[:_NAMED])}"
        raise SelectionError(Problem(what, remedy, file=str(folder)))
    return found


def read(folder: Path) -> list[Snapshot]:
    """The runs of the series in ``folder``.

    :raises SelectionError: as :func:`files`, it is empty, or one is damaged.
    """
    paths = files(folder)
    if not paths:
        remedy = "add a run to it: `shardproof history add RUN --series DIR`"
        raise SelectionError(Problem("the series has no runs", remedy, str(folder)))
    return [baseline.read(path) for path in paths]


def add(folder: Path, names: Sequence[str]) -> list[Path]:
    """Append the runs ``names``; the files that were written.

    All are read before the first is written.

    :raises SelectionError: a run that cannot be read, has no results or is in the series; or what
        :func:`files` refuses.
    """
    known = [baseline.read(path) for path in files(folder)] if folder.exists() else []
    new = [baseline.load(name) for name in names]
    for place, snapshot in enumerate(new):
        if not (snapshot.cases or snapshot.timed or snapshot.kills):
            remedy = "name a run that has results"
            raise SelectionError(Problem("the run has no results", remedy, names[place]))
        if any(_same(snapshot, one) for one in [*known, *new[:place]]):
            remedy = "name a run that is not in it; `shardproof history show` lists its runs"
            raise SelectionError(Problem("the run is in the series", remedy, names[place]))
    folder.mkdir(parents=True, exist_ok=True)
    return [_append(folder, snapshot) for snapshot in new]


def _same(one: Snapshot, other: Snapshot) -> bool:
    """Whether they are one run: a baseline keeps neither left-out cases nor their nested values."""
    first, second = (baseline.text(replace(each, left_out={})) for each in (one, other))
    return first == second


def _append(folder: Path, snapshot: Snapshot) -> Path:
    name = _UNSAFE.sub("-", snapshot.name).strip("-.")[:80] or "run"
    temporary = folder / f".{name}.{os.getpid()}.json"
    try:
        baseline.save(snapshot, temporary)
        while True:
            last = max((int(p.name.split("-")[0]) for p in _found(folder)), default=0)
            target = folder / f"{last + 1:04}-{name}.json"
            # A link fails where the name is taken, so that two writers lose nothing.
            try:
                os.link(temporary, target)
            except FileExistsError:
                continue
            return target
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------ what changed


def moves(runs: Sequence[Snapshot]) -> list[Move]:
    """All that changed from run to run of one machine, in the order of ``runs``."""
    return [move for place, comparison in steps(runs) for move in _moves(place, comparison)]


def steps(runs: Sequence[Snapshot]) -> list[tuple[int, RunComparison]]:
    """The number of each run that has an earlier one of its machine, compared with the last results
    before it: those of the newest run that has the result.
    """
    state: dict[str, Snapshot] = {}
    decided: dict[str, dict[str, Entry]] = {}
    found = []
    for place, run in enumerate(runs):
        before, known = state.get(run.hardware), decided.setdefault(run.hardware, {})
        if before is not None:
            found.append((place, compare(before, run)))
            if again := _recovered(before, run, known):
                found.append(
                    (place, compare(replace(before, cases=again, timed={}, kills={}), run))
                )
            run = replace(
                run,
                cases={**before.cases, **run.cases},
                timed={**before.timed, **run.timed},
                kills={**before.kills, **run.kills},
            )
        state[run.hardware] = run
        known |= {name: e for name, e in run.cases.items() if e.verdict not in UNDECIDED}
    return found


def _recovered(before: Snapshot, run: Snapshot, decided: Mapping[str, Entry]) -> dict[str, Entry]:
    """The last decided entries of cases that failed meanwhile: what failed has no figures, so only
    these tell whether figures of ``run`` changed.
    """
    return {
        name: decided[name]
        for name, entry in run.cases.items()
        if name in decided
        and entry.verdict not in UNDECIDED
        and name in before.cases
        and before.cases[name].verdict in UNDECIDED
    }


def _moves(place: int, comparison: RunComparison) -> Iterable[Move]:
    before, after = comparison.before, comparison.after
    was, now = before.results, after.results

    def move(name: str, figure: str, word: str, old: str, new: str) -> Move:
        since = was[name].version if name in was else before.versions[-1]
        at = now[name].version if name in now else after.versions[-1]
        return Move(name, figure, word, old, new, since, at, place)

    for one in comparison.changes:
        if one.exact:
            told = f" ({one.detail})" if one.detail else ""
            yield move(one.id, one.figure, one.word, show(one.before), show(one.after) + told)
    for time in comparison.times:
        if time.moved:
            ratio: dict[str, Any] = time.to_dict()
            old, new = (f"{ratio[side]['ratio']:.3f}" for side in ("reference", "now"))
            yield move(time.id, f"ratio: {ratio['ratio']}", time.verdict, old, new)
    # Another version of torch or of the suite makes figures incomparable, and verdicts telling.
    for name, why in comparison.apart.items():
        if was[name].verdict != now[name].verdict:
            new = f"{now[name].verdict} ({why})"
            yield move(name, "verdict", "changed", was[name].verdict, new)


def table(found: Sequence[Move], runs: Sequence[Snapshot]) -> Table:
    """A row for each move: what changed, from what to what, at which commit, in which run."""
    rows = [
        (one.word, one.id, one.figure, one.before, one.after, one.commits, runs[one.place].name)
        for one in found
    ]
    headings = ("change", "result", "figure", "before", "after", "changed at commit", "run")
    marks: list[Mark] = [_MARKS.get(one.word, "changed") for one in found]
    return Table("Changes", headings, rows, marks, row_header=1)
