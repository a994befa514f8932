"""The parent of all cases: hands each to a leader process and collects the results as they end.

In go cases; out come, for each as it ends, its result and its account.  ``docs/architecture.md``
lists the files through which one case can be followed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.backends import BACKENDS
from shardproof.case import Case
from shardproof.cases import kinds, room
from shardproof.cases.leader import CaseTask, leaves_no_trace, run_case
from shardproof.cases.verdict import decide_case
from shardproof.checks.results import CaseResult
from shardproof.contract import Options
from shardproof.evidence.account import Account, LeaderEnd
from shardproof.launch.kept_ranks import Kept
from shardproof.launch.nodes import Nodes
from shardproof.launch.pool import Pool, TaskEnd
from shardproof.launch.rank_process import LAST_RESORT
from shardproof.launch.ranks import Forked, RankHost
from shardproof.launch.workspace import ROOMY_BYTES, Workspace
from shardproof.registry import declaration, preflight
from shardproof.registry.stand_ins import needed

#: Called with each result as it ends.
OnResult = Callable[[CaseResult], None]
#: Called before that, also with its account (:class:`shardproof.evidence.account.Account` as JSON).
OnAccount = Callable[[CaseResult, dict[str, Any]], None]
#: Wall-clock seconds that a leader gets to train the oracle and to judge: a last resort, like that
#: of its ranks, on which no verdict of a system hangs.
JUDGING_SECONDS = 600.0


class Judged(NamedTuple):
    """A case, its result and its account as JSON."""

    case: Case
    result: CaseResult
    account: dict[str, Any]


#: Judges cases, some at a time, and yields each as it ends.  The next is drawn only when there is
#: room for it; closed early, what runs is ended.
Judge = Callable[[Iterable[Case]], Generator[Judged, None, None]]


@dataclass(frozen=True)
class Course:
    """When cases start: no more once ``stop_after`` seconds are over or ``enough`` says so;
    ``on_start`` gets each.
    """

    stop_after: float | None = None
    enough: Callable[[], bool] = lambda: False
    on_start: Callable[[Case], None] = lambda case: None


#: All cases are started.
WHOLE = Course()


class CaseHost(ABC):
    """Machines that judge cases in place of this one's leaders."""

    @property
    @abstractmethod
    def places(self) -> int:
        """Cases at once."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Their entry in ``run.json``."""

    @abstractmethod
    def judge(self, cases: Iterable[Case]) -> Generator[Judged, None, None]:
        """Judge them; a :data:`Judge`."""


class Session:
    """Leaders and cached oracles for any number of runs; a context manager.

    ``nodes``: where ranks that are processes run, if not on this machine's own.
    """

    def __init__(self, jobs: int, nodes: Nodes | None = None) -> None:
        self._pool, self._jobs = Pool(jobs, tasks=(run_case,)), jobs
        self._disk = Workspace(Path(tempfile.gettempdir()))
        self._made = 0
        self._nodes = nodes
        self._over_mpi = False

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            stack.enter_context(self._pool)
            self._pool.fork_server.preload("shardproof.cases.preloaded")
            self._oracles = (
                self._pool.folder / "oracles",
                stack.enter_context(self._disk) / "oracles",
            )
            for folder in self._oracles:
                folder.mkdir(mode=0o700)
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def _cache(self) -> Path:
        """Where an oracle is kept for other cases: on disk where memory is short."""
        near, on_disk = self._oracles
        return near if shutil.disk_usage(near).free >= ROOMY_BYTES else on_disk

    def run(
        self,
        cases: Sequence[Case],
        on_result: OnResult,
        on_account: OnAccount | None = None,
        course: Course = WHOLE,
    ) -> tuple[list[CaseResult], list[Case]]:
        """As :func:`run_cases`.

        :raises MachineError: work folders have no room for them.
        """
        room.require(cases, self._jobs)
        return run_cases(cases, 1, on_result, on_account, course, judge=self.judge)

    def judge(self, cases: Iterable[Case]) -> Generator[Judged, None, None]:
        """Judge them in leaders of this machine; a :data:`Judge`."""

        def items() -> Iterator[tuple[str, CaseTask, float]]:
            for case in cases:
                self._made += 1
                workdir = self._pool.folder / f"case{self._made}"
                seconds = 2 * LAST_RESORT * case.deadline + JUDGING_SECONDS
                yield case.id, CaseTask(case, workdir, self._cache, self._host(case)), seconds

        # The pool calls run_case(task) (cases/leader.py) in another process.  What that
        # returned is end.value; an end without a value is a case that broke its judge.
        with closing(self._pool.run(run_case, items(), _leaders_of)) as ends:
            for end in ends:
                shutil.rmtree(end.payload.workdir, ignore_errors=True)
                yield Judged(end.payload.case, *_result_of(end))

    def _host(self, case: Case) -> RankHost:
        """The place where its ranks run. Those of a planted fault, or of a user's own system, serve
        no other case, nor do those that MPI leaves with unreceived messages.
        """
        backend = BACKENDS[case.backend]
        if self._nodes is not None and (needed(case) or not backend.threads):
            return self._nodes.host()
        if case.skip or not leaves_no_trace(case):
            return Forked()
        if backend.mpirun and not self._over_mpi:
            self._over_mpi = True
            self._pool.fork_server.preload("shardproof.launch.mpi.preloaded")
        if backend.mpirun and kinds.of(case.workload).parts_ranks(case):
            return Forked()
        keeps = case.implementation.startswith(("reference/", "pytorch/"))
        return Kept(self._pool.folder) if keeps else Forked()

    def check(self, implementation: str, options: Options) -> None:
        """Raise :class:`SelectionError` if a user's own implementation cannot be loaded, or refuses
        ``options``, which may name things of a user's own as well.
        """
        preflight.check([implementation], self._pool)
        if options:
            preflight.check_options(implementation, options, self._pool)

    def with_found_traits(self, cases: Sequence[Case]) -> list[Case]:
        """``cases`` with the traits of a user's own models; see ``registry.preflight``."""
        return preflight.with_found_traits(cases, self._pool)

    def places(self, implementation: str, options: Options) -> declaration.Places:
        """Where it runs by what it declares under ``options``; nowhere if it cannot be asked."""
        items = [("places", (implementation, options), JUDGING_SECONDS)]
        with closing(self._pool.run(declaration.places, items)) as (end,):
            found: declaration.Places = end.value or ((), (), False, False)
        return found


def _leaders_of(task: CaseTask) -> str | None:
    """The group of leaders that may judge the case; ``None``: it has one to itself.

    Leaders that keep the ranks of an ``mpirun`` are apart, so that few of them are started.
    """
    case = task.case
    if not leaves_no_trace(case):
        return None
    keeps_mpi = isinstance(task.host, Kept) and BACKENDS[case.backend].mpirun
    return f"{case.backend} of {case.world}" if keeps_mpi else ""


def run_cases(
    cases: Sequence[Case],
    jobs: int,
    on_result: OnResult,
    on_account: OnAccount | None = None,
    course: Course = WHOLE,
    nodes: Nodes | None = None,
    judge: Judge | None = None,
) -> tuple[list[CaseResult], list[Case]]:
    """Run ``cases``; ``on_account``, then ``on_result`` see each result as it ends.

    ``jobs``, ``nodes``: as of a :class:`Session`; ``judge``: who judges them if not a session.  A
    case that the judge itself failed to judge (its process was killed, or memory or descriptors
    were exhausted) is run once more, after all others.  Returns the results and the cases that were
    left out.
    """
    if judge is None:
        with Session(jobs, nodes) as session:
            return session.run(cases, on_result, on_account, course)
    results: list[CaseResult] = []
    again: list[Case] = []
    if len({case.id for case in cases}) != len(cases):
        raise ValueError("two cases have the same id")
    started: set[str] = set()
    begin = time.monotonic()

    def starting(cases: Sequence[Case]) -> Iterator[Case]:
        for case in cases:
            spent, most = time.monotonic() - begin, course.stop_after
            if cases is not again and ((most is not None and spent > most) or course.enough()):
                return
            started.add(case.id)
            course.on_start(case)
            yield case

    # Closed by hand: an error in a callback must end the running leaders now, not some day.
    for these in (cases, again):
        with closing(judge(starting(these))) as judged:
            for case, result, account in judged:
                if these is not again and (account["leader"] or account["fault"]):
                    again.append(case)
                    continue
                results.append(result)
                if on_account is not None:
                    on_account(result, account)
                on_result(result)
    return results, [case for case in cases if case.id not in started]


def _result_of(end: TaskEnd[CaseTask]) -> tuple[CaseResult, dict[str, Any]]:
    """The result of a case and its account: the leader's, or those of a leader that died."""
    if end.value is None:
        how = end.exit_code, end.signal, end.timed_out, end.seconds, end.output
        return broken(end.payload.case, LeaderEnd(*how))
    result, account = CaseResult.from_dict(end.value["result"]), end.value["account"]
    result.seconds = end.seconds
    return result, account


def broken(case: Case, ended: LeaderEnd) -> tuple[CaseResult, dict[str, Any]]:
    """The result and the account of a case whose judging process left none."""
    left = Account(case, leader=ended)
    result = decide_case(left)
    result.seconds = ended.seconds
    return result, left.to_dict()
