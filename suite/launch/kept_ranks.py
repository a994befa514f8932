"""Rank processes that a leader keeps for its next cases.

Forked for the first case that may: one for all ranks where ranks are threads, one a rank otherwise.
They end with their leader, after a case that does not hold, and when something is left in them
(``rank_service.py``).  What a fork costs again and again, above all pages that are copied when they
are touched, is paid once.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardproof.cluster.nodes.condition import Lost
from shardproof.launch import process_control
from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.rank_service import Done, serve
from shardproof.launch.ranks import RanksGone


@dataclass
class _Service:
    """A process that waits for orders; ``handle`` becomes readable when it ends."""

    pid: int
    orders: socket.socket
    handle: int | None
    #: Whether it lives, and nothing is left in it.
    fit: bool = True
    collected: bool = False

    def status(self) -> int | None:
        """Its wait status, once it has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.fit, self.collected = False, True
        return status

    def end(self) -> None:
        """Kill it, if it still lives."""
        if not self.collected:
            process_control.kill(self.pid)
            os.waitpid(self.pid, 0)
        process_control.STAYING.discard(self.pid)
        self.orders.close()
        if self.handle is not None:
            os.close(self.handle)


class KeptRanks:
    """All that this process keeps, by what their ranks are; a ``launch.ranks.Kept``."""

    def __init__(self) -> None:
        self._services: dict[str, list[_Service]] = {}

    def __call__(self, launch: RankLaunch) -> _Lent:
        """The processes of ``launch``, forked if they are not there yet.

        :raises RanksGone: one ended while it waited.
        """
        count = 1 if launch.link.threads else launch.world
        services = self._services.setdefault(repr(launch.link), [])
        while len(services) < count:
            services.append(_forked(launch, len(services)))
        return _Lent(services, count, launch)


class _Lent:
    """The first ``count`` of ``services``, for one launch."""

    def __init__(self, services: list[_Service], count: int, launch: RankLaunch) -> None:
        self._services, self._launch = services, launch
        self._mine = {service.pid: service for service in services[:count]}
        order = launch.workdir / "launch"
        order.write_bytes(pickle.dumps(launch))
        try:
            for service in self._mine.values():
                service.orders.send(os.fsencode(order))
        except OSError as error:
            self._drop()
            raise RanksGone(f"a kept rank process has ended: {error}") from error

    def processes(self) -> list[RankProcess]:
        """They have their orders."""
        if self._launch.link.threads:
            (pid,) = self._mine
            return [RankProcess(pid, tuple(range(self._launch.world)))]
        return [RankProcess(pid, (rank,)) for rank, pid in enumerate(self._mine)]

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """What becomes readable when one is done or has ended."""
        services = [self._mine[process.pid] for process in alive]
        handles = [service.handle for service in services if service.handle is not None]
        return [*(service.orders.fileno() for service in services), *handles]

    def status(self, process: RankProcess) -> int | None:
        """The wait status that a process of its own would have ended with; ``None``: not yet."""
        service = self._mine[process.pid]
        try:
            message = service.orders.recv(4096)
        except BlockingIOError:
            message = b""
        if message:
            done = Done.read(message)
            service.fit = done.clean and done.code == 0
            return done.code << 8
        return service.status()

    def lost(self, at_end: bool = False) -> Mapping[int, Lost]:
        """None: they run on this machine."""
        return {}

    def close(self, alive: Sequence[RankProcess]) -> None:
        """What is not done is ended; and all are, unless each is as it was before."""
        for process in alive:
            self._mine[process.pid].fit = False
        if not all(service.fit for service in self._mine.values()):
            self._drop()

    def stay(self) -> Collection[int]:
        """Those that wait for the next launch."""
        return process_control.STAYING

    def _drop(self) -> None:
        for service in self._services:
            service.end()
        self._services.clear()


def _forked(launch: RankLaunch, rank: int) -> _Service:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    log = launch.workdir.parent / f"ranks-of-{parent}-{rank}.log"
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve((rank,), theirs, parent, log)
    theirs.close()
    ours.setblocking(False)
    process_control.STAYING.add(pid)
    return _Service(pid, ours, process_control.handle_of(pid))


#: Those of this leader.
OF_THIS_PROCESS = KeptRanks()
