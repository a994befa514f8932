"""Ranks that keepers hold (``rank_keeper.py``), for one launch."""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.mpi.mpirun import START_SECONDS
from shardproof.launch.rank_keeper import KeeperTask
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RanksGone


@dataclass
class _Kept:
    """The ranks of one keeper, and the connection to it."""

    connection: socket.socket
    pids: dict[int, int]
    gone: bool = False


class Lease:
    """The ranks of ``keepers``, together all of ``launch``, which they run.

    :raises RanksGone: a keeper has ended, or did not come.
    """

    def __init__(self, keepers: Sequence[KeeperTask], launch: RankLaunch) -> None:
        self._statuses: dict[int, int] = {}
        self._kept: list[_Kept] = []
        try:
            for keeper in keepers:
                self._kept.append(_entered(keeper))
            file = launch.workdir / "launch"
            file.write_bytes(pickle.dumps(launch))
            for kept in self._kept:
                kept.connection.send(os.fsencode(file))
                kept.connection.setblocking(False)
        except OSError as error:
            self.close(())
            raise RanksGone(f"the keeper of ranks has ended: {error}") from error
        except RanksGone:
            self.close(())
            raise

    def processes(self) -> list[RankProcess]:
        """The ranks."""
        pids = {rank: pid for kept in self._kept for rank, pid in kept.pids.items()}
        return [RankProcess(pids[rank], (rank,)) for rank in sorted(pids)]

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """What becomes readable when one of them ends."""
        return [kept.connection.fileno() for kept in self._kept if not kept.gone]

    def status(self, process: RankProcess) -> int | None:
        """The wait status that a process of its own would have ended with; ``None``: not yet."""
        (rank,) = process.ranks
        kept = next(kept for kept in self._kept if rank in kept.pids)
        while not kept.gone:
            try:
                message = kept.connection.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                message = b""
            if not message:
                kept.gone = True  # the keeper died, and with it all its ranks
                break
            ended, status = json.loads(message)
            self._statuses[ended] = status
        return self._statuses.get(rank, 9 if kept.gone else None)

    def close(self, alive: Sequence[RankProcess]) -> None:
        """Nothing more is ordered; ranks that are not done end with their keeper."""
        for kept in self._kept:
            kept.connection.close()

    def stay(self) -> Collection[int]:
        """None: the ranks are children of their keepers."""
        return ()


def _entered(keeper: KeeperTask) -> _Kept:
    """A connection to the keeper, once it attends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + START_SECONDS
    connection.settimeout(START_SECONDS)
    while time.monotonic() < deadline and not keeper.closed.exists():
        try:
            connection.connect(str(keeper.door))
            greeting = connection.recv(1 << 16)
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)  # it is being started, or just ended
        except OSError:
            break
        else:
            if greeting:
                pids = map(int, json.loads(greeting))
                return _Kept(connection, dict(zip(keeper.ranks, pids, strict=True)))
            break
    connection.close()
    raise RanksGone(f"the keeper of ranks {', '.join(map(str, keeper.ranks))} is gone")
