"""Whether ranks stand still, and how much each has computed: what ends a case that does not end.

Time is no evidence: on a busy machine a sound system takes minutes.  What counts is what ranks do.
They *stand still* if none ends, enters or leaves a call, and none computes: each is stopped, waits
inside a call, or sleeps.  A rank that computes is not hung, but it has a budget of CPU seconds.

All of it is sampled by :meth:`Watchdog.look`.  Looks are counted, not seconds: on a machine so busy
that ranks are not let run, the looks come late as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.backends import Backend, heartbeat
from shardproof.launch import process_control
from shardproof.launch.diagnosis import RankProcess

#: Seconds between two looks at ranks that are let run.
TICK_SECONDS = 0.05
#: Looks (10 s) after which ranks that all wait inside calls, or are stopped, stand still.
WAITING_LOOKS = 200
#: Looks (a second) at ranks that wait, after which what they have noted is compared.
DESYNC_LOOKS = 20
#: Looks (2 s) by which the end of ranks that stand still, told in a sentence, may come later.
LATE_LOOKS = 40
#: More of a core than this, and a rank computes.  With 50 busy processes a core it still has more.
_IDLE_SHARE = 0.02


def most_idle_looks(asleep_s: float) -> int:
    """The number of looks at stuck ranks after which they are ended.

    ``asleep_s``: seconds after which ranks that sleep outside of calls stand still.
    """
    return max(WAITING_LOOKS, int(asleep_s / TICK_SECONDS)) + LATE_LOOKS


@dataclass
class _Rank:
    """The observed activity of one rank; CPU in seconds."""

    state: int = heartbeat.NEW
    #: The kernel's number of its thread, where ranks are threads; 0: it has not begun.
    thread: int = 0
    cpu: float = 0.0
    #: Outside of calls: what a backend burns while it waits is no work.
    spent: float = 0.0
    cpu_at_event: float = 0.0
    #: Looks since the last event at which it ran, or would have if it had been let.
    runnable: int = 0
    waits: bool = False
    stopped: bool = False


class Watchdog:
    """Samples ranks whose heartbeats are in the file ``beats``."""

    def __init__(self, beats: Path, world: int, backend: Backend) -> None:
        self._beats, self._backend = beats, backend
        self._ranks = [_Rank() for _ in range(world)]
        self._events: list[tuple[int, int, int]] = []
        self._alive: list[_Rank] = []
        self._pids: set[int] = set()
        #: CPU seconds of what ranks have started, when last asked.
        self._below = 0.0
        self._looks = 0
        #: Looks since the suite made a fault at which no rank could go on: none ran, or would have
        #: if it had been let.  However busy the machine, a case needs no more of them.
        self.idle_looks = 0

    def begin(self, alive: Sequence[RankProcess]) -> None:
        """The earlier computation of the processes does not count for these ranks."""
        for pid, rank in ((process.pid, rank) for process in alive for rank in process.ranks):
            _, self._ranks[rank].cpu = process_control.activity_of(pid)
        self.restart()

    def look(self, alive: Sequence[RankProcess]) -> None:
        """Take one sample of the living processes; 20 a second are asked for."""
        beats = heartbeat.read(self._beats)
        self._alive, none_runs = [], True
        self._pids = {process.pid for process in alive}
        for process, rank in ((one, rank) for one in alive for rank in one.ranks):
            beat, seen = beats[rank], self._ranks[rank]
            seen.state = beat.state
            if self._backend.threads and beat.state >= heartbeat.DONE:
                continue  # its thread has ended, its process has not
            self._alive.append(seen)
            # Until a rank that is a thread has begun, its process is looked at.
            thread = beat.native if self._backend.threads else 0
            if thread != seen.thread:
                seen.thread, seen.cpu = thread, 0.0
            letter, cpu = process_control.activity_of(process.pid, thread)
            waited, seen.waits = seen.waits, beat.waiting
            if not (waited and seen.waits):
                seen.spent += max(0.0, cpu - seen.cpu)
            seen.cpu = cpu
            seen.stopped = letter in "Tt" or process.is_paused
            runs = letter in "RD" and not process.is_paused
            seen.runnable += runs
            none_runs &= not runs or (seen.waits and self._backend.polls)
        events = [beat.event for beat in beats]
        if events != self._events:
            self._events = events
            self.restart()
        self._looks += 1
        self.idle_looks += none_runs and any(beat.injected for beat in beats)

    @property
    def failed(self) -> bool:
        """Whether a rank has said that it failed."""
        return any(rank.state == heartbeat.FAILED for rank in self._ranks)

    @property
    def parting(self) -> bool:
        """Whether a rank has returned and gives its peers time: its end wakes a rank that waits for
        it.
        """
        return any(rank.state == heartbeat.RETURNED for rank in self._ranks)

    @property
    def spent(self) -> list[float]:
        """CPU seconds that each rank has computed outside of calls."""
        return [rank.spent for rank in self._ranks]

    def stand_still(self, asleep_looks: int) -> bool:
        """Whether nothing happens any more, and nothing will.

        ``asleep_looks``: looks after which ranks that sleep outside of any call stand still too.
        """
        few = min(WAITING_LOOKS, asleep_looks)
        if self._looks < few or not self._alive:
            return False
        if all(rank.stopped or (rank.waits and self._is_idle(rank)) for rank in self._alive):
            return True
        if self._looks < asleep_looks:
            return False
        # A rank may wait for a compiler that it has started.
        before, self._below = self._below, sum(map(process_control.spent_below, self._pids))
        if self.idle and self._below == before:
            return True
        self.restart()
        return False

    @property
    def silence(self) -> int:
        """Looks since a rank has last ended, entered or left a call."""
        return self._looks

    @property
    def idle(self) -> bool:
        """Whether no rank computes, or is in a call that may burn CPU while it waits."""
        return all(rank.stopped or self._is_idle(rank) for rank in self._alive)

    def _is_idle(self, rank: _Rank) -> bool:
        if rank.waits and self._backend.polls:
            return True
        most = _IDLE_SHARE * self._looks * TICK_SECONDS
        return rank.runnable <= self._looks / 2 and rank.cpu - rank.cpu_at_event <= most

    def restart(self) -> None:
        """Something happened: what was seen before says nothing about a standstill."""
        self._looks = 0
        for rank in self._ranks:
            rank.cpu_at_event, rank.runnable = rank.cpu, 0
