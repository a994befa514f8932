"""The agent of a node: forks the ranks that leaders order.

``python -m shardproof.cluster.nodes.agent FOLDER NODE [MODULE...]`` imports the modules once in a
fork server and opens its door, a socket in ``FOLDER``.  An order starts a keeper of ranks
(``keeper.py``), an informant (``informants.py``) or a daemon of MPI (``daemon.py``), and ends with
the connection on which it came.  There, too, the agent answers how its node is (``condition.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.cluster.nodes.condition import CUT_OFF, QUESTION, WELL, routes
from shardproof.cluster.nodes.doors import door
from shardproof.cluster.nodes.keeper import keep
from shardproof.launch import process_control
from shardproof.launch.fork_server import ForkServer

#: Leaders that may come at once.
_BACKLOG = 256


@dataclass
class _Order:
    """The order: a keeper or informant with a ``ticket`` of its own, or a daemon."""

    connection: socket.socket
    ticket: int = 0
    daemon: subprocess.Popen[bytes] | None = None


class Agent:
    """Serves leaders at ``listener`` with processes of ``fork_server``."""

    def __init__(self, listener: socket.socket, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(fork_server, selectors.EVENT_READ)
        self._had_a_network = routes() > 0

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
                elif key.data is not None and key.fileobj is key.data.connection:
                    self._hear(key.data)
                elif key.data is not None:
                    self._daemon_ended(key.data, int(key.fd))
            self._fork_server.poll(0.0)  # of a keeper that has ended its leader knows

    def _hear(self, order: _Order) -> None:
        try:
            message, outputs, _, _ = socket.recv_fds(order.connection, 1 << 16, 2)
        except OSError:
            message, outputs = b"", []
        if outputs:
            self._start_daemon(order, message, outputs)
        elif message and message != QUESTION:
            order.ticket = self._fork_server.submit(*pickle.loads(message))
        elif message == QUESTION:
            cut_off = self._had_a_network and not routes()
            with contextlib.suppress(OSError):  # the leader has gone: seen at the next read
                order.connection.send(CUT_OFF if cut_off else WELL)
        elif not message:  # the leader is done with it, or dead
            self._selector.unregister(order.connection)
            order.connection.close()
            if order.ticket:
                self._fork_server.kill(order.ticket)
            if order.daemon is not None:
                process_control.kill_group(order.daemon.pid)

    def _start_daemon(self, order: _Order, message: bytes, outputs: Sequence[int]) -> None:
        """Run a command that writes where its order came from."""
        order.daemon = subprocess.Popen(
            ["sh", "-c", json.loads(message)["daemon"]],
            stdin=subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[1],
            start_new_session=True,
        )
        self._selector.register(os.pidfd_open(order.daemon.pid), selectors.EVENT_READ, order)
        for output in outputs:
            os.close(output)

    def _daemon_ended(self, order: _Order, handle: int) -> None:
        """Tell who has ordered it, unless that has gone."""
        assert order.daemon is not None
        self._selector.unregister(handle)
        os.close(handle)
        with contextlib.suppress(OSError):
            order.connection.send(str(order.daemon.wait()).encode())
        order.daemon = None


def main(arguments: Sequence[str]) -> None:
    """Serve as the agent of node ``arguments[1]``."""
    folder, node, *modules = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.umask(0)  # the leader is another user, and removes what ranks leave
    Path(folder).mkdir(exist_ok=True)
    with (
        ForkServer([keep.__module__, *modules]) as fork_server,
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
