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
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from shardproof.launch import process_control
from shardproof.launch.diagnosis import Lost, RankProcess
from shardproof.launch.mpi.mpirun import Mpirun
from shardproof.launch.outcome import RankOutcome, root_cause
from shardproof.launch.rank_process import RankLaunch, run_process
from shardproof.launch.supervisor import Supervisor

__all__ = ["Forked", "NotLent", "ProcessHost", "RankHost", "RankOutcome", "root_cause"]


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
        """What has become of the nodes of ranks, by rank; none of this machine's own.

        ``at_end``: all have ended; waits until it is known whether nodes have, too.
        """
        return {}

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
        """What makes the processes ranks of MPI."""
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
