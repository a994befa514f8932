"""Timeouts of tests in seconds in which they could have run, instead of wall-clock seconds.

On a busy machine a sound test takes minutes.  Seconds in which a process of the test waited for a
core therefore do not count, up to ``MOST`` times the timeout: beyond that a test that computes
endlessly ends as well.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

#: Wall-clock seconds between two looks, and the most that a test takes in multiples of its timeout.
TICK, MOST = 20.0, 10.0


def waited_for_a_core(pid: int | None = None) -> dict[int, float]:
    """Seconds that each thread of the process (this one) and of its descendants was runnable and
    did not run.
    """
    found: dict[int, float] = {}
    waiting = [os.getpid() if pid is None else pid]
    while waiting:
        try:
            tasks = [*Path(f"/proc/{waiting.pop()}/task").iterdir()]
        except OSError:
            continue  # it has ended
        for task in tasks:
            try:
                waiting += map(int, (task / "children").read_text().split())
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
            except (OSError, IndexError):
                continue  # it has ended, or the kernel keeps no such statistics
    return found


class Clock:
    """Counts the seconds in which a process tree could run."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        waited: Callable[[], dict[int, float]] = waited_for_a_core,
    ) -> None:
        self._now, self._waited = now, waited
        self._began = self._looked = now()
        self._before: dict[int, float] = waited()
        self._spent = 0.0

    def look(self) -> float:
        """Seconds that count so far; to be called every ``TICK`` seconds."""
        now, waited = self._now(), self._waited()
        lost = sum(max(0.0, s - self._before.get(thread, 0.0)) for thread, s in waited.items())
        self._spent += max(0.0, now - self._looked - lost)
        self._looked, self._before = now, waited
        return max(self._spent, (now - self._began) / MOST)


def set_timer(timeout: float, at_end: Callable[[], None]) -> Callable[[], None]:
    """Call ``at_end`` in the main thread when ``timeout`` seconds that count are over; returns what
    cancels it.
    """
    clock = Clock()

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def look(*_: object) -> None:
        if (left := timeout - clock.look()) <= 0:
            at_end()
        else:
            signal.setitimer(signal.ITIMER_REAL, max(0.05, min(TICK, left)))

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(TICK, timeout))
    return cancel


def is_possible() -> bool:
    """Signals reach Python in the main thread only."""
    return threading.current_thread() is threading.main_thread()
