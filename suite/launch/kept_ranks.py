"""Rank processes that a leader keeps for its next cases.

Forked for the first case that may use them: one for all ranks where ranks are threads, one a rank
otherwise; those of MPI with an ``mpirun`` for each world size.  They end with their leader, after a
case that does not hold, and when something is left in them.  What a fork
costs again and again, above all pages that are copied when they are touched, is paid once.

Such a process is one rank, or holds all ranks of a program as threads, and runs programs one after
the other, each as if first.  Whatever a program changed in it is put back, as far as it is known
here; a process in which something stays (a group, a thread, an unfinished call, memory) says so,
and is not used again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist

from shardproof.launch import process_control, rank_process, stacks
from shardproof.launch.diagnosis import RankProcess
from shardproof.launch.mpi.mpirun import Mpirun, MpirunError
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import NotLent, ProcessHost

#: Bytes by which a process may grow: of its memory limit a case must have most left.
MOST_GROWTH = 512 << 20


@dataclass
class _Service:
    """A process that waits for orders; ``handle`` becomes readable when it ends."""

    pid: int
    orders: Connection
    handle: int | None
    #: Whether it lives, and nothing is left in it.
    fit: bool = True
    collected: bool = False

    def status(self) -> int | None:
        """The wait status that it would have ended with after its order; ``None``: not yet."""
        with contextlib.suppress(EOFError, OSError):  # it ends
            if self.orders.poll():
                code, clean = self.orders.recv()
                self.fit = clean and code == 0
                return int(code) << 8
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.fit, self.collected = False, True
        return status

    def end(self) -> None:
        """Kill it, if it still lives."""
        if not self.collected:
            process_control.kill(self.pid)
            os.waitpid(self.pid, 0)
        process_control.STAYING.discard(self.pid)
        self.orders.close()
        if self.handle is not None:
            os.close(self.handle)


@dataclass
class _Group:
    """Services of one backend, rank by rank, whose logs are named after ``place``.

    ``world``: an ``mpirun`` of so many ranks gives them their places; 0: none does.
    """

    place: Path
    world: int
    services: list[_Service] = field(default_factory=list)
    _mpirun: Mpirun | None = None
    _until_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def grow(self, count: int) -> None:
        """Fork services until there are ``count``.

        :raises MpirunError: ``mpirun`` does not start.
        """
        if self.world and not self.services:
            # A new folder for each mpirun: one that is killed leaves its sockets and files.
            folder = tempfile.mkdtemp(prefix=f"{self.place.name}-", dir=self.place.parent)
            self._until_end.callback(shutil.rmtree, folder, ignore_errors=True)
            mpirun = Mpirun(range(self.world), Path(folder))
            self._mpirun = self._until_end.enter_context(mpirun)
            process_control.STAYING.add(mpirun.pid)
            self._until_end.callback(process_control.STAYING.discard, mpirun.pid)
        while len(self.services) < count:
            self._fork(len(self.services))

    def _fork(self, rank: int) -> None:
        parent = os.getpid()
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            if self._mpirun is not None:
                self._mpirun.become(rank)
            serve(rank, theirs, parent, self.place.with_name(f"{self.place.name}-{rank}.log"))
        theirs.close()
        process_control.STAYING.add(pid)
        self.services.append(_Service(pid, ours, process_control.handle_of(pid)))

    def end(self) -> None:
        """End them all; the next launch forks others."""
        for service in self.services:
            service.end()
        self.services.clear()
        self._mpirun = None
        self._until_end.close()


class Kept(ProcessHost):
    """Ranks that this process keeps, by backend; ``folder`` holds their logs and what MPI leaves.

    A leader has one: the hosts of all its cases are unpickled to the same object.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: dict[tuple[str, int], _Group] = {}
        self._used: list[_Group] = []
        self._lent: dict[int, _Service] = {}

    def __reduce__(self) -> tuple[Callable[[Path], Kept], tuple[Path]]:
        return of_this_process, (self._folder,)

    def start(self, launch: RankLaunch) -> list[RankProcess]:
        """Lend the processes of ``launch``, forked if they are not there yet.

        :raises NotLent: the launch wants fresh ones, one has ended, or ``mpirun`` does not start.
        """
        self._lent = {}
        if launch.fresh or len(launch.ranks) < launch.world:
            raise NotLent("this launch cannot reuse processes: it must start new ones")
        backend, world = launch.backend, launch.world
        key = backend.name, world if backend.mpirun else 0
        if key not in self._groups:
            place = self._folder / f"ranks-of-{os.getpid()}-{len(self._groups)}"
            self._groups[key] = _Group(place, key[1])
        group = self._groups[key]
        self._used.append(group)
        order = pickle.dumps(launch)
        count = 1 if backend.threads else world
        try:
            group.grow(count)
            self._lent = {service.pid: service for service in group.services[:count]}
            for service in self._lent.values():
                service.orders.send_bytes(order)
        except (OSError, MpirunError) as error:
            group.end()
            self._lent = {}
            raise NotLent(
                f"a rank process has ended before this case could reuse it: {error}"
            ) from error
        if backend.threads:
            return [RankProcess(pid, tuple(range(world))) for pid in self._lent]
        return [RankProcess(pid, (rank,)) for rank, pid in enumerate(self._lent)]

    def descriptors(self, alive: Sequence[RankProcess]) -> list[int]:
        """The descriptors that become readable when one is done or has ended."""
        services = [self._lent[process.pid] for process in alive]
        handles = [service.handle for service in services if service.handle is not None]
        return [*(service.orders.fileno() for service in services), *handles]

    def status(self, process: RankProcess) -> int | None:
        """The wait status that a process of its own would have ended with; ``None``: not yet."""
        return self._lent[process.pid].status()

    def close(self, alive: Sequence[RankProcess]) -> None:
        """End those that are not done, and the whole group if something is left in one."""
        for process in alive:
            self._lent[process.pid].fit = False
        if not all(service.fit for service in self._lent.values()):
            self._used[-1].end()

    def settle(self, held: bool) -> None:
        """End the groups that the case used, unless it ``held``."""
        for group in () if held else self._used:
            group.end()
            if process_control.is_subreaper():
                process_control.end_adopted(process_control.STAYING)
        self._used.clear()


@functools.cache
def of_this_process(folder: Path) -> Kept:
    """The kept ranks of this leader."""
    return Kept(folder)


def serve(rank: int, orders: Connection, parent: int, log: Path) -> NoReturn:
    """Body of the process: run each launch that ``orders`` brings, pickled.

    ``rank``: which one it is; where they are threads, it runs all that a launch has.  The answer is
    the exit code that a process of its own would have had, and whether nothing of the program is
    left in this one.
    """
    code = 1
    try:
        rank_process.prepare_process(parent, log, log.with_suffix(".stacks"))
        before = _State.now()
        while True:
            ended, clean = _one(rank, orders.recv_bytes(), log)
            if left := before.restore():
                print(f"not used again: {left}", file=sys.stderr)
            orders.send((ended, clean and not left))
    except EOFError:
        code = 0
    except BaseException:  # noqa: BLE001 - last stop before the process's end
        traceback.print_exc()
    finally:
        rank_process.exit_process(code)


def _one(rank: int, order: bytes, log: Path) -> tuple[int, bool]:
    launch: RankLaunch = pickle.loads(order)
    threads = launch.backend.threads
    rank_process.print_to(launch.shared_output if threads else launch.output(rank))
    armed = stacks.arm(launch.stacks(rank))
    try:
        return rank_process.run_threads(launch) if threads else rank_process.run_rank(launch, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        del launch
        gc.collect()
        rank_process.print_to(log)
        stacks.arm(log.with_suffix(".stacks"))
        os.close(armed)


@dataclass(frozen=True)
class _State:
    """The state of a process that programs change without meaning to keep it."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    draws: tuple[Any, Any, Any]
    dtype: torch.dtype
    threads: int
    resident: int

    @classmethod
    def now(cls) -> _State:
        draws = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        resident = process_control.resident_bytes(os.getpid())
        return cls(
            dict(os.environ), str(Path.cwd()), list(sys.path), draws, dtype, threads, resident
        )

    def restore(self) -> str:
        """Put it back; what is left nevertheless, in words."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        torch.set_rng_state(self.draws[0])
        random.setstate(self.draws[1])
        numpy.random.set_state(self.draws[2])
        torch.set_default_dtype(self.dtype)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        process_control.end_adopted(())  # processes that it started
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                return f"the process group {dist.get_backend()}"
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        if others:
            return f"threads {', '.join(others)}"
        grown = process_control.resident_bytes(os.getpid()) - self.resident
        return f"{grown >> 20} MiB" if grown > MOST_GROWTH else ""
