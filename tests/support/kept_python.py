"""One Python that has imported torch, and ranks of watched scripts as forks of it.

A fresh Python imports torch for four CPU seconds, and a script has two ranks or more.  A fork is a
child of this process as a fresh one is: it adopts it from the kept Python, which made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

#: What a script that trains imports.
_MODULES = ("torch.distributed", "torch.nn.parallel", "torch._dynamo")
_SET_CHILD_SUBREAPER = 36


class Fork:
    """As much of :class:`subprocess.Popen` as who starts ranks asks for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None``: it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class KeptPython:
    """``python -c program words``, from a Python that has imported torch."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._answers = self._line.makefile("r")

    def popen(
        self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool
    ) -> Fork:
        """Takes what the launcher gives to :class:`subprocess.Popen`."""
        python, flag, program, *words = command
        assert (python, flag, start_new_session) == (sys.executable, "-c", True)
        request = {"program": program, "words": words, "env": {**env}, "folder": str(Path.cwd())}
        self._line.sendall(f"{json.dumps(request)}\n".encode())
        return Fork(int(self._answers.readline()))

    @contextlib.contextmanager
    def lends_forks(self) -> Iterator[None]:
        """Inside, ranks that ``shardproof watch`` starts in this process are forks of it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardproof.watch.launch.subprocess", SimpleNamespace(Popen=self.popen))
            _adopt(True)
            try:
                yield
            finally:
                _adopt(False)

    def end(self) -> None:
        """It ends where nobody asks any more."""
        self._answers.close()
        self._line.close()
        self._process.wait(60)


def _adopt(orphans: bool) -> None:
    """Whether this process becomes the parent of descendants that have lost theirs."""
    assert ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


def _serve(line: socket.socket) -> dict[str, Any]:
    """In a fork: what it is to run.  Ends the kept Python where the other end has gone."""
    requests = line.makefile("r")
    while text := requests.readline():
        if first := os.fork():
            os.waitpid(first, 0)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)  # not adopted yet
        line.sendall(f"{os.getpid()}\n".encode())
        requests.close()
        line.close()
        found: dict[str, Any] = json.loads(text)
        return found
    sys.exit()


def _become(request: Mapping[str, Any]) -> None:
    """Be what :class:`subprocess.Popen` would have started."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = ["-c", *request["words"]]
    sys.path[0] = ""
    exec(request["program"], {"__name__": "__main__"})


if __name__ == "__main__":
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()  # what is here is no rank's to collect
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
