"""A rank process that outlives its case: runs programs one after the other, each as if first.

It is one rank, or holds all ranks of a program as threads.  Whatever a program changed in the
process is put back, as far as it is known here; a process in which something stays (a group, a
thread, an unfinished call, memory) says so, and is not used again.
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
from shardproof.launch.rank_process import (
    RankLaunch,
    exit_process,
    prepare_process,
    print_to,
    run_rank,
    run_threads,
)

#: Bytes by which a process may grow: of its memory limit a case must have most left.
MOST_GROWTH = 512 << 20


def serve(rank: int, orders: socket.socket, parent: int, log: Path) -> NoReturn:
    """Body of the process: for each file named by ``orders``, run the launch pickled in it.

    ``rank``: which one it is; where they are threads, it runs all that a launch has.  The answer is
    the exit code that a process of its own would have had, and whether nothing of the program is
    left in this one, as JSON.
    """
    code = 1
    try:
        prepare_process(parent, log, log.with_suffix(".stacks"))
        before = _State.now()
        while name := orders.recv(4096):
            code, clean = _one(rank, Path(os.fsdecode(name)), log)
            left = before.restore()
            if left:
                print(f"not used again: {left}", file=sys.stderr)
            orders.send(json.dumps([code, clean and not left]).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - last stop before the process's end
        traceback.print_exc()
    finally:
        exit_process(code)


def _one(rank: int, file: Path, log: Path) -> tuple[int, bool]:
    launch: RankLaunch = pickle.loads(file.read_bytes())
    threads = launch.backend.threads
    print_to(launch.shared_output if threads else launch.output(rank))
    armed = stacks.arm(launch.stacks(rank))
    try:
        return run_threads(launch) if threads else run_rank(launch, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        del launch
        gc.collect()
        print_to(log)
        stacks.arm(log.with_suffix(".stacks"))
        os.close(armed)


@dataclass(frozen=True)
class _State:
    """What programs change in a process without meaning to keep it."""

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
