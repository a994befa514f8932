"""What the launcher's tests run: rank programs that misbehave, and tasks of leaders."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof import tensor_bytes
from shardproof.backends import heartbeat
from shardproof.backends.backend import Backend, Joining
from shardproof.backends.errors import RankFailed
from shardproof.launch import kept_ranks, outcome, process_control
from shardproof.launch.fork_server_main import MOST_GROWTH
from shardproof.launch.kept_ranks import Kept
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import Forked, root_cause

GUILTY = 1


class FakeHub:
    """A barrier that a failing or finished rank breaks."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(world)
        self.timeout_s = timeout_s
        self.failed: int | None = None

    def fail(self, rank: int, error: BaseException) -> None:
        """Wake all."""
        if self.failed is None:
            self.failed = rank
        self.barrier.abort()

    def rank_done(self, rank: int) -> None:
        """Nothing to do: the barrier's users come equally often."""


class FakeLink(Backend):
    """Ranks as threads that can only meet: shows that the launcher needs no torch backend."""

    name, threads = "fake", True
    _here = threading.local()

    def available(self, world: int = 1) -> str | None:
        """Anywhere."""
        return None

    def hub(self, world: int, timeout_s: float) -> FakeHub:
        """Shared by all ranks."""
        return FakeHub(world, timeout_s)

    def join(self, joining: Joining) -> None:
        """Remember where this rank meets the others."""
        self._here.hub = joining.hub

    def leave(self) -> bool:
        """Forget it."""
        del self._here.hub
        return True

    @classmethod
    def meet(cls) -> None:
        """Wait for all ranks."""
        heartbeat.note("meet")
        try:
            cls._here.hub.barrier.wait(cls._here.hub.timeout_s)
        except threading.BrokenBarrierError:
            failed = cls._here.hub.failed
            raise RankFailed(f"rank {failed} failed", rank=failed) from None


def _loop() -> None:
    while True:
        pass


def _explode() -> None:
    raise ValueError("the guilty rank's own error")


class Unsayable(RuntimeError):
    """Has no message."""

    def __str__(self) -> str:
        raise KeyError("none")


def _raise_without_words() -> None:
    raise Unsayable


def _raise_with_too_many() -> None:
    raise ValueError("x" * (4 << 20))


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)  # a thread may run on for a moment while the signal reaches its process


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)


def _leave_a_daemon_and_die() -> None:
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True
    )
    os._exit(0)


def _print_without_end() -> None:
    while True:
        sys.stdout.write("x" * 100_000 + "\n")


def _eat() -> None:
    eaten = []
    while True:
        eaten.append(torch.ones(1 << 20))
        time.sleep(0.001)


def _find_the_disk_full(*_: object) -> None:
    """Nothing can be written any more, not even how the rank ended."""
    outcome.write_whole = _find_the_disk_full  # type: ignore[attr-defined]
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": _explode,
    "unsayable": _raise_without_words,
    "long": _raise_with_too_many,
    "sys_exit": lambda: sys.exit(7),
    "os_exit": lambda: os._exit(3),
    "kill_self": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop_self": _stop,
    "abort": lambda: os.abort(),  # looked up when called, as rank programs do
    "segfault": lambda: ctypes.string_at(1),
    "loop": _loop,
    "sleep": lambda: ctypes.CDLL(None).sleep(1000),
    "hold": _hold_the_interpreter,
    "daemon": _leave_a_daemon_and_die,
    "print": _print_without_end,
    "eat": _eat,
    "full_disk": _find_the_disk_full,
}


def program(fault: str) -> Callable[[int, int], dict[str, Any]]:
    """Two all-reduces with the fault of rank 1 between them."""

    def run(rank: int, world: int) -> dict[str, Any]:
        print(f"hello from rank {rank}")
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        if rank == GUILTY:
            if fault == "early":
                return {"total": total}
            if fault == "unpackable":
                return {"value": object()}
            if fault != "none":
                FAULTS[fault]()
        dist.all_reduce(total)
        return {"rank": rank, "total": total}

    return run


def mismatched(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 reduces another number of elements."""
    dist.all_reduce(torch.ones(5 if rank == GUILTY else 4))
    return {}


def meeting(rank: int, world: int) -> dict[str, Any]:
    """For the fake link."""
    FakeLink.meet()
    if rank == GUILTY:
        _explode()
    FakeLink.meet()
    return {}


def absent(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 does not come to the making of a group."""
    if rank == 1:
        time.sleep(1000)
    dist.new_group([*range(world)])
    return {}


def kernels(rank: int, world: int) -> dict[str, Any]:
    """What this rank computes with."""
    print(torch.backends.cpu.get_cpu_capability(), os.environ.get("MKL_CBWR"))
    return {}


def cores(rank: int, world: int) -> dict[str, Any]:
    """What this rank may run on."""
    print(*os.sched_getaffinity(0))
    return {}


def trial(payload: dict[str, Any]) -> None:
    """Leader's task: run the ranks and write what became of them."""
    workdir = Path(payload["workdir"])
    backend: Any = payload["backend"]
    fault = payload["fault"]
    programs = {
        "mismatch": mismatched,
        "meeting": meeting,
        "kernels": kernels,
        "absent": absent,
        "cores": cores,
    }
    chosen = programs.get(fault)
    began = time.monotonic()
    launch = RankLaunch(
        FakeLink() if backend == "fake" else backend,
        payload["world"],
        chosen or program(fault),
        workdir,
        payload["budget"],
        payload.get("ledgers", True),
        memory_bytes=payload.get("memory_bytes"),
        one_core=payload.get("one_core", False),
    )
    outcomes = Forked().run(launch)
    cause = root_cause(outcomes)
    result = {
        "outcomes": [
            {**dataclasses.asdict(o), "record": o.record and str(o.record)} for o in outcomes
        ],
        "cause": None if cause is None else cause.rank,
        "sentence": None if cause is None else cause.sentence(),
        "seconds": time.monotonic() - began,
        "children": len(process_control.children()),
    }
    (workdir / "result.json").write_text(json.dumps(result))


@dataclasses.dataclass(frozen=True)
class Told:
    """A rank program that another process can be sent: two sums, and what it saw and left."""

    leave: str

    def __call__(self, rank: int, world: int) -> dict[str, Any]:
        """``seen`` is what an earlier program may have left."""
        print(f"hello from rank {rank}")
        seen = [os.environ.get("LEFT", ""), str(torch.get_default_dtype()), torch.rand(()).item()]
        total = torch.tensor([float(rank + 1)], dtype=torch.float64)
        dist.all_reduce(total)
        if rank == 0:
            {**FAULTS, **LEFT}.get(self.leave, int)()
        dist.all_reduce(total)
        return {"pid": os.getpid(), "seen": seen, "total": total.item()}


#: What a program leaves in its process: what is put back, and what cannot be.
LEFT: dict[str, Callable[[], Any]] = {
    "state": lambda: (os.environ.update(LEFT="1"), torch.set_default_dtype(torch.float64)),
    "thread": lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(),
    "memory": lambda: HELD.append(torch.ones(kept_ranks.MOST_GROWTH // 4)),
}
HELD: list[torch.Tensor] = []


def in_kept_ranks(payload: dict[str, Any]) -> list[Any]:
    """Leader's task: for each ``(backend, world, leave)`` what ranks told that are kept between."""
    kept, told = Kept(Path(payload["folder"])), []
    for number, (backend, world, leave) in enumerate(payload["launches"]):
        folder = Path(payload["folder"]) / str(number)
        folder.mkdir()
        outcomes = kept.run(RankLaunch(backend, world, Told(leave), folder, 20.0))
        if leave == "gone":
            process_control.kill(pid := max(process_control.STAYING))
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        kept.settle(held=leave != "a case that did not hold")
        told.append(
            [
                [
                    o.status,
                    tensor_bytes.load(o.record) if o.record else f"{o.message}\n{o.traceback}",
                ]
                for o in outcomes
            ]
        )
        (folder / "children").write_text(str(len(process_control.children())))
    return told


def threads(payload: dict[str, Any]) -> None:
    """Leader's task: how many threads a leader starts with, and which modules it finds."""
    found = {"threads": process_control.thread_count(), "modules": sorted(sys.modules)}
    Path(payload["file"]).write_text(json.dumps(found))


def sleep(payload: dict[str, Any]) -> None:
    """Leader's task: be busy."""
    time.sleep(payload["seconds"])


def endless(payload: dict[str, Any]) -> None:
    """Leader's task: with a child in another session, for ever."""
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True
    )
    time.sleep(1000)


def crash(payload: dict[str, Any]) -> None:
    """Leader's task: die, leaving a child in another session."""
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True
    )
    ctypes.string_at(1)


def double(payload: dict[str, Any]) -> list[int]:
    """Leader's task: return something."""
    return [2 * payload["number"]]


def who(payload: dict[str, Any]) -> int:
    """Leader's task: tell which process it is, having left something behind if it is told to."""
    print(payload.get("print", ""), end="")
    match payload.get("leave"):
        case "thread":
            threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
        case "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        case "memory":
            _left.append(b"x" * (MOST_GROWTH + 1))
        case "error":
            raise ValueError(payload.get("print", ""))
        case "death":
            os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


_left: list[bytes] = []


def fail(payload: dict[str, Any]) -> None:
    """Leader's task: raise."""
    raise ValueError("the task's own error")


def kill_fork_server(payload: dict[str, Any]) -> None:
    """Leader's task: take the fork server along."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
