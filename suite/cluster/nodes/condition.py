"""The state of a node while ranks are on it: it has ended, is paused, or is cut off.

The agent is asked, because whatever befalls a node befalls it, too.  Its connection ends with it.
If it has a question to read and is not let run, its node is paused: the kernel makes a process that
has something to read runnable at once, however busy the machine, unless it is frozen or stopped.
It tells itself that its network is gone: there are no routes any more where there were some.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

from shardproof.launch import process_control
from shardproof.launch.diagnosis import How

#: What an agent answers.
WELL, CUT_OFF, QUESTION = b"well", b"cut off", b"how are you"
#: Looks at an agent that neither answers nor runs, after which its node is paused.
_SILENT_LOOKS = 20
_SECONDS_BETWEEN = 0.05


class Inquiry:
    """Asks the agent of a node at the other end of ``connection`` how it is, again and again."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self._pid, _, _ = struct.unpack("3i", credentials)
        self._waits = False
        self._silent = 0
        self._looked = 0.0
        self._how: How | None = None
        #: Whether its agent has been heard of, or not in vain; the caller may set it back.
        self.known = False

    def how(self) -> How | None:
        """The state of the node, as far as it is known; ``None``: running."""
        try:
            answer = self._connection.recv(64, socket.MSG_DONTWAIT) if self._waits else WELL
            if not self._waits:
                self._connection.send(QUESTION, socket.MSG_DONTWAIT)
                self._waits = True
                return self._how
        except BlockingIOError:
            return self._unanswered()
        except OSError:
            answer = b""
        self._waits = not answer
        self._silent, self.known = 0, True
        self._how = "cut off" if answer == CUT_OFF else None if answer else "ended"
        return self._how

    def _unanswered(self) -> How | None:
        now = time.monotonic()
        if now - self._looked >= _SECONDS_BETWEEN:
            self._looked = now
            runs = process_control.state_of(self._pid) in "RZ"
            self._silent = 0 if runs else self._silent + 1
        if self._silent >= _SILENT_LOOKS:
            self._how, self.known = "paused", True
        return self._how


def routes() -> int:
    """Routes of the network that this process is in."""
    try:
        return len(Path("/proc/self/net/route").read_text().splitlines()) - 1
    except OSError:
        return 0
