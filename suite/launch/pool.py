"""Calls functions in processes of their own, some at a time, and yields their ends as they come."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from shardproof.files import read_fast_json
from shardproof.launch import process_control
from shardproof.launch.fork_server import ForkServer, ForkServerError, Task
from shardproof.launch.workspace import Workspace

#: A fork server that dies is replaced this often in one run, with the loss of its leaders.
RESTARTS = 3

_LONGEST_POLL = 1.0
#: What computes for a smaller share of the time stands still.
_LEAST_SHARE = 0.01

P = TypeVar("P")
#: A key of the caller's, what the task is called with, and its deadline in seconds.
Item = tuple[str, P, float]


@dataclass(frozen=True)
class TaskEnd(Generic[P]):
    """The end of one item.

    ``value`` is what the task returned, through JSON; ``None`` if it returned nothing or did not
    come to its end.  Either ``exit_code`` or ``signal`` is set, unless the fork server died with
    the leader (neither).  ``timed_out``: the pool ended it at its deadline.  ``output`` is the tail
    of what the leader itself printed (a traceback, if its task raised); ``seconds`` are wall-clock,
    since its leader took it.
    """

    key: str
    payload: P
    exit_code: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    output: str
    value: Any = None

    @property
    def why_no_value(self) -> str:
        """Why a task that returns a value left none, after "the measuring process"."""
        if self.timed_out:
            return "ran out of time"
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "exited without a result"


@dataclass
class _Running(Generic[P]):
    key: str
    payload: P
    value: Path
    began: float
    deadline: float
    timed_out: bool = False
    #: Where CPU seconds count: those between two looks, those left, and all at the last look.
    seconds: float = 0.0
    left: float = 0.0
    spent: float | None = None


class Pool:
    """Runs tasks in leaders forked from one fork server.

    A context manager: leaving it, also by Ctrl-C, ends everything that it started.  ``tasks`` are
    those that will be run: their modules are imported before the first leader starts.  ``folder``
    is a work folder that lives as long as the pool.
    """

    folder: Path

    def __init__(self, jobs: int, tasks: Sequence[Task[Any]] = ()) -> None:
        if jobs < 1:
            raise ValueError(f"a pool needs at least 1 job, not {jobs}")
        self._jobs = jobs
        self._preload = list(dict.fromkeys(task.__module__ for task in tasks))
        self.fork_server = ForkServer(self._preload)
        self._space = Workspace()
        self._numbers = itertools.count(1)

    def __enter__(self) -> Pool:
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(self._space)
            self.fork_server.__enter__()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.fork_server.close()
        finally:
            self._space.__exit__()

    def run(
        self,
        task: Task[P],
        items: Iterable[Item[P]],
        group: Callable[[P], str | None] = lambda payload: None,
        by_cpu: bool = False,
    ) -> Generator[TaskEnd[P], None, None]:
        """Run ``task(payload)`` for each ``(key, payload, deadline in seconds)``; yield the ends.

        ``task`` is a function of a module, which the leader imports by its name.  ``items`` is
        drawn from only when a leader can start, so that it may stop at will.  If the caller stops
        early, running leaders are killed.  ``group`` says of a payload that its task leaves the
        leader as it was, which may then do others of that group; ``None``: it may not.  ``by_cpu``:
        deadlines count CPU seconds, and what stands still for as long ends too.
        """
        if task.__module__ not in self._preload:
            self._preload.append(task.__module__)
            self.fork_server.preload(task.__module__)
        self.fork_server.wait_ready()  # so that its imports cost no case any time
        running: dict[int, _Running[P]] = {}
        rest = iter(items)
        restarts, exhausted = 0, False
        try:
            while not exhausted or running:
                if not exhausted and len(running) < self._jobs:
                    item = next(rest, None)
                    exhausted = item is None
                    if item is not None:
                        key, payload, seconds = item
                        value = self.folder / f"value{next(self._numbers)}.json"
                        ticket = self._submit(task, payload, value, group(payload))
                        now = time.monotonic()
                        running[ticket] = _Running(key, payload, value, now, now + seconds)
                        if by_cpu:
                            running[ticket].seconds = running[ticket].left = seconds
                            running[ticket].spent = self._spent()
                    continue
                try:
                    ends = self._advance(running)
                except ForkServerError as error:
                    restarts += 1
                    if restarts > RESTARTS:
                        raise
                    ends = [_lost(item, str(error)) for item in running.values()]
                    running.clear()
                    self._restart()
                yield from ends
        finally:
            self._kill(running.keys())
            running.clear()

    def _submit(self, task: Task[P], payload: P, value: Path, group: str | None) -> int:
        try:
            # A process that is forked from one with torch imported calls task(payload), and leaves
            # what it returns in the file.  For a case this goes on in cases/leader.py: run_case.
            return self.fork_server.submit(task, payload, value, group)
        except ForkServerError:
            # It died while idle: the next look at it raises, and this item is lost.
            return -next(self._numbers)

    def _advance(self, running: dict[int, _Running[P]]) -> list[TaskEnd[P]]:
        now = time.monotonic()
        for ticket, item in running.items():
            if now >= item.deadline and not item.timed_out and self._is_late(item):
                item.timed_out = True
                self.fork_server.kill(ticket)
        due = min((r.deadline for r in running.values() if not r.timed_out), default=now + 1)
        ends = []
        for leader in self.fork_server.poll(min(_LONGEST_POLL, max(0.0, due - now))):
            if leader.ticket not in running:
                continue
            item = running.pop(leader.ticket)
            how = leader.exit_code, leader.signal, item.timed_out and leader.exit_code is None
            value = _read_once(item.value)
            ends.append(TaskEnd(item.key, item.payload, *how, leader.seconds, leader.output, value))
        return ends

    def _is_late(self, item: _Running[P]) -> bool:
        """Whether an item at its deadline is to end: it has spent all its CPU seconds, or none of
        them since the last look.  On a busy machine they take longer.
        """
        if item.spent is None:
            return True
        spent = self._spent()
        used, item.spent = spent - item.spent, spent
        item.left -= max(0.0, used)
        item.deadline = time.monotonic() + item.seconds
        # Less than before: another task has ended, and its seconds with it.
        return item.left <= 0 or 0 <= used < _LEAST_SHARE * item.seconds

    def _spent(self) -> float:
        return process_control.spent_below(self.fork_server.pid)

    def _kill(self, tickets: Collection[int]) -> None:
        """End what still runs when the caller stops early; a dead fork server has done so."""
        left = set(tickets)
        deadline = time.monotonic() + 5.0
        with contextlib.suppress(ForkServerError):
            for ticket in left:
                self.fork_server.kill(ticket)
            while left and time.monotonic() < deadline:
                left -= {leader.ticket for leader in self.fork_server.poll(0.1)}

    def _restart(self) -> None:
        self.fork_server.close()
        self.fork_server = ForkServer(self._preload)
        self.fork_server.__enter__()
        self.fork_server.wait_ready()


def _read_once(path: Path) -> Any:
    """The value in the file, which is removed; ``None`` if there is no file."""
    if not path.exists():
        return None
    value = read_fast_json(path.read_bytes())
    path.unlink()
    return value


def _lost(item: _Running[P], why: str) -> TaskEnd[P]:
    seconds = time.monotonic() - item.began
    return TaskEnd(item.key, item.payload, None, None, False, seconds, why, _read_once(item.value))
