"""JSON messages over a stream socket, each with its length (u32, little endian) before it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def send(connection: socket.socket, message: Any) -> None:
    """Write one message.  Raises :class:`OSError` if the other side is gone."""
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


class Inbox:
    """Messages out of a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self.closed = False

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Whole messages that have arrived; waits up to ``timeout_s`` seconds for some bytes."""
        if self.closed:
            return []
        self._connection.settimeout(timeout_s)
        try:
            data = self._connection.recv(1 << 20)
        except (TimeoutError, BlockingIOError):
            return []
        except ConnectionResetError:
            data = b""
        finally:
            with contextlib.suppress(OSError):
                self._connection.settimeout(None)
        self.closed = not data
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages
