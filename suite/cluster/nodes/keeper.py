"""Keeps the ranks that a launch has on this node: forks them, and tells the leader how each ended.

A process of its own, forked from the agent's fork server.  It comes to the leader's socket and says
its first rank, then the pids of its ranks (or why there are none), then ``[rank, wait status,
whether the kernel ended it for memory]`` for each as it ends.  The leader, who is another user, has
it send signals: ``[pid, signal]``.  It ends, and all with it, when the leader closes that
connection, and with the agent.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof.backends import faults
from shardproof.cluster.nodes import asking, daemon
from shardproof.launch import process_control
from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.mpi.mpirun import Mpirun, MpirunError, Spread
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import Forked


@dataclass(frozen=True)
class KeeperTask:
    """``ranks`` of the launch in ``workdir``, on ``node``; agents have their doors in ``doors``.

    ``spread``: ranks of each node by its name, in order, where one ``mpirun`` serves several.
    """

    node: str
    ranks: tuple[int, ...]
    workdir: Path
    doors: Path
    spread: Mapping[str, int] = field(default_factory=dict)

    @property
    def launch(self) -> Path:
        """The launch, pickled."""
        return self.workdir / "launch"

    @property
    def leader(self) -> Path:
        """The leader's socket."""
        return self.workdir / "leader"

    @property
    def folder(self) -> Path:
        """The folder for the files of MPI on this node."""
        return self.workdir / self.node


@dataclass(frozen=True)
class Packed:
    """A program that each rank unpacks by itself: nothing that it imports is in its keeper."""

    program: bytes

    def prepare(self) -> None:
        """Before ranks that are threads start."""
        pickle.loads(self.program).prepare()

    def __call__(self, rank: int, world: int) -> Any:
        faults.strike_node = asking.strike
        return pickle.loads(self.program)(rank, world)


class _OfThisNode(Forked):
    def __init__(self, task: KeeperTask) -> None:
        super().__init__()
        self._task = task

    def groups(self, launch: RankLaunch) -> Iterator[tuple[int, ...]]:
        """Those of this node, a process each, or one for all where they are threads."""
        ranks = self._task.ranks
        return iter([ranks] if launch.backend.threads else [(rank,) for rank in ranks])

    def mpirun(self, launch: RankLaunch) -> Mpirun:
        """That of all nodes, which the first of them starts."""
        task, spread = self._task, None
        task.folder.mkdir()
        if task.spread:
            launcher = f"{sys.executable} -I -S {Path(daemon.__file__)}"
            settings = {daemon.DOORS: str(task.doors), daemon.SPREAD: str(task.workdir)}
            spread = Spread(task.spread, launcher, settings)
        return Mpirun(task.ranks, task.folder, spread)


def keep(task: KeeperTask) -> None:
    """Task of the keeper's process."""
    launch: RankLaunch = pickle.loads(task.launch.read_bytes())
    host, alive = _OfThisNode(task), list[RankProcess]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leader:
        leader.connect(str(task.leader))
        try:
            _tell(leader, task.ranks[0])
            alive = host.start(launch)
            _tell(leader, [process.pid for process in alive])
            _watch(leader, host, alive)
        except MpirunError as error:
            _tell(leader, str(error))
        finally:
            host.close(alive)


def _watch(leader: socket.socket, host: Forked, alive: list[RankProcess]) -> None:
    """Tell how each ends; returns when the leader has gone, and takes those from ``alive``."""
    killed = ended_for_memory()
    while True:
        ready, _, _ = select.select([leader.fileno(), *host.descriptors(alive)], [], [])
        if leader.fileno() in ready:
            try:
                pid, signum = json.loads(leader.recv(256))
            except (OSError, ValueError):  # it has gone
                return
            if any(process.pid == pid for process in alive):
                process_control.kill(pid, signum)
        for process in [*alive]:
            if (status := host.status(process)) is None:
                continue
            alive.remove(process)
            before, killed = killed, ended_for_memory()
            _tell(leader, [process.ranks[0], status, status == signal.SIGKILL and killed > before])


def _tell(leader: socket.socket, what: object) -> None:
    with contextlib.suppress(OSError):  # it has gone: seen at the next look
        leader.send(json.dumps(what).encode())


def ended_for_memory(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes of this cgroup that the kernel has ended because its memory was used up."""
    for name in ("memory.events", "memory/memory.oom_control"):  # of cgroup 2 and 1
        with contextlib.suppress(OSError, ValueError):
            words = (folder / name).read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0
