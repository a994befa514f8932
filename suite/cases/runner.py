"""Cases in, results out: plans nothing itself, but keeps every core busy and loses no result.

Each case runs in a leader process forked from the fork server; results are written as they end,
so that a kill loses at most the running cases.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shardproof.case import Case
from shardproof.cases.kills import Kill, judge_kill, pair
from shardproof.files import write_whole
from shardproof.launch.pool import Pool
from shardproof.registry import preflight

Result = dict[str, Any]
#: Called with each result and its account (:class:`shardproof.evidence.account.Account` as JSON).
OnAccount = Callable[[Result, dict[str, Any]], None]
#: Seconds that a leader gets on top of its ranks' deadline to train the oracle and to judge.
JUDGING_SECONDS = 60.0


class Session:
    """Leaders, a work folder and cached oracles for any number of runs; a context manager."""

    def __init__(self, jobs: int) -> None:
        self._space = Workspace()
        self._pool = Pool(jobs, preload=("shardproof.cases.leader",))
        self._made = 0

    def __enter__(self) -> Session:
        self._path = self._space.__enter__()
        (self._path / "oracles").mkdir()
        try:
            self._pool.__enter__()
        except BaseException:
            self._space.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._pool.__exit__()
        finally:
            self._space.__exit__()

    def run(
        self,
        cases: Sequence[Case],
        on_result: Callable[[Result], None],
        stop_after: float | None = None,
        on_account: OnAccount | None = None,
    ) -> tuple[list[Result], list[Case]]:
        """As :func:`run_cases`."""
        results: list[Result] = []
        by_id = {case.id: case for case in cases}
        if len(by_id) != len(cases):
            raise ValueError("two cases share one id")
        started: set[str] = set()
        begin = time.monotonic()
        cache = str(self._path / "oracles")

        def payloads() -> Iterator[tuple[str, dict[str, Any], float]]:
            for case in cases:
                if stop_after is not None and time.monotonic() - begin > stop_after:
                    return
                started.add(case.id)
                self._made += 1
                workdir = self._path / f"case{self._made}"
                payload = {"case": case.to_dict(), "workdir": str(workdir), "cache": cache}
                yield case.id, payload, case.deadline + JUDGING_SECONDS

        # Closed by hand: an error in a callback must end the running leaders now, not some day.
        with closing(self._pool.run("shardproof.cases.runner:conduct", payloads())) as ends:
            for ended in ends:
                workdir = Path(ended.payload["workdir"])
                result, account = _collect(by_id[ended.key], workdir, ended)
                shutil.rmtree(workdir, ignore_errors=True)
                results.append(result)
                if on_account is not None:
                    on_account(result, account)
                on_result(result)
        return results, [case for case in cases if case.id not in started]

    def check(self, implementation: str) -> None:
        """Raise :class:`SelectionError` if it is a user's own and cannot be loaded."""
        preflight.check([implementation], self._pool)

    def axes(self, implementation: str, options: Mapping[str, Any]) -> list[str]:
        """The mesh axes that it claims under ``options``, asked in a leader; empty if it fails."""
        told = self._path / "axes.json"
        told.unlink(missing_ok=True)
        payload = {"name": implementation, "options": dict(options), "told": str(told)}
        item = ("axes", payload, JUDGING_SECONDS)
        with closing(self._pool.run("shardproof.cases.runner:tell_axes", [item])) as ends:
            for _ in ends:
                pass
        return list(json.loads(told.read_text())) if told.exists() else []


def run_cases(
    cases: Sequence[Case],
    jobs: int,
    on_result: Callable[[Result], None],
    stop_after: float | None = None,
    on_account: OnAccount | None = None,
) -> tuple[list[Result], list[Case]]:
    """Run ``cases``; ``on_account``, then ``on_result`` see each result as it ends.

    With ``stop_after`` (seconds) no further case is started once the time is used up.  Returns the
    results and the cases that were left out.
    """
    with Session(jobs) as session:
        return session.run(cases, on_result, stop_after, on_account)


def conduct(payload: dict[str, Any]) -> None:
    """Task of the leader: judge one case; its work folder then holds ``account.json`` and
    ``result.json``.
    """
    from shardproof.cases.leader import examine

    workdir = Path(payload["workdir"])
    workdir.mkdir(parents=True)
    case = Case.from_dict(payload["case"])
    account, result = examine(case, workdir, Path(payload["cache"]))
    # The result comes last: where it is, the account is whole.
    for name, data in (("account.json", account.to_dict()), ("result.json", result)):
        write_whole(workdir / name, json.dumps(data, default=str))


def tell_axes(payload: dict[str, Any]) -> None:
    """Task of the leader: write down which mesh axes an implementation claims."""
    from shardproof import registry

    axes = registry.load(payload["name"]).capabilities(payload["options"]).axes
    write_whole(Path(payload["told"]), json.dumps(axes))


def _collect(case: Case, workdir: Path, ended: Any) -> tuple[Result, dict[str, Any]]:
    """The result of a case and its account."""
    path = workdir / "result.json"
    if path.exists():
        result: Result = json.loads(path.read_text())
        account: dict[str, Any] = json.loads((workdir / "account.json").read_text())
    else:
        from shardproof.cases.verdict import decide
        from shardproof.evidence.account import Account

        told = ("exit_code", "signal", "timed_out", "seconds", "output")
        left = Account(case, leader={name: getattr(ended, name) for name in told})
        result, account = decide(left), left.to_dict()
    result["seconds"] = ended.seconds
    return result, account


class Workspace:
    """A temporary folder in memory where there is one; removed on every path.

    A runner that is killed cannot remove its own: the next one does, as the lock is then free.
    """

    def __enter__(self) -> Path:
        base = workspace_base()
        sweep(base)
        self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        # Locked before it bears its name: another runner's sweep must never find it free.
        fresh = self._path / f"{LOCK}.fresh"
        self._lock = fresh.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(self._path / LOCK)
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


PREFIX, LOCK = "shardproof-", ".lock"


def workspace_base() -> Path:
    """Where work folders are made: in memory, if that can be written."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def sweep(base: Path) -> list[Path]:
    """Remove work folders whose runner is dead; returns them."""
    removed = []
    for lock in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with lock.open() as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # in use, or another user's
        removed.append(lock.parent)
    return removed


def mutant_cases(mutants: Sequence[Any]) -> list[Case]:
    """Every parent's case once, before those of its mutants."""
    cases: list[Case] = []
    for item in (pair(mutant) for mutant in mutants):
        cases += [case for case in (item.parent, item.case) if case not in cases]
    return cases


def _in_turn(mutants: Sequence[Any]) -> list[Any]:
    """One mutant of each file after the other."""
    files: dict[str, list[Any]] = {}
    for mutant in mutants:
        files.setdefault(mutant.implementation.__module__, []).append(mutant)
    return [m for turn in itertools.zip_longest(*files.values()) for m in turn if m is not None]


def run_mutants(
    mutants: Sequence[Any],
    jobs: int,
    on_result: Callable[[Result], None],
    stop_after: float | None = None,
    on_account: OnAccount | None = None,
) -> list[Kill]:
    """Run every mutant beside its parent and say which were killed.

    Where time may run out (``stop_after``) every file of faults gets its turn.
    """
    pairs = [pair(mutant) for mutant in mutants]
    order = mutants if stop_after is None else _in_turn(mutants)
    results, _ = run_cases(mutant_cases(order), jobs, on_result, stop_after, on_account)
    by_id = {result["id"]: result for result in results}
    return [judge_kill(p, by_id.get(p.case.id), by_id.get(p.parent.id)) for p in pairs]
