"""Ranks that keepers hold (``rank_keeper.py``), for one launch."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shardproof.cluster.nodes.condition import Lost
from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.mpi.mpirun import START_SECONDS
from shardproof.launch.rank_keeper import KeeperTask
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import RanksGone

#: Seconds between two looks while a keeper is waited for.
_LOOK_SECONDS = 0.05


@dataclass
class _Kept:
    """The ranks of one keeper, and the connection to it."""

    connection: socket.socket
    pids: dict[int, int]
    gone: bool = False


class Lease:
    """The ranks of ``keepers``, together all of ``launch``, which they run.

    ``look`` is called again and again while a keeper is waited for; what it raises ends that.

    :raises RanksGone: a keeper has ended, or did not come.
    """

    def __init__(
        self,
        keepers: Sequence[KeeperTask],
        launch: RankLaunch,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._statuses: dict[int, int] = {}
        #: Ranks that the kernel has ended because the memory of their machine was used up.
        self.ended_for_memory: set[int] = set()
        self._kept: list[_Kept] = []
        try:
            for keeper in keepers:
                self._kept.append(_entered(keeper, look))
            file = launch.workdir / "launch"
            file.write_bytes(pickle.dumps(launch))
            for kept in self._kept:
                kept.connection.send(os.fsencode(file))
                kept.connection.setblocking(False)
        except OSError as error:
            self.close(())
            raise RanksGone(f"the keeper of ranks has ended: {error}") from error
        except RuntimeError:
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
            ended, status, for_memory = json.loads(message)
            self._statuses[ended] = status
            if for_memory:
                self.ended_for_memory.add(ended)
        return self._statuses.get(rank, 9 if kept.gone else None)

    def lost(self, at_end: bool = False) -> Mapping[int, Lost]:
        """None: they run on this machine."""
        return {}

    @property
    def has_killed(self) -> bool:
        """Whether a keeper has told of a rank that was killed."""
        return signal.SIGKILL in self._statuses.values()

    def is_kept(self, rank: int) -> bool:
        """Whether the keeper of ``rank`` is there, as far as was seen."""
        return not next(kept for kept in self._kept if rank in kept.pids).gone

    def close(self, alive: Sequence[RankProcess]) -> None:
        """Nothing more is ordered; ranks that are not done end with their keeper."""
        for kept in self._kept:
            kept.connection.close()

    def stay(self) -> Collection[int]:
        """None: the ranks are children of their keepers."""
        return ()


def _entered(keeper: KeeperTask, look: Callable[[], None]) -> _Kept:
    """A connection to the keeper, once it attends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + START_SECONDS
    connection.settimeout(_LOOK_SECONDS)
    is_in = False
    while time.monotonic() < deadline and not keeper.closed.exists():
        look()
        try:
            if not is_in:
                connection.connect(str(keeper.door))
                is_in = True
            greeting = connection.recv(1 << 16)
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.01)  # it is being started, or just ended
        except TimeoutError:
            continue
        except OSError:
            break
        else:
            if greeting:
                pids = map(int, json.loads(greeting))
                return _Kept(connection, dict(zip(keeper.ranks, pids, strict=True)))
            break
    connection.close()
    gone = f"the keeper of ranks {', '.join(map(str, keeper.ranks))} is gone"
    why = keeper.closed.read_text() if keeper.closed.exists() else ""
    raise RanksGone(f"{gone}: {why}" if why else gone)
