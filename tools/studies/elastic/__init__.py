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
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from shardproof import verdicts
from shardproof.commands import options
from shardproof.commands.console import echo
from shardproof.commands.supervision import Interrupts
from shardproof.errors import Problem, SelectionError, nearest
from shardproof.launch.process_control import cores
from shardproof.table import Table
from tools.studies.elastic.agents import Agents, Stuck
from tools.studies.elastic.history import HISTORIES, History
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
    "wakes": "agent {} continues",
}


def named(names: Sequence[str]) -> list[History]:
    """The named histories, or all.

    :raises SelectionError: there is none of that name.
    """
    known = {history.name: history for history in HISTORIES}
    for name in names:
        if name not in known:
            remedy = nearest(name, known, "histories")
            raise SelectionError(Problem("--history: no such history", remedy, name))
    return [known[name] for name in dict.fromkeys(names)] or [*HISTORIES]


def run(histories: Sequence[History], runs: int, folder: Path | None) -> tuple[str, int]:
    """Play every history ``runs`` times; return the page and the exit code.

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
                echo(f"{history.name} {number + 1}/{runs}, {seconds[-1]:.0f} s: {said}", err=True)
            row, problems = _row(history, ends, max(seconds))
            rows.append(row)
            wrong += [f"- {history.name}: {problem}" for problem in problems]
    about = (
        f"torch {version('torch')}, Python {platform.python_version()}, {cores()} cores, gloo, "
        "`torchrun --nnodes=1:4`, fp64."
    )
    page = [about, "", Table("", _HEADINGS, rows).markdown(), *wrong]
    return "\n".join(page), verdicts.BROKEN if wrong else verdicts.HELD


def _once(history: History, folder: Path) -> Judged:
    try:
        with Agents(history, folder) as agents:
            agents.play()
    except Stuck as error:
        return Judged([str(error)])
    return judge(history, folder)


def _row(
    history: History, ends: Sequence[Judged], seconds: float
) -> tuple[tuple[str, ...], list[str]]:
    """The table row of a history, and the problems of its runs."""
    problems, bits = [problem for end in ends for problem in end.problems], "-"
    if not problems:
        problems = [*filter(None, (differs_in(ends[0], end) for end in ends))][:1]
        bits = "one run" if len(ends) == 1 else "differ" if problems else "equal"
    last = ends[-1]
    happens = "; ".join(
        f"step {e.step} ({e.at}): {_WORDS[e.what].format(e.member)}" for e in history.events
    )
    row = (
        f"{history.name}: batch {history.batch}, {history.optimizer.name}, "
        f"{history.workload.name}; {happens}",
        ", ".join(str(len(members)) for members in last.members) or "-",
        str(len(ends)),
        str(last.generations),
        str(len(last.refusals)),
        str(sum(end.compared for end in ends)),
        f"{max(end.worst for end in ends):.1e}",
        bits,
        f"{seconds:.0f}",
        "fail" if problems else "pass",
    )
    return row, problems


def command(
    history: Annotated[
        list[str] | None,
        typer.Option("--history", metavar="H", help="only this one; repeatable [all]"),
    ] = None,
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", min=1, max=100, help="of each history")
    ] = 2,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records",
            metavar="FOLDER",
            help="keep what ranks and agents wrote",
            parser=options.named,
        ),
    ] = None,
    out: Annotated[Path | None, options.output("--out", "write the table here, too")] = None,
) -> int:
    """Train `reference/elastic` under `torchrun --nnodes=1:4`, and kill workers and agents.

    Real agents on this machine, one a member, meet by c10d and train over gloo. A worker, or an
    agent and its worker, is killed by SIGKILL at a place that a rank announces, and members join.
    torchrun starts all workers anew; they load the last checkpoint. Losses, parameters, optimizer
    state and buffers must be those of one process that is told the same members, to 1e-12 in fp64;
    each sample is trained on once; all runs of a history have equal bits. In `split` and `frozen`
    an agent alone is killed or stopped: its worker and a new group have one folder, and the later
    save must be refused.

    \b
    histories: worker, agent, both, late, split, frozen
    python -m tools.studies elastic --history both --runs 1
    python -m tools.studies elastic --records elastic --out elastic.md

    A run takes half a minute to a minute. Exit codes: 0 all hold, 1 one does not, or agents did
    something else than its history asks for, 2 bad input.
    """
    chosen = named(history or ())
    with Interrupts():
        page, code = run(chosen, runs, records)
    echo(page)
    if out is not None:
        options.write(out, page + "\n")
    return code
