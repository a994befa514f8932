"""Going on with a run: which cases are left, or failed, and which results stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardproof import verdicts
from shardproof.case import Case
from shardproof.checks.results import CaseResult
from shardproof.errors import Problem, SelectionError
from shardproof.runs.run_folder import read, read_plan


def planned(path: Path) -> list[Case]:
    """Every case that an invocation of the run in ``path`` was about to run, once."""
    cases = read_plan(path)
    if not cases:
        remedy = "run the scenarios without --resume, or name another run"
        plan = str(path / "planned.jsonl")
        raise SelectionError(Problem("the run has no planned cases", remedy, plan))
    return list(cases.values())


def split(
    path: Path, narrow: Callable[[list[Case]], list[Case]] | None, failed: bool
) -> tuple[list[Case], list[CaseResult]]:
    """The cases to run, and the results that stay as they are.

    ``narrow`` chooses among all that were planned (``None``: all of it).  ``failed``: run those
    that did not hold; otherwise those without a result.

    :raises SelectionError: nothing was planned, or nothing failed; whatever ``narrow`` raises.
    """
    run = read(path)
    cases = planned(path) if narrow is None else narrow(planned(path))
    # Without its record a case is not done.
    done = {r.id: r for r in run.cases if r.record is not None and (path / r.record).is_file()}
    if failed:
        bad = verdicts.RED | verdicts.OPEN - {verdicts.FLAKY}  # it fails no longer
        again = [c for c in cases if c.id in done and verdicts.kind(done[c.id].verdict) in bad]
        if not again:
            raise SelectionError(Problem("no case failed here", "nothing to run again", str(path)))
    else:
        again = [case for case in cases if case.id not in done]
    names = {case.id for case in again}
    return again, [result for name, result in done.items() if name not in names]
