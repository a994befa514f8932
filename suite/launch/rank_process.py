"""What happens inside a rank process: join, run the program, leave a record and an account.

A process holds one rank, or all of them as threads.  Whatever the program does, two files tell the
leader about rank ``k`` afterwards: ``rank<k>.end`` (how it ended, if it could still say so) and its
slot of the heartbeat.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from shardproof import tensor_bytes
from shardproof.files import write_whole
from shardproof.launch import heartbeat, process_control, stacks
from shardproof.launch.outcome import RankOutcome, of_exception

Program = Callable[[int, int], dict[str, Any]]

#: How long a rank process that is done waits for its peers before it closes its connections: bytes
#: that it sent last may still be under way, and a reset connection would discard them.
PARTING_SECONDS = 1.0

_exit = os._exit  # the real one: see _confess


class Hub(Protocol):
    """What ranks that are threads share."""

    def fail(self, rank: int, error: BaseException) -> None:
        """Wake all ranks: ``rank`` was left by ``error``."""

    def rank_done(self, rank: int) -> None:
        """``rank`` will make no more calls."""


class Link(Protocol):
    """A backend as the launcher needs it."""

    @property
    def threads(self) -> bool:
        """Whether ranks are threads of one process."""

    def hub(self, world: int, timeout_s: float) -> Any:
        """What the ranks share, made once before the threads start; processes ignore it."""

    def join(self, rank: int, plan: Plan, hub: Any) -> None:
        """Initialise the default process group of the calling rank."""

    def leave(self) -> None:
        """Destroy it."""


@dataclass(frozen=True)
class Plan:
    """All that a rank process needs; inherited by the fork, hence no need to pickle."""

    link: Link
    world: int
    program: Program
    workdir: Path
    timeout_s: float
    ledgers: bool
    disturbances: Any
    began: float

    @property
    def pulse(self) -> Path:
        """The heartbeat file."""
        return self.workdir / "heartbeat"

    @property
    def rendezvous(self) -> Path:
        """A file for the ranks' store."""
        return self.workdir / "rendezvous"

    def record(self, rank: int) -> Path:
        """What the program returned."""
        return self.workdir / f"rank{rank}.rec"

    def end(self, rank: int) -> Path:
        """How the rank ended, by its own account."""
        return self.workdir / f"rank{rank}.end"

    def output(self, rank: int) -> Path:
        """What the rank printed."""
        return self.workdir / f"rank{rank}.out"

    @property
    def shared_output(self) -> Path:
        """What native code printed in a process that holds all ranks."""
        return self.workdir / "ranks.out"

    def stacks(self, rank: int) -> Path:
        """Stacks of the process that holds the rank."""
        return self.workdir / ("ranks.stacks" if self.link.threads else f"rank{rank}.stacks")


def run_process(plan: Plan, rank: int, parent: int) -> NoReturn:
    """Body of a process that is rank ``rank``."""
    code = 1
    try:
        _settle_in(plan, parent, plan.output(rank), plan.stacks(rank))
        code = _live(plan, rank, None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - last stop before the process's end
        traceback.print_exc()
    finally:
        _exit(code)


def run_threads(plan: Plan, parent: int) -> NoReturn:
    """Body of the process in which every rank is a thread."""
    code = 1
    try:
        _settle_in(plan, parent, plan.shared_output, plan.stacks(0))
        files = [plan.output(rank).open("w", buffering=1) for rank in range(plan.world)]
        sys.stdout = _PerRank(files, sys.stdout)
        sys.stderr = _PerRank(files, sys.stderr)
        hub = plan.link.hub(plan.world, plan.timeout_s)
        # A fork leaves torch's thread pool and its autograd engine to be made anew by their first
        # users, and ranks would race for them. The engine's is whoever saves a tensor for backward.
        torch.set_num_threads(1)
        torch.ones((), requires_grad=True).exp()
        threads = [
            threading.Thread(target=_live, args=(plan, rank, hub), name=f"rank{rank}", daemon=True)
            for rank in range(plan.world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for file in files:
            file.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - last stop before the process's end
        traceback.print_exc()
    finally:
        _exit(code)


def _live(plan: Plan, rank: int, hub: Hub | None) -> int:
    """The life of one rank; returns the exit code of its process."""
    pulse = heartbeat.attach(plan.pulse, rank, thread=hub is not None)
    try:
        plan.link.join(rank, plan, hub)
        result = plan.program(rank, plan.world)
        tensor_bytes.dump(plan.record(rank), result)
        ended = time.monotonic() - plan.began
        pulse.state(heartbeat.RETURNED)
        if hub is None:
            _wait_for_peers(plan)
        else:
            hub.rank_done(rank)
        plan.link.leave()
        _account(plan, RankOutcome(rank, "ok", ended=ended))
        pulse.state(heartbeat.DONE)
        return 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it becomes this rank's outcome
        outcome = of_exception(rank, error, time.monotonic() - plan.began)
        _account(plan, outcome)
        pulse.state(heartbeat.FAILED)
        if hub is not None:
            hub.fail(rank, error)
        return 1 if outcome.exit_code is None else outcome.exit_code & 0xFF


def _account(plan: Plan, outcome: RankOutcome) -> None:
    told = ("status", "error_type", "message", "traceback", "is_comm_error", "consequence")
    fields = {name: getattr(outcome, name) for name in (*told, "exit_code", "ended", "blames")}
    write_whole(plan.end(outcome.rank), json.dumps(fields))


def _wait_for_peers(plan: Plan) -> None:
    deadline = time.monotonic() + PARTING_SECONDS
    while time.monotonic() < deadline:
        states = [beat.state for beat in heartbeat.read(plan.pulse)]
        if heartbeat.FAILED in states or all(s >= heartbeat.RETURNED for s in states):
            return
        time.sleep(0.001)


def _settle_in(plan: Plan, parent: int, output: Path, stack_file: Path) -> None:
    """Tie this process to its parent, and its output to its files."""
    process_control.die_with_parent(parent)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    os.close(nothing)
    # Anew: the inherited objects may belong to a test runner or hold unwritten text.
    sys.stdout = _line_buffered(1)
    sys.stderr = _line_buffered(2)
    stacks.arm(stack_file)
    _confess()
    gc.enable()


def _line_buffered(descriptor: int) -> Any:
    return open(
        descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace"
    )


def _confess() -> None:
    """Have calls that end or stop this process say so first, in the heartbeat of the calling rank.

    Among threads nothing else tells which of them it was.
    """

    def wrap(owner: Any, name: str, fatal: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def confessing(*arguments: Any) -> Any:
            words, pulse = fatal(*arguments), heartbeat.current()
            if words and pulse is not None:
                pulse.last_words(words)
            return original(*arguments)

        setattr(owner, name, confessing)

    def by_signal(name: str, own: tuple[int, ...]) -> Callable[..., str]:
        def fatal(target: int, signum: int) -> str:
            hits = int(target) in own and int(signum) in _ENDING
            return f"{name}({process_control.signal_name(signum)})" if hits else ""

        return fatal

    me, group = os.getpid(), os.getpgrp()
    wrap(os, "_exit", lambda code: f"os._exit({code})")
    wrap(os, "abort", lambda: "os.abort()")
    wrap(os, "kill", by_signal("os.kill", (me, 0, -group)))
    wrap(os, "killpg", by_signal("os.killpg", (group, 0)))
    raised = by_signal("signal.raise_signal", (me,))
    wrap(signal, "raise_signal", lambda signum: raised(me, signum))


_ENDING = frozenset(
    (
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGABRT,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTSTP,
        signal.SIGQUIT,
    )
)


class _PerRank(io.TextIOBase):
    """A standard stream that sends what a rank's thread prints to that rank's file."""

    def __init__(self, files: list[Any], other: Any) -> None:
        super().__init__()
        self._files = files
        self._other = other

    def _target(self) -> Any:
        pulse = heartbeat.current()
        return self._other if pulse is None else self._files[pulse.rank]

    def write(self, text: str) -> int:
        """Write to the calling rank's file."""
        return int(self._target().write(text))

    def flush(self) -> None:
        """Flush the calling rank's file."""
        self._target().flush()

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The process's own descriptor, as native code sees it."""
        return int(self._other.fileno())
