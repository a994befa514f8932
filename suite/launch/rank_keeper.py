"""Keeps ranks that a leader did not fork: those of one ``mpirun``, or those of a launch on a node.

A process of its own, forked from a fork server: it starts ``mpirun`` where one gives ranks their
places (``mpi/mpirun.py``), forks the ranks (``rank_service.py``) and hands what one leader at a
time orders on to them.  It ends, and all with it, as soon as a rank ends or says that something is
left in it, when a leader goes before its ranks are done, and with whoever forked it.

On the leader's socket come file names of pickled launches; back go pids first, then for each rank
``[rank, wait status]`` as it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from dataclasses import dataclass
from pathlib import Path

from shardproof.launch.mpi.mpirun import Mpirun
from shardproof.launch.rank_service import Done, serve

#: Cases after which ranks are replaced: whatever a case leaks is bounded.
MOST_CASES = 100


@dataclass(frozen=True)
class KeeperTask:
    """``ranks`` in ``folder``, which their keeper makes; ``mpi``: an ``mpirun`` gives their places.

    They are kept for ``most_cases`` leaders, one after the other.
    """

    ranks: tuple[int, ...]
    folder: Path
    mpi: bool = True
    most_cases: int = MOST_CASES

    @property
    def door(self) -> Path:
        """Where leaders come in; there once the ranks are."""
        return self.folder / "door"

    @property
    def closed(self) -> Path:
        """There as soon as no further leader is let in."""
        return self.folder / "closed"


def keep(task: KeeperTask) -> None:
    """Task of the keeper's process."""
    task.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        mpirun = None
        if task.mpi:
            mpirun = stack.enter_context(Mpirun(len(task.ranks), task.folder))
        keeper = _Keeper(task, mpirun)
        # Under another name until it listens: a leader that sees it may come in.
        early = task.folder / "early"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(str(early))
            door.listen(1)
            early.rename(task.door)
            for _ in range(task.most_cases):
                if not keeper.attend(door):
                    break
            task.closed.touch()


class _Keeper:
    """The ranks and what is known of them."""

    def __init__(self, task: KeeperTask, mpirun: Mpirun | None) -> None:
        self._selector = selectors.DefaultSelector()
        self._orders: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        #: Ranks that have yet to be done with the leader's order.
        self._busy: set[int] = set()
        #: Whether every rank lives, and nothing is left in it.
        self._fit = True
        parent = os.getpid()
        for rank in task.ranks:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for other in (*self._orders.values(), ours):
                    other.close()
                if mpirun is not None:
                    mpirun.become(rank)
                serve((rank,), theirs, parent, task.folder / f"rank{rank}.log")
            theirs.close()
            self._orders[rank] = ours
            self._pids[rank] = pid
            self._selector.register(ours, selectors.EVENT_READ, rank)
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)

    def attend(self, door: socket.socket) -> bool:
        """Let a leader in and serve it until it goes; whether the ranks can serve another."""
        self._selector.register(door, selectors.EVENT_READ)
        while self._fit and all(key.fileobj is not door for key in self._events(None)):
            pass
        self._selector.unregister(door)
        if not self._fit:
            return False
        leader, _ = door.accept()
        with leader:
            leader.send(json.dumps([*self._pids.values()]).encode())
            self._selector.register(leader, selectors.EVENT_READ)
            while True:
                if all(key.fileobj is not leader for key in self._events(leader)):
                    continue
                order = leader.recv(4096)
                if not order:
                    break
                self._busy = set(self._orders)
                for orders in self._orders.values():
                    orders.send(order)
            self._selector.unregister(leader)
        return self._fit and not self._busy

    def _events(self, leader: socket.socket | None) -> list[selectors.SelectorKey]:
        """Wait for something to happen, and see to it if it is about a rank."""
        keys = [key for key, _ in self._selector.select()]
        for key in keys:
            if key.data is None:
                continue
            rank = int(key.data)
            if key.fileobj is not self._orders[rank]:  # its process has ended
                self._selector.unregister(key.fileobj)
                _, status = os.waitpid(self._pids[rank], 0)
                self._fit = False
                self._done(leader, rank, status)
            elif message := self._orders[rank].recv(4096):
                done = Done.read(message)
                self._fit = self._fit and done.clean and done.code == 0
                self._done(leader, rank, done.code << 8)
            else:
                self._selector.unregister(key.fileobj)
        return keys

    def _done(self, leader: socket.socket | None, rank: int, status: int) -> None:
        if rank in self._busy and leader is not None:
            self._busy.discard(rank)
            _tell(leader, rank, status)


def _tell(leader: socket.socket, rank: int, status: int) -> None:
    with contextlib.suppress(OSError):  # it has gone: seen at the next read
        leader.send(json.dumps([rank, status]).encode())
