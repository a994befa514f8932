"""A rank process that outlives its case: runs programs one after the other, each as if first.

Whatever a program changed in the process is put back, as far as it is known here; a process in
which something stays (a group, a thread, an unfinished call) says so, and is not used again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist

from shardproof.launch import process_control, stacks
from shardproof.launch.rank_process import RankLaunch, exit_process, prepare_process, run_rank


@dataclass(frozen=True)
class Done:
    """What a rank says after a program: the exit code that its process would have had.

    ``clean``: nothing of the program is left in the process.
    """

    rank: int
    code: int
    clean: bool

    def message(self) -> bytes:
        return json.dumps([self.rank, self.code, self.clean]).encode()

    @classmethod
    def read(cls, message: bytes) -> Done:
        return cls(*json.loads(message))


def serve(rank: int, orders: socket.socket, parent: int, log: Path) -> NoReturn:
    """Body of the process: for each file named by ``orders``, run the launch pickled in it."""
    code = 1
    try:
        prepare_process(parent, log, log.with_suffix(".stacks"))
        before = _State.now()
        while name := orders.recv(4096):
            done = _one(rank, Path(os.fsdecode(name)), log)
            left = before.restore()
            if left:
                print(f"not used again: {left}", file=sys.stderr)
            orders.send(Done(rank, done.code, done.clean and not left).message())
        code = 0
    except BaseException:  # noqa: BLE001 - last stop before the process's end
        traceback.print_exc()
    finally:
        exit_process(code)


def _one(rank: int, file: Path, log: Path) -> Done:
    launch: RankLaunch = pickle.loads(file.read_bytes())
    _print_to(launch.output(rank))
    armed = stacks.arm(launch.stacks(rank))
    try:
        code, finished = run_rank(launch, rank, None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        del launch
        gc.collect()
        _print_to(log)
        stacks.arm(log.with_suffix(".stacks"))
        os.close(armed)
    return Done(rank, code, finished)


def _print_to(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


@dataclass(frozen=True)
class _State:
    """What programs change in a process without meaning to keep it."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    draws: tuple[Any, Any, Any]
    dtype: torch.dtype
    threads: int

    @classmethod
    def now(cls) -> _State:
        draws = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        return cls(dict(os.environ), str(Path.cwd()), list(sys.path), draws, dtype, threads)

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
        return f"threads {', '.join(others)}" if others else ""
