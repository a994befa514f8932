"""Ranks of a world that is kept for many cases (``world_keeper.py``), for one launch."""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Collection, Sequence

from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.mpi.mpirun import START_SECONDS
from shardproof.launch.mpi.world_keeper import WorldTask
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RanksGone


class Lease:
    """The ranks of ``world``, which run ``launch``.

    :raises RanksGone: there is no such world any more.
    """

    def __init__(self, world: WorldTask, launch: RankLaunch) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._statuses: dict[int, int] = {}
        self._gone = False
        self._pids = self._enter(world)
        file = launch.workdir / "launch"
        file.write_bytes(pickle.dumps(launch))
        self._connection.send(os.fsencode(file))
        self._connection.setblocking(False)

    def _enter(self, world: WorldTask) -> list[int]:
        """The pids of the ranks, once the keeper attends."""
        deadline = time.monotonic() + START_SECONDS
        self._connection.settimeout(START_SECONDS)
        while time.monotonic() < deadline and not world.closed.exists():
            try:
                self._connection.connect(str(world.door))
                greeting = self._connection.recv(1 << 16)
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.01)  # it is being started, or just ended
            except OSError:
                break
            else:
                if greeting:
                    return [int(pid) for pid in json.loads(greeting)]
                break
        self._connection.close()
        raise RanksGone(f"a world of {world.size} ranks is gone")

    def processes(self) -> list[RankProcess]:
        """The ranks."""
        return [RankProcess(pid, (rank,)) for rank, pid in enumerate(self._pids)]

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """What becomes readable when one of them ends."""
        return [] if self._gone else [self._connection.fileno()]

    def status(self, process: RankProcess) -> int | None:
        """The wait status that a process of its own would have ended with; ``None``: not yet."""
        while not self._gone:
            try:
                message = self._connection.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                message = b""
            if not message:
                self._gone = True  # the keeper died, and with it all ranks
                break
            rank, status = json.loads(message)
            self._statuses[rank] = status
        (rank,) = process.ranks
        return self._statuses.get(rank, 9 if self._gone else None)

    def close(self, alive: Sequence[RankProcess]) -> None:
        """Nothing more is ordered; ranks that are not done end with their keeper."""
        self._connection.close()

    def stay(self) -> Collection[int]:
        """None: the ranks are children of their keeper."""
        return ()
