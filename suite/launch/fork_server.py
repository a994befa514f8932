"""A process that imports torch once and then forks leaders, which do the cases.

Importing torch and what it loads lazily takes two seconds, forking a process that has done so ten
milliseconds, and what a leader touches first another forty; so it is kept for several cases where
these leave it as it was.  Forking is safe only while the parent has a single thread: after OpenMP
has run with two, the child hangs.  So this is a process of its own that imports, forks and
collects, and never computes; that it has one thread is checked before it says that it is ready.

The two talk in pickled messages.  Only a leader, never the fork server, unpickles the job of a
:class:`Fork`: that imports the task's module.  A leader that is kept sends a byte when its task is
done and it has neither children nor threads; a leader for one task has no line at all.

It ends, and with it everything that it started, when the parent closes the line or dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from shardproof.errors import MachineError
from shardproof.launch import process_control

#: Native libraries start a thread per core at import, unless told otherwise before.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
#: Unless the user says otherwise, a product of equal numbers has equal bits wherever in memory they
#: lie: without it MKL rounds by the address (conditional numerical reproducibility), and ranks that
#: hold a layer at another place of a buffer would hold other gradients of it.
REPRODUCIBLE = {"MKL_CBWR": "AUTO"}
#: Left over from a launcher around us, these would be read by ``init_process_group``.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

#: Looks, a second apart, at which one that starts did nothing: then it never will.
IDLE_LOOKS = 180
END_SECONDS = 5.0

_TAIL = 4000

P = TypeVar("P")


class ForkServerError(MachineError):
    """The fork server could not start, or is gone."""


#: What a leader runs: a function of a module.  Its argument is pickled; what it returns is written
#: as JSON, so that nothing of a user's is imported where it is read.
Task = Callable[[P], object]


@dataclass(frozen=True)
class Fork:
    """Run ``job``, a pickled task and its payload; ``value``: the file of its result.

    ``group``: the leader that does so may have done other tasks of this group and may do more of
    them; ``None``: it is a new one, and ends with this task.
    """

    ticket: int
    job: bytes
    value: Path | None
    group: str | None = None


@dataclass(frozen=True)
class EndLeader:
    """End the leader of that ticket, and all that it started."""

    ticket: int


@dataclass(frozen=True)
class Preload:
    """Import a module for all leaders to come."""

    module: str


@dataclass(frozen=True)
class Ready:
    """Everything is imported, and there is one thread."""


@dataclass(frozen=True)
class Failed:
    """The fork server cannot start leaders, and why."""

    why: str


@dataclass(frozen=True)
class LeaderExit:
    """How a leader ended, or its task if it is kept; ``output`` is the tail of what it printed,
    ``seconds`` are those since it was forked or took the task.
    """

    ticket: int
    pid: int
    exit_code: int | None
    signal: int | None
    seconds: float
    output: str


def receive(connection: Connection, timeout_s: float) -> list[Any]:
    """The messages that have arrived; waits up to ``timeout_s`` seconds for the first.

    :raises EOFError: there are none, and the other side is gone.
    """
    messages: list[Any] = []
    try:
        while connection.poll(0.0 if messages else timeout_s):
            messages.append(connection.recv())
    except (EOFError, OSError):  # perhaps in the middle of a message
        if not messages:
            raise EOFError from None
    return messages


class ForkServer:
    """The parent's end.  Not for use by several threads at once.

    ``preload`` names modules to import once for all leaders (the judge's, never those under test).
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._tickets = 0
        self._waiting: deque[LeaderExit] = deque()

    def __enter__(self) -> ForkServer:
        self._line, theirs = Pipe()
        self._log = tempfile.TemporaryFile()
        self._ready = False
        self._waiting.clear()
        inherited = {k: v for k, v in os.environ.items() if k not in FOREIGN}
        environment = REPRODUCIBLE | inherited | ENVIRONMENT
        # The leaders must find whatever the parent can import.
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(p).resolve()) for p in sys.path)
        module = "shardproof.launch.fork_server_main"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which tells us
            )
        self._watched = process_control.Watched(self._process.pid)
        for module in self._preload:
            self.preload(module)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ForkServerError("the fork server is not running")
        return self._process.pid

    def fileno(self) -> int:
        """Becomes readable when :meth:`poll` has something to tell."""
        return self._line.fileno()

    def wait_ready(self) -> None:
        """Block until it has imported everything.  Not needed before :meth:`submit`."""
        while not self._ready:
            self._receive(0.5)

    def preload(self, module: str) -> None:
        """Have ``module`` imported before any leader that is submitted from now on."""
        self._send(Preload(module))

    def submit(
        self, task: Task[P], payload: P, value: Path | None = None, group: str | None = None
    ) -> int:
        """Run ``task(payload)`` in a leader; what it returns is written to ``value`` as JSON.

        Returns a ticket.  The leader has its own process group and ends with exit code 0, or
        ``launch.fork_server_main.TASK_RAISED`` if the function raised.  What it starts ends
        with it.  ``group``: the task leaves its process as it found it, so that a leader does
        several tasks of one group, one after the other; ``None``: it has a fresh leader to itself.

        :raises ValueError: ``task`` is no function of a module that a leader can import.
        """
        module, name = task.__module__, task.__qualname__
        if module == "__main__" or getattr(sys.modules.get(module), name, None) is not task:
            what = f"other processes cannot import {module}.{name}"
            raise ValueError(f"{what}: a task must be a function at the top level of a module")
        self._tickets += 1
        self._send(Fork(self._tickets, pickle.dumps((task, payload)), value, group))
        return self._tickets

    def kill(self, ticket: int) -> None:
        """End that leader and all that it started; its :class:`LeaderExit` still comes."""
        self._send(EndLeader(ticket))

    def poll(self, timeout_s: float) -> list[LeaderExit]:
        """The leaders that have ended; waits up to ``timeout_s`` seconds for the first."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            self._receive(0.0 if self._waiting else max(0.0, left))
            if self._waiting or left <= 0:
                exits = list(self._waiting)
                self._waiting.clear()
                return exits

    def close(self) -> None:
        """End the fork server and everything that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            self._line.close()
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # killed below, which its leaders notice
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            self._log.close()

    def _send(self, message: Fork | EndLeader | Preload) -> None:
        try:
            self._line.send(message)
        except OSError as error:
            raise ForkServerError(f"the fork server has ended: {self._last_output()}") from error

    def _receive(self, timeout_s: float) -> None:
        try:
            messages = receive(self._line, timeout_s)
        except EOFError:
            if not self._waiting:
                raise ForkServerError(f"the fork server has ended: {self._last_output()}") from None
            return
        for message in messages:
            match message:
                case Ready():
                    self._ready = True
                case Failed(why):
                    raise ForkServerError(f"the fork server could not start: {why}")
                case LeaderExit():
                    self._waiting.append(message)
        self._watched.look()
        who = f"the fork server (process {self.pid})"
        if self._watched.stopped >= process_control.STOPPED_LOOKS:
            raise ForkServerError(f"{who} was stopped by a signal and never continued")
        if not self._ready and self._watched.idle >= IDLE_LOOKS:
            what = f"{who} was idle for {IDLE_LOOKS} s before it was ready"
            raise ForkServerError(f"{what}: {self._output() or 'it printed nothing'}")

    def _last_output(self) -> str:
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)  # the socket closes a little before the process ends
        text = self._output()
        return f"exit code {code}" + (f", its output ends:\n{text}" if text else "")

    def _output(self) -> str:
        """The tail of what it printed."""
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace").strip()[-_TAIL:]
