"""Informants on a node: a user's code is imported where its ranks run, by their user.

The leader waits at a socket in the folder of questions and answers.  The process comes to it,
forked from the fork server of the node's agent, and ends with the order to that agent.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from shardproof.launch.informant import Informant, serve
from shardproof.launch.nodes import NodeGone

#: Seconds that an agent has to fork the process.
_MEET_SECONDS = 60.0


class NodeInformant(Informant):
    """One on the node whose agent has its door at ``door``."""

    def __init__(self, door: Path, workdir: Path, seconds: float) -> None:
        super().__init__(workdir, seconds)
        self._door = door
        self._agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(self, folder: Path) -> tuple[Connection, int]:
        """Have the agent fork it.

        :raises NodeGone: it cannot.
        """
        share(folder)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / "leader"))
            (folder / "leader").chmod(0o666)
            listener.listen(1)
            try:
                self._agent.connect(str(self._door))
                self._agent.send(pickle.dumps((inform, folder)))
            except OSError as error:
                raise NodeGone(f"cannot reach the agent of {self._door.name}: {error}") from None
            if not select.select([listener], [], [], _MEET_SECONDS)[0]:
                raise NodeGone(f"{self._door.name} started no process within {_MEET_SECONDS:g} s")
            line, _ = listener.accept()
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return Connection(line.detach()), struct.unpack("3i", credentials)[0]

    def collect(self, pid: int) -> str:
        """The agent kills it; only the agent knows how it ended."""
        self._agent.close()
        return ""


def inform(folder: Path) -> None:
    """Task of the process."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(str(folder / "leader"))
    serve(Connection(line.detach()), folder)


def share(folder: Path) -> None:
    """Open ``folder`` to the user of ranks, and the path to it, but no other folder on the path."""
    folder.chmod(0o777)
    top = Path(tempfile.gettempdir()).resolve()
    for parent in folder.resolve().parents:
        if parent in (top, Path("/dev/shm")) or parent.stat().st_uid != os.geteuid():
            break
        parent.chmod(parent.stat().st_mode & 0o7777 | 0o011)
