"""One fork server for the pools of many tests: it costs six CPU seconds to start, a leader none.

Every leader is a fresh fork either way.  It finds the environment, the working folder and the
import path as they were when its task was submitted, as if its fork server had started then.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardproof import by_path
from shardproof.launch.fork_server import (
    ENVIRONMENT,
    FOREIGN,
    ForkServer,
    LeaderExit,
    Task,
)

#: Read where torch and its libraries are imported: another value needs another fork server.
_AT_IMPORT = ("ATEN_", "CUDA_", "DNNL_", "LD_", "MKL_", "NCCL_", "OMP_", "ONEDNN_", "TORCH_")
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
_MOST_KEPT = 2


@dataclass(frozen=True)
class _Placed:
    """A pickled task and payload, and what its process inherits."""

    job: bytes
    environment: dict[str, str]
    folder: str
    path: list[str]
    changed: dict[str, Any]


def run_placed(placed: _Placed) -> object:
    """In the leader: the task, where it was submitted."""
    os.environ.clear()
    os.environ.update(placed.environment)
    os.chdir(placed.folder)
    sys.path[:] = placed.path
    tempfile.tempdir = None
    importlib.invalidate_caches()
    by_path.entry_points.cache_clear()  # of the packages that were on the path before
    for name, value in placed.changed.items():
        module, _, constant = name.partition(":")
        setattr(importlib.import_module(module), constant, value)
    task, payload = pickle.loads(placed.job)
    return task(payload)


class KeptForkServer(ForkServer):
    """Is not ended by :meth:`close` but waits for the next, unless something in it went wrong."""

    #: What of the suite leaders and ranks find changed: ``module:NAME`` -> value.
    changed: ClassVar[dict[str, Any]] = {}
    _kept: ClassVar[list[KeptForkServer]] = []

    def __enter__(self) -> KeptForkServer:
        self._needs = _needs()
        for kept in [server for server in self._kept if server._needs == self._needs]:
            self._kept.remove(kept)
            if not kept._is_sound():
                kept.end()
                continue
            wanted = self._preload
            self.__dict__.update(kept.__dict__)
            kept._process = None
            for module in wanted:
                self.preload(module)
            return self
        self._running: set[int] = set()
        self._failed = False
        super().__enter__()
        return self

    def submit(
        self, task: Task[Any], payload: Any, value: Path | None = None, group: str | None = None
    ) -> int:
        environment = {k: v for k, v in os.environ.items() if k not in FOREIGN} | ENVIRONMENT
        path = [str(Path(entry).resolve()) for entry in sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        job = pickle.dumps((task, payload))
        placed = _Placed(job, environment, str(Path.cwd()), path, self.changed)
        ticket = super().submit(run_placed, placed, value)  # the next test's are others'
        self._running.add(ticket)
        return ticket

    def poll(self, timeout_s: float) -> list[LeaderExit]:
        ends = super().poll(timeout_s)
        self._running -= {end.ticket for end in ends}
        return ends

    def _receive(self, timeout_s: float) -> None:
        self._failed = True
        super()._receive(timeout_s)
        self._failed = False

    def close(self) -> None:
        """Wait for the next pool; end what cannot serve one."""
        if self in self._kept:
            return
        if self._is_sound() and not self._running and len(self._kept) < _MOST_KEPT:
            self._kept.append(self)
        else:
            self.end()

    def end(self) -> None:
        """End it and everything that it started."""
        super().close()

    def _is_sound(self) -> bool:
        return self._process is not None and self._process.poll() is None and not self._failed

    @classmethod
    def end_all(cls) -> None:
        """At the end of all tests."""
        while cls._kept:
            cls._kept.pop().end()


def _needs() -> tuple[object, ...]:
    """What a process inherits for good when it is started."""
    at_import = {k: v for k, v in os.environ.items() if k.startswith(_AT_IMPORT)}
    return at_import, [resource.getrlimit(limit) for limit in _LIMITS]
