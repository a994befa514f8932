"""Many cases, some at a time: keeps ``jobs`` leaders busy and hands their ends out as they come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.launch.fork_server import ForkServer, ForkServerError

#: A fork server that dies is replaced this often in one run, with the loss of its leaders.
RESTARTS = 3

_LONGEST_POLL = 1.0

Item = tuple[str, dict[str, Any], float]


@dataclass(frozen=True)
class Ended:
    """The end of one item.

    Either ``exit_code`` or ``signal`` is set, unless the fork server died with the leader
    (neither).
    ``timed_out``: the pool ended it at its deadline.  ``output`` is the tail of what the leader
    itself printed (a traceback, if its task raised); ``seconds`` are wall-clock, from fork to end.
    """

    key: str
    payload: dict[str, Any]
    exit_code: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    output: str


@dataclass
class _Running:
    key: str
    payload: dict[str, Any]
    began: float
    deadline: float
    timed_out: bool = False


class Pool:
    """Runs tasks in leaders forked from one fork server.

    A context manager: leaving it, also by Ctrl-C, ends everything that it started.  ``preload``
    names modules that leaders should find imported.
    """

    def __init__(self, jobs: int, preload: Sequence[str] = ()) -> None:
        if jobs < 1:
            raise ValueError(f"a pool needs at least 1 job, not {jobs}")
        self._jobs = jobs
        self._preload = list(preload)
        self._fork_server = ForkServer(self._preload)

    def __enter__(self) -> Pool:
        self._fork_server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._fork_server.close()

    @property
    def fork_server(self) -> ForkServer:
        """The fork server that leaders are forked from at the moment."""
        return self._fork_server

    def run(self, task: str, items: Iterable[Item]) -> Generator[Ended, None, None]:
        """Run ``task(payload)`` for each ``(key, payload, deadline in seconds)``; yield the ends.

        ``task`` is ``package.module:function``.  ``items`` is drawn from only when a leader can
        start, so that it may stop at will.  If the caller stops early, running leaders are killed.
        """
        module = task.partition(":")[0]
        if module not in self._preload:
            self._preload.append(module)
            self._fork_server.preload(module)
        self._fork_server.wait_ready()  # so that its imports cost no case any time
        running: dict[int, _Running] = {}
        rest = iter(items)
        restarts, exhausted = 0, False
        try:
            while not exhausted or running:
                if not exhausted and len(running) < self._jobs:
                    item = next(rest, None)
                    exhausted = item is None
                    if item is not None:
                        self._start(task, item, running)
                    continue
                try:
                    found = self._advance(running)
                except ForkServerError as error:
                    restarts += 1
                    if restarts > RESTARTS:
                        raise
                    found = [_lost(item, str(error)) for item in running.values()]
                    running.clear()
                    self._restart()
                yield from found
        finally:
            self._kill(running)

    def _start(self, task: str, item: Item, running: dict[int, _Running]) -> None:
        key, payload, deadline_s = item
        now = time.monotonic()
        try:
            ticket = self._fork_server.submit(task, payload)
        except ForkServerError:
            ticket = 0  # it died while idle: the next look at it tells, and this item is lost
        running[ticket] = _Running(key, payload, now, now + deadline_s)

    def _advance(self, running: dict[int, _Running]) -> list[Ended]:
        """Wait for an end or a deadline, and deal with it."""
        now = time.monotonic()
        for ticket, item in running.items():
            if now >= item.deadline and not item.timed_out:
                item.timed_out = True
                self._fork_server.kill(ticket)
        due = min((r.deadline for r in running.values() if not r.timed_out), default=now + 1)
        found = []
        for ended in self._fork_server.poll(min(_LONGEST_POLL, max(0.0, due - now))):
            item = running.pop(ended.ticket)
            found.append(
                Ended(
                    item.key,
                    item.payload,
                    ended.exit_code,
                    ended.signal,
                    item.timed_out and ended.exit_code is None,
                    ended.seconds,
                    ended.output,
                )
            )
        return found

    def _kill(self, running: dict[int, _Running]) -> None:
        """End what still runs when the caller stops early; a dead fork server has done so."""
        deadline = time.monotonic() + 5.0
        with contextlib.suppress(ForkServerError):
            for ticket in running:
                self._fork_server.kill(ticket)
            while running and time.monotonic() < deadline:
                for ended in self._fork_server.poll(0.1):
                    running.pop(ended.ticket, None)

    def _restart(self) -> None:
        self._fork_server.close()
        self._fork_server = ForkServer(self._preload)
        self._fork_server.__enter__()
        self._fork_server.wait_ready()


def _lost(item: _Running, why: str) -> Ended:
    seconds = time.monotonic() - item.began
    return Ended(item.key, item.payload, None, None, False, seconds, why)
