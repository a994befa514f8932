"""Elastic groups as processes under torchrun: ``python -m tools.studies elastic``.

``reference/elastic`` is told who is there by nobody here: agents of torchrun find each other, start
workers, see them die and start all anew, which load the last checkpoint and go on.  A *history*
(``history.py``) says who joins and who is killed by signal; ``agents.py`` lets it happen,
``worker.py`` is what trains, ``judge.py`` compares with the oracle that is told the same members.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from shardproof import verdicts
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.launch.process_control import cores
from shardproof.table import Table
from tools.studies.elastic.agents import Agents, Stuck
from tools.studies.elastic.history import HISTORIES, Event, History
from tools.studies.elastic.judge import Judged, differs_in, judge

_HEADINGS = (
    *("history", "members of each step", "runs", "groups", "refused saves"),
    *("compared", "worst error", "bits of all runs", "seconds a run", "verdict"),
)
_WORDS = {
    "worker": "worker {} killed",
    "agent": "agent {0} and worker {0} killed",
    "joins": "{} joins",
    "splits": "agent {} alone killed",
    "freezes": "agent {} alone stopped",
    "wakes": "agent {} goes on",
}


def named(names: Sequence[str]) -> list[History]:
    """The histories of these names, or all.

    :raises SelectionError: there is none of that name.
    """
    known = {history.name: history for history in HISTORIES}
    for name in names:
        if name not in known:
            remedy = nearest(name, known, "histories")
            raise SelectionError(Problem("--history: no such history", remedy, name))
    return [known[name] for name in dict.fromkeys(names)] or [*HISTORIES]


def run(
    histories: Sequence[History],
    runs: int,
    folder: Path | None,
    tell: Callable[[str], object] = str,
) -> tuple[str, int]:
    """Play every history ``runs`` times; the page, and the exit code.

    ``folder``: keep what the ranks wrote there.

    :raises SelectionError: something is there already.
    """
    if folder is not None and (folder.is_file() or (folder.exists() and any(folder.iterdir()))):
        remedy = "name one that is new or empty"
        raise SelectionError(Problem("--records: something is there already", remedy, str(folder)))
    rows, wrong = [], list[str]()
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder)) as place:
        for history in histories:
            ends, seconds = list[Judged](), list[float]()
            for number in range(runs):
                began = time.monotonic()
                ends.append(_once(history, Path(place) / f"{history.name}-{number}"))
                seconds.append(time.monotonic() - began)
                said = "; ".join(ends[-1].problems) or f"worst error {ends[-1].worst:.1e}"
                tell(f"{history.name} {number + 1}/{runs}, {seconds[-1]:.0f} s: {said}")
            problems = [problem for end in ends for problem in end.problems]
            other = (
                "" if problems else next(filter(None, (differs_in(ends[0], e) for e in ends)), "")
            )
            rows.append(_row(history, ends, seconds, problems, other))
            wrong += [f"{history.name}: {problem}" for problem in [*problems, other] if problem]
    about = (
        f"torch {version('torch')}, Python {platform.python_version()}, {cores()} cores, gloo, "
        "`torchrun --nnodes=1:4`, fp64."
    )
    page = [about, "", Table("", _HEADINGS, rows).markdown(), *(f"- {line}" for line in wrong)]
    return "\n".join(page), verdicts.BROKEN if wrong else verdicts.HELD


def _once(history: History, folder: Path) -> Judged:
    try:
        with Agents(history, folder) as agents:
            agents.play()
    except Stuck as error:
        return Judged([str(error)])
    return judge(history, folder)


def _row(
    history: History,
    ends: Sequence[Judged],
    seconds: Sequence[float],
    problems: Sequence[str],
    other: str,
) -> tuple[str, ...]:
    last = ends[-1]
    bits = "one run" if len(ends) == 1 else "differ" if other else "equal"
    happens = "; ".join(f"step {e.step} ({e.at}): {_said(e)}" for e in history.events)
    return (
        f"{history.name}: batch {history.batch}, {history.optimizer.name}, "
        f"{history.workload.name}; {happens}",
        ", ".join(str(len(members)) for members in last.members) or "-",
        str(len(ends)),
        str(last.generations),
        str(len(last.refusals)),
        str(sum(end.compared for end in ends)),
        f"{max(end.worst for end in ends):.1e}",
        "-" if problems else bits,
        f"{max(seconds):.0f}",
        "fail" if problems or other else "pass",
    )


def _said(event: Event) -> str:
    return _WORDS[event.what].format(event.member)
