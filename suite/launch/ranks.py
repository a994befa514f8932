"""Hosts: where the ranks of a case run, and who owns their processes.

A host runs a launch and says how each rank ended.

===================  =====================================================================
:class:`Forked`      forks ranks for one launch: a process each, or threads of one process
``kept_ranks.Kept``  forks ranks once and lends them to one launch after the other
nodes of a wing      a keeper on each node forks ranks for one launch
left records         another launcher ran the ranks before; nothing is started here
===================  =====================================================================

Ranks are forked, so the calling process must not have native threads running (leaders come from the
fork server, which has none).

A :class:`Supervisor` watches the processes of any host.  Five things end a rank that does not end
itself: a standstill of all (``watchdog.py``), its budget of CPU seconds, a peer's failure (after a
grace period), its memory limit, and too much output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from shardproof.backends import heartbeat
from shardproof.launch import autopsy, process_control, stacks
from shardproof.launch.diagnosis import OVERDUE, Lost, RankProcess, diagnose
from shardproof.launch.informant import Informant
from shardproof.launch.mpi.mpirun import Mpirun
from shardproof.launch.outcome import RankOutcome, root_cause
from shardproof.launch.rank_process import RankLaunch, run_process
from shardproof.launch.watchdog import DESYNC_LOOKS, TICK_SECONDS, WAITING_LOOKS, Watchdog

__all__ = ["Forked", "NotLent", "ProcessHost", "RankHost", "RankOutcome", "root_cause"]

#: Seconds that ranks have to end after the first one failed: of standing still, or of CPU.
GRACE_SECONDS = 3.0
#: Bytes that a rank may print.
OUTPUT_LIMIT = 64 << 20

_POLL_SECONDS = 0.005


class NotLent(RuntimeError):
    """The host has no ranks for this launch, which is to fork its own."""


class RankHost(ABC):
    """Where the ranks of a case run."""

    #: Why ranks cannot run here a second time; empty: they can.
    cannot_again = ""

    @abstractmethod
    def run(self, launch: RankLaunch) -> list[RankOutcome]:
        """Run the program of ``launch`` on every rank; one outcome for each.

        Whatever a rank does, this returns, and leaves no process but those that the host keeps.
        """

    def informant(self, workdir: Path, seconds: float) -> Informant:
        """The process that imports a user's code and answers for it, as far from the judge as ranks
        are.
        """
        return Informant(workdir, seconds)

    def settle(self, held: bool) -> None:
        """End the ranks that were kept for other cases, unless this case ``held``."""


class ProcessHost(RankHost):
    """A host whose ranks are processes that this process watches and ends."""

    def run(self, launch: RankLaunch) -> list[RankOutcome]:
        """Run the launch on this host, or on forked ranks if it lends none."""
        with contextlib.suppress(NotLent):
            return Supervisor(self, launch).outcomes()
        return Forked().run(launch)

    @abstractmethod
    def start(self, launch: RankLaunch) -> list[RankProcess]:
        """Start the ranks of ``launch``, or lend them.

        :raises NotLent: there are none for this launch.
        """

    @abstractmethod
    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """Descriptors that become readable when one of them ends; empty: the system has none."""

    @abstractmethod
    def status(self, process: RankProcess) -> int | None:
        """The wait status of a process that has ended, or is done and kept; ``None``: not yet."""

    def lost(self, at_end: bool = False) -> Mapping[int, Lost]:
        """The state of the nodes of ranks, by rank; none of this machine's own.

        ``at_end``: all have ended; waits until it is known whether nodes have, too.
        """
        return {}

    def signal(self, pid: int, signum: int) -> bool:
        """Send ``signum`` to the process of ranks; whether there was one."""
        return process_control.kill(pid, signum)

    @abstractmethod
    def close(self, alive: Sequence[RankProcess]) -> None:
        """End what still runs, on an error of ours or Ctrl-C; also after a start that failed."""


class Forked(ProcessHost):
    """Ranks that are forked for one launch, in processes of their own or as threads of one."""

    def __init__(self) -> None:
        self._place = contextlib.ExitStack()
        self._handles: dict[int, int | None] = {}

    def start(self, launch: RankLaunch) -> list[RankProcess]:
        """Fork them."""
        parent, mpirun = os.getpid(), None
        if launch.backend.mpirun:
            mpirun = self._place.enter_context(self.mpirun(launch))
        processes = []
        for ranks in self.groups(launch):
            pid = os.fork()
            if pid == 0:
                if mpirun is not None:
                    mpirun.become(ranks[0])
                # In the new process: joins the process group, calls launch.program(rank, world),
                # stores what it returns.  A case goes on in cases/rank_program.py: run_rank.
                run_process(launch, ranks, parent)
            self._handles[pid] = process_control.handle_of(pid)
            processes.append(RankProcess(pid, ranks))
        return processes

    def groups(self, launch: RankLaunch) -> Iterator[tuple[int, ...]]:
        """The ranks of each process."""
        every = launch.ranks
        return iter([tuple(every)] if launch.backend.threads else [(rank,) for rank in every])

    def mpirun(self, launch: RankLaunch) -> Mpirun:
        """The launcher that makes the processes ranks of MPI."""
        folder = launch.workdir / "mpirun"
        folder.mkdir()
        return Mpirun(range(launch.world), folder)

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """Their process descriptors."""
        handles = [self._handles[process.pid] for process in alive]
        return [] if None in handles else [handle for handle in handles if handle is not None]

    def status(self, process: RankProcess) -> int | None:
        """The wait status of a process that has ended."""
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        return status if pid else None

    def close(self, alive: Sequence[RankProcess]) -> None:
        """Kill and collect what still runs."""
        for process in alive:
            process_control.kill(process.pid)
            os.waitpid(process.pid, 0)
        for handle in self._handles.values():
            if handle is not None:
                os.close(handle)
        self._handles.clear()
        self._place.close()


class Supervisor:
    """The ranks of ``launch`` on ``host``, until every one of them has ended."""

    def __init__(self, host: ProcessHost, launch: RankLaunch) -> None:
        self._host, self._launch = host, launch
        self._watchdog = Watchdog(launch.heartbeat, launch.world, launch.backend)
        #: CPU seconds of each rank when the first one failed.
        self._spent_at_failure: list[float] | None = None
        self._processes: list[RankProcess] = []

    def outcomes(self) -> list[RankOutcome]:
        """Start the ranks and wait until all have ended; one outcome for each rank."""
        strangers_before = process_control.children()
        launch, host = self._launch, self._host
        heartbeat.create(launch.heartbeat, launch.world)
        try:
            self._processes = host.start(launch)
            self._watchdog.begin(self._processes)
            while alive := self._alive():
                if descriptors := host.descriptors(alive):
                    connection.wait(descriptors, TICK_SECONDS)
                else:
                    time.sleep(_POLL_SECONDS)
                for process in alive:
                    self._collect(process, host.status(process))
                if alive := self._alive():
                    self._see_nodes(alive)
                    self._enforce(alive)
            if any(process.exit_code != 0 for process in self._processes):
                lost = host.lost(at_end=True)
                for process in self._processes:
                    process.lost = process.lost or lost.get(process.ranks[0])
        finally:
            host.close(self._alive())
            if process_control.is_subreaper():
                process_control.end_adopted(strangers_before | process_control.STAYING)
        # From exit codes, heartbeats and stacks to an outcome for each rank: launch/diagnosis.py.
        return diagnose(self._launch, self._processes, self._watchdog.idle_looks)

    def _alive(self) -> list[RankProcess]:
        return [process for process in self._processes if process.ended is None]

    def _collect(self, process: RankProcess, status: int | None) -> None:
        if status is None:
            return
        process.ended = time.monotonic() - self._launch.began
        if (code := os.waitstatus_to_exitcode(status)) < 0:
            process.signal = -code
        else:
            process.exit_code = code
        if status != 0 and not process.reason:
            self._failed()

    def _see_nodes(self, alive: Sequence[RankProcess]) -> None:
        """Once nothing happens, what has become of the nodes of ranks."""
        silent = self._watchdog.silence >= DESYNC_LOOKS
        lost = self._host.lost() if silent else {}
        for process in alive:
            process.lost = lost.get(process.ranks[0])
            if process.reason and process.is_paused:
                # It dies of our signal when its node goes on.
                process.ended = time.monotonic() - self._launch.began

    def _enforce(self, alive: Sequence[RankProcess]) -> None:
        self._watchdog.look(alive)
        spent = self._watchdog.spent
        if self._watchdog.failed:
            self._failed()
        for process in alive:
            excess, guilty = self._excess(process)
            if excess:
                process.guilty = guilty
                self._end([process], excess)
            elif guilty := frozenset(r for r in process.ranks if spent[r] > self._launch.budget_s):
                process.guilty = guilty
                self._end([process], "budget")
        before = self._spent_at_failure
        if before is not None:
            computes = max(now - then for now, then in zip(spent, before, strict=True))
            if computes > GRACE_SECONDS or self._stand_still(GRACE_SECONDS):
                self._end(alive, "grace")
        elif self._stand_still(self._launch.budget_s):
            self._end(alive, "standstill")
        elif self._differ():
            self._end(alive, "desync")
        elif time.monotonic() > self._launch.began + self._launch.timeout_s:
            self._end(alive, "last resort")

    def _stand_still(self, asleep_s: float) -> bool:
        return self._watchdog.stand_still(max(1, int(asleep_s / TICK_SECONDS)))

    def _differ(self) -> bool:
        """Whether the recorded calls of ranks cannot match, and no rank continues."""
        least = WAITING_LOOKS if self._watchdog.parting else DESYNC_LOOKS
        if self._watchdog.silence < least or not self._watchdog.idle:
            return False
        beats = heartbeat.read(self._launch.heartbeat)
        return autopsy.mismatch({beat.rank: beat.noted for beat in beats}) is not None

    def _failed(self) -> None:
        if self._spent_at_failure is None:
            self._spent_at_failure = self._watchdog.spent

    def _excess(self, process: RankProcess) -> tuple[str, frozenset[int]]:
        """The limit that the process exceeds ("": none), and the rank that is to blame."""
        memory_bytes = self._launch.memory_bytes
        if memory_bytes is not None:
            resident = process_control.resident_bytes(process.pid)
            if resident > memory_bytes:
                limit = f"over its memory limit of {memory_bytes / 2**20:.0f} MiB"
                whose = "the process of all ranks is " if len(process.ranks) > 1 else ""
                return f"{whose}{limit} ({resident / 2**20:.0f} MiB resident)", frozenset()
        text = f"printed more than {OUTPUT_LIMIT >> 20} MiB"
        for rank in process.ranks:
            if (stacks.size(self._launch.output(rank)) or 0) > OUTPUT_LIMIT:
                return text, frozenset((rank,))
        is_over = (stacks.size(self._launch.shared_output) or 0) > OUTPUT_LIMIT
        return text if is_over else "", frozenset()

    def _end(self, processes: Sequence[RankProcess], reason: str) -> None:
        """Ask for stacks, unless there was too much of something, then kill."""
        doomed = [p for p in processes if p.ended is None and not p.reason]
        for process in doomed:
            process.reason = reason
            process.stopped = process_control.state_of(process.pid) == "T"
        if reason in OVERDUE:
            heartbeats = heartbeat.read(self._launch.heartbeat)
            for process in doomed:
                unended = (rank for rank in process.ranks if not self._launch.end(rank).exists())
                process.spent = self._watchdog.spent
                process.hung = {rank: heartbeats[rank] for rank in unended}
            files = {p.pid: self._launch.stacks(p.ranks[0]) for p in doomed}
            stacks.ask(files, send=self._host.signal)
        for process in doomed:
            self._host.signal(process.pid, signal.SIGKILL)
        if reason not in ("grace", "standstill", "desync"):
            self._failed()
