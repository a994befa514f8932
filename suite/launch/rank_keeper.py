"""Keeps ranks that a leader did not fork: those of one ``mpirun``, or those of a launch on a node.

A process of its own, forked from a fork server: it starts ``mpirun`` where one gives ranks their
places (``mpi/mpirun.py``), forks the ranks (``rank_service.py``) and hands what one leader at a
time orders on to them.  It ends, and all with it, as soon as a rank ends or says that something is
left in it, when a leader goes before its ranks are done, and with whoever forked it.

On the leader's socket come file names of pickled launches; back go pids first, then for each rank
``[rank, wait status, whether the kernel ended it for memory]`` as it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from shardproof.files import write_whole
from shardproof.launch.mpi.mpirun import Mpirun, MpirunError, Spread
from shardproof.launch.rank_service import Done, serve

#: Cases after which ranks are replaced: whatever a case leaks is bounded.
MOST_CASES = 100


@dataclass(frozen=True)
class KeeperTask:
    """``ranks`` in ``folder``, which their keeper makes; ``mpi``: an ``mpirun`` gives their places.

    They are kept for ``most_cases`` leaders, one after the other.  ``spread``: the nodes over which
    the ``mpirun`` spreads ranks, these among them.
    """

    ranks: tuple[int, ...]
    folder: Path
    mpi: bool = True
    most_cases: int = MOST_CASES
    spread: Spread | None = None

    def order(self) -> bytes:
        """For :meth:`of`."""
        spread = self.spread and [str(self.spread.doors), dict(self.spread.ranks)]
        fields = [self.ranks, str(self.folder), self.mpi, self.most_cases, spread]
        return json.dumps(fields).encode()

    @classmethod
    def of(cls, order: bytes) -> KeeperTask:
        """The task that was packed by :meth:`order`."""
        ranks, folder, mpi, most_cases, spread = json.loads(order)
        over = Spread(Path(spread[0]), spread[1]) if spread else None
        return cls(tuple(ranks), Path(folder), mpi, most_cases, over)

    @property
    def door(self) -> Path:
        """Where leaders come in; there once the ranks are."""
        return self.folder / "door"

    @property
    def closed(self) -> Path:
        """There as soon as no further leader is let in; says why, where ranks did not start."""
        return self.folder / "closed"


def keep(task: KeeperTask) -> None:
    """Task of the keeper's process."""
    task.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        mpirun = None
        if task.mpi:
            mpirun = Mpirun(task.ranks, task.folder, task.spread)
            try:
                stack.enter_context(mpirun)
            except MpirunError as error:
                write_whole(task.closed, str(error))  # whoever sees it reads it
                raise
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
        self._ended_for_memory = ended_for_memory()
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
        before, self._ended_for_memory = self._ended_for_memory, ended_for_memory()
        for_memory = status == signal.SIGKILL and self._ended_for_memory > before
        if rank in self._busy and leader is not None:
            self._busy.discard(rank)
            with contextlib.suppress(OSError):  # it has gone: seen at the next read
                leader.send(json.dumps([rank, status, for_memory]).encode())


def ended_for_memory(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes of this cgroup that the kernel has ended because its memory was used up."""
    for name in ("memory.events", "memory/memory.oom_control"):  # of cgroup 2 and 1
        with contextlib.suppress(OSError, ValueError):
            words = (folder / name).read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0
