"""Starts an ``mpirun`` whose ranks are forked here.

To MPI a process is what its environment says.  So ``mpirun`` starts stand-ins that hand theirs over
(``stand_in.py``), and ranks are forked with them from a process that has imported torch: in
milliseconds, not seconds each, watched and collected by whoever forked them.  One ``mpirun`` may
serve processes on several machines (:class:`Spread`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardproof.backends.mpi import found as mpi_found
from shardproof.launch import process_control
from shardproof.launch.mpi.stand_in import DESCRIPTOR
from shardproof.launch.workspace import Workspace

#: Seconds within which all stand-ins have to come.
START_SECONDS = 60.0

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
#: Variables of a stand-in that are not for its rank.
_NOT_THEIRS = ("TMPDIR", "PWD", "OLDPWD", "SHARDPROOF_STAND_IN")
#: How variables begin that another ``mpirun`` around us has set: its ranks are not ours.
_FOREIGN = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")
_TAIL = 2000


class MpirunError(RuntimeError):
    """``mpirun`` did not start the ranks; the message holds what it said."""


@dataclass(frozen=True)
class Spread:
    """Machines over which one ``mpirun`` spreads its ranks.

    ``ranks``: how many each machine has, by its name, in order.  ``mpirun`` starts a daemon on a
    machine by ``LAUNCHER NAME COMMAND`` with the variables ``settings``, in place of ``ssh``.
    """

    ranks: Mapping[str, int]
    launcher: str
    settings: Mapping[str, str]


class Mpirun:
    """The stand-ins of ``ranks``, and the ``mpirun`` that starts them; a context manager.

    ``folder`` exists; what MPI leaves behind lies there, and whoever made it removes it.
    ``spread``: over which machines; then whoever has rank 0 starts the ``mpirun`` of all.

    :raises MpirunError: from ``with``, when it does not start.
    """

    def __init__(self, ranks: Sequence[int], folder: Path, spread: Spread | None = None) -> None:
        self._ranks, self._folder, self._spread = ranks, folder, spread
        self._connections: list[socket.socket] = []
        self._places: dict[int, tuple[dict[str, str], int | None]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        parent = os.getpid()
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        # By way of the descriptor: a socket's path has room for a hundred bytes.
        path = f"/proc/{parent}/fd/{folder}/stand-ins"
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(len(self._ranks))
                if 0 in self._ranks:
                    self._process = self._started(parent, path)
                self._meet(listener)
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(folder)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for place in self._places.values():
            if place[1] is not None:
                os.close(place[1])
        self._connections, self._places = [], {}
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    @property
    def pid(self) -> int:
        """The process of ``mpirun``; 0: it runs elsewhere."""
        return 0 if self._process is None else self._process.pid

    def become(self, rank: int) -> None:
        """Make this process, forked from the one that started ``mpirun``, its rank ``rank``."""
        variables, descriptor = self._places[rank]
        os.environ.update(variables)
        if descriptor is not None:
            os.environ[DESCRIPTOR] = str(descriptor)
        for connection in self._connections:
            connection.close()
        for other, (_, theirs) in self._places.items():
            if other != rank and theirs is not None:
                os.close(theirs)

    def _started(self, parent: int, path: str) -> subprocess.Popen[bytes]:
        found, spread = mpi_found.find(), self._spread
        if found is None:
            raise MpirunError(mpi_found.problem())
        settings = found.environment(self._folder) | {"SHARDPROOF_STAND_IN": path}
        command = found.command(len(self._ranks))
        if spread is not None:
            if reason := found.stays_on_one_machine:
                raise MpirunError(reason)
            settings |= found.launched_by(spread.launcher) | {**spread.settings}
            command = found.command(sum(spread.ranks.values()), spread.ranks)
        program = str(Path(__file__).with_name("stand_in.py"))
        return subprocess.Popen(
            [*command, sys.executable, "-I", "-S", program],
            env={k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)} | settings,
            stdin=subprocess.DEVNULL,
            stdout=(self._folder / "mpirun.out").open("wb"),
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: process_control.die_with_parent(parent),
        )

    def _meet(self, listener: socket.socket) -> None:
        """Wait for all stand-ins of these ranks."""
        deadline, count = time.monotonic() + START_SECONDS, len(self._ranks)
        listener.settimeout(0.05)
        while len(self._places) < count:
            if self._process is not None and self._process.poll() is not None:
                raise MpirunError(
                    f"mpirun ended with exit code {self._process.returncode} before "
                    f"{count} ranks had started: {self._said()}"
                )
            if time.monotonic() > deadline:
                raise MpirunError(
                    f"mpirun started {len(self._places)} of {count} ranks in "
                    f"{START_SECONDS:g} s: {self._said()}"
                )
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                self._connections.append(connection)
                connection.settimeout(START_SECONDS)
                variables, descriptor = _read(connection)
                rank = next((int(variables[name]) for name in _RANK if name in variables), -1)
                if rank not in self._ranks or rank in self._places:
                    raise MpirunError(f"mpirun started an unexpected rank {rank}: {self._said()}")
                self._places[rank] = _changed(variables), descriptor

    def _said(self) -> str:
        if self._process is None:
            return "it runs on another machine"
        lines = (self._folder / "mpirun.out").read_text("utf-8", "replace").strip()[-_TAIL:]
        return " ".join(lines.replace("-" * 10, "").split()) or "it printed nothing"


def _read(connection: socket.socket) -> tuple[dict[str, str], int | None]:
    """The environment of a stand-in, and the descriptor that it hands over."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
    size = int.from_bytes(head, "little")
    with connection.makefile("rb") as file:
        text = file.read(size)
    if len(text) < size:
        raise MpirunError("a process ended right after mpirun started it")
    pairs = (entry.partition("=") for entry in text.decode("utf-8", "surrogateescape").split("\0"))
    return {name: value for name, _, value in pairs}, next(iter(descriptors), None)


def _changed(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``mpirun`` has put into the environment."""
    return {
        name: value
        for name, value in variables.items()
        if os.environ.get(name) != value and name not in _NOT_THEIRS
    }


def problem(ranks: int) -> str:
    """Why ``mpirun`` cannot start ``ranks`` ranks here, from trying; empty: it can."""
    try:
        with Workspace() as folder, Mpirun(range(ranks), folder):
            return ""
    except MpirunError as error:
        return str(error)


def unlink_segments() -> None:
    """Remove the names of MPICH's shared memory, which all ranks have opened by now.

    A rank that is killed removes none; Open MPI's lie in the folder.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line[line.find("/") :].removesuffix(" (deleted)")
        if name.startswith("/dev/shm/mpich_"):
            Path(name).unlink(missing_ok=True)
