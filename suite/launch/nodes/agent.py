"""The agent of a node: forks the ranks that leaders order.

``python -m shardproof.launch.nodes.agent FOLDER NODE [MODULE...]`` imports the modules once in a
fork server and opens its door, a socket in ``FOLDER``.  An order, ``[ranks, folder]``, starts a
keeper of these ranks (``launch/rank_keeper.py``); it ends with the connection on which it came.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.launch.fork_server import ForkServer
from shardproof.launch.nodes.nodes import door
from shardproof.launch.rank_keeper import KeeperTask, keep

#: Leaders that may come at once.
_BACKLOG = 256


@dataclass
class _Order:
    """What a leader has ordered; ``ticket`` is that of the keeper, once it has been started."""

    connection: socket.socket
    ticket: int = 0
    keeper: KeeperTask | None = None


class Agent:
    """Serves leaders at ``listener`` with processes of ``fork_server``."""

    def __init__(self, listener: socket.socket, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(fork_server, selectors.EVENT_READ)
        self._orders: dict[int, _Order] = {}  # by ticket

    def serve(self) -> None:
        """Until a signal ends it, or its fork server has gone.

        :raises ForkServerError: it has.
        """
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    order = _Order(connection)
                    self._selector.register(connection, selectors.EVENT_READ, order)
                elif key.data is not None:
                    self._hear(key.data)
            for leader in self._fork_server.poll(0.0):
                self._ended(leader.ticket)

    def _hear(self, order: _Order) -> None:
        try:
            message = order.connection.recv(1 << 16)
        except OSError:
            message = b""
        if message and order.keeper is None:
            ranks, folder = json.loads(message)
            order.keeper = KeeperTask(tuple(ranks), Path(folder), mpi=False, most_cases=1)
            order.ticket = self._fork_server.submit(keep, order.keeper)
            self._orders[order.ticket] = order
        elif not message:  # the leader is done with it, or dead
            self._selector.unregister(order.connection)
            order.connection.close()
            if order.ticket in self._orders:
                self._fork_server.kill(order.ticket)

    def _ended(self, ticket: int) -> None:
        """A leader that still waits for the keeper must not do so for long."""
        keeper = self._orders.pop(ticket).keeper
        assert keeper is not None
        with contextlib.suppress(OSError):
            keeper.closed.touch()


def main(arguments: Sequence[str]) -> None:
    """Serve as the agent of node ``arguments[1]``."""
    folder, node, *modules = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Path(folder).mkdir(exist_ok=True)
    with (
        ForkServer(["shardproof.launch.rank_keeper", *modules]) as fork_server,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        fork_server.wait_ready()
        early = Path(folder) / f"early{node}"  # until it listens
        listener.bind(str(early))
        listener.listen(_BACKLOG)
        early.rename(door(Path(folder), int(node)))
        Agent(listener, fork_server).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
