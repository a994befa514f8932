"""The life of a rank process: join, run the program, leave a record and how it ended.

A process holds one rank, or all of them as threads.  Whatever the program does, two files tell the
leader about rank ``k`` afterwards: ``rank<k>.end`` (how it ended, if it could still say so) and its
slot of the heartbeat.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardproof import tensor_bytes
from shardproof.backends import BACKENDS, Backend, Joining, heartbeat, joined
from shardproof.launch import process_control, stacks
from shardproof.launch.mpi.mpirun import unlink_segments
from shardproof.launch.outcome import RankOutcome, of_exception
from shardproof.launch.workspace import RECORD, by_itself, says_full

Program = Callable[[int, int], Any]

#: How long a rank process that is done waits for its peers before it closes its connections: bytes
#: that it sent last may still be under way, and a reset connection would discard them.
PARTING_SECONDS = 1.0

#: Every wait ends some day: after the budget times this, in wall-clock seconds.  Nothing that may
#: still come to an end takes so long, however busy the machine.
LAST_RESORT = 20.0

exit_process = os._exit  # the real one: see _announce_exits


@dataclass(frozen=True)
class RankLaunch:
    """A program for the ranks of a fresh default group, and their limits.

    ``on`` is a backend, or its name in :data:`shardproof.backends.BACKENDS`; what
    ``program(rank, world)`` returns is packed to the ``record`` of that rank's outcome.
    ``workdir`` exists and is used by this launch only.  ``budget_s``: CPU seconds of each rank, and
    the seconds after which ranks that sleep outside of calls, with no event on any, stand still.
    ``memory_bytes`` limits the resident bytes of each rank process (some 300 MB of torch included).
    ``one_core``: ranks that are threads stay on one core; they share an interpreter, and handing it
    to another core at every operator costs CPU (results/evidence/cpu-cost.md).  ``fresh``: the
    ranks are processes that no other launch uses.  ``began``: when it started, monotonic.

    A fork inherits it; a host whose ranks are not forked by this process pickles it.

    :raises ValueError: there are no ranks, or no time.
    """

    on: str | Backend
    world: int
    program: Program
    workdir: Path
    budget_s: float
    ledgers: bool = True
    disturbances: Any = None
    memory_bytes: int | None = None
    one_core: bool = False
    fresh: bool = False
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.world < 1 or self.budget_s <= 0:
            what = f"world {self.world} and budget {self.budget_s} s must be positive"
            raise ValueError(what)

    @property
    def backend(self) -> Backend:
        """The backend that ranks join."""
        return BACKENDS[self.on] if isinstance(self.on, str) else self.on

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that run, in order."""
        return [*self.backend.ranks(self.world)]

    @property
    def timeout_s(self) -> float:
        """Wall-clock seconds after which every wait of a rank ends."""
        return self.budget_s * LAST_RESORT

    @property
    def heartbeat(self) -> Path:
        return self.workdir / "heartbeat"

    @property
    def rendezvous(self) -> Path:
        """A file for the ranks' store."""
        return self.workdir / "rendezvous"

    def record(self, rank: int) -> Path:
        """The result of the program."""
        return self.workdir / f"rank{rank}{RECORD}"

    def end(self, rank: int) -> Path:
        """How the rank ended, as it reported itself."""
        return self.workdir / f"rank{rank}.end"

    def output(self, rank: int) -> Path:
        """The output of the rank."""
        return self.workdir / f"rank{rank}.out"

    @property
    def shared_output(self) -> Path:
        """The output of native code in a process that holds all ranks."""
        return self.workdir / "ranks.out"

    def stacks(self, rank: int) -> Path:
        """Stacks of the process that holds the rank."""
        return self.workdir / ("ranks.stacks" if self.backend.threads else f"rank{rank}.stacks")


def run_process(launch: RankLaunch, ranks: Sequence[int], parent: int) -> NoReturn:
    """Body of a process that is one rank, or in which every rank is a thread."""
    code, threads = 1, launch.backend.threads
    try:
        output = launch.shared_output if threads else launch.output(ranks[0])
        prepare_process(parent, output, launch.stacks(ranks[0]))
        code, _ = run_threads(launch) if threads else run_rank(launch, ranks[0])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - last stop before the process's end
        traceback.print_exc()
    finally:
        exit_process(code)


def run_threads(launch: RankLaunch) -> tuple[int, bool]:
    """The lives of all ranks, each a thread; as :func:`run_rank`, of all."""
    # A fork leaves torch's thread pool and its autograd engine to be made anew by their first
    # users, and ranks would race for them. The engine's is whoever saves a tensor for backward.
    torch.set_num_threads(1)
    torch.ones((), requires_grad=True).exp()
    # Imports of a user's belong into the main thread: some set signal handlers, and none twice.
    getattr(launch.program, "prepare", lambda: None)()
    hub = launch.backend.hub(launch.world, launch.timeout_s)
    ends: dict[int, tuple[int, bool]] = {}

    def live(rank: int) -> None:
        ends[rank] = run_rank(launch, rank, hub)

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(launch.world)
    ]
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(launch.output(rank).open("w", buffering=1))
            for rank in range(launch.world)
        ]
        stack.enter_context(contextlib.redirect_stdout(_PerRank(files, sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_PerRank(files, sys.stderr)))
        where = process_control.on_this_core() if launch.one_core else contextlib.nullcontext()
        with where:
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
    # How a rank ended is in its file: only what ends the process itself has an exit code.
    return 0, all(finished for _, finished in ends.values())


def run_rank(launch: RankLaunch, rank: int, hub: Any = None) -> tuple[int, bool]:
    """The life of one rank; its process's exit code, and whether it left nothing unfinished.

    ``hub``: what ranks that are threads share (``Backend.hub``).
    """
    writer = heartbeat.attach(launch.heartbeat, rank, thread=hub is not None)
    try:
        where = rank, launch.world, launch.rendezvous, launch.timeout_s
        joined.join(launch.backend, Joining(*where, launch.ledgers, hub, launch.disturbances))
        if launch.backend.mpirun:
            unlink_segments()
        result = launch.program(rank, launch.world)
        tensor_bytes.dump(launch.record(rank), result)
        ended = time.monotonic() - launch.began
        writer.state(heartbeat.RETURNED)
        if hub is None:
            _wait_for_peers(launch)
        else:
            hub.rank_done(rank)
        finished = joined.leave()
        RankOutcome(rank, "ok", ended=ended).store(launch.end(rank))
        writer.state(heartbeat.DONE)
        return 0, finished
    except BaseException as error:  # noqa: BLE001 - whatever it is, it becomes this rank's outcome
        outcome = of_exception(rank, error, time.monotonic() - launch.began)
        if says_full(outcome.message):
            outcome = replace(outcome, message=by_itself(launch.workdir) + outcome.message)
        try:
            outcome.store(launch.end(rank))
        except OSError:  # nor is there room to say so, but in memory that is there already
            writer.announce_exit(f"{outcome.error_type}: {outcome.message}")
        writer.state(heartbeat.FAILED)
        if hub is not None:
            hub.fail(rank, error)
        else:
            joined.tell_failure(error)
        return 1 if outcome.exit_code is None else outcome.exit_code & 0xFF, False


def _wait_for_peers(launch: RankLaunch) -> None:
    deadline = time.monotonic() + PARTING_SECONDS
    while time.monotonic() < deadline:
        beats = heartbeat.read(launch.heartbeat)
        states = [beats[rank].state for rank in launch.ranks]
        if heartbeat.FAILED in states or all(s >= heartbeat.RETURNED for s in states):
            return
        time.sleep(0.001)


def prepare_process(parent: int, output: Path, stack_file: Path) -> None:
    """Tie this process to its parent, and its output to its files."""
    process_control.die_with_parent(parent)
    process_control.let_go()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    print_to(output)
    # Anew: the inherited objects may belong to a test runner or hold unwritten text.
    sys.stdout = _line_buffered(1)
    sys.stderr = _line_buffered(2)
    stacks.arm(stack_file)
    _announce_exits()
    gc.freeze()  # what it inherits is not looked through, and so not copied
    gc.enable()


def print_to(path: Path) -> None:
    """Append what this process prints to the file."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _line_buffered(descriptor: int) -> Any:
    return open(
        descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace"
    )


def _announce_exits() -> None:
    """Make calls that end or stop this process announce it first, in the calling rank's heartbeat.

    Among threads nothing else tells which of them it was.
    """

    def wrap(owner: Any, name: str, fatal: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def announcing(*arguments: Any) -> Any:
            notice, writer = fatal(*arguments), heartbeat.current()
            if notice and writer is not None:
                writer.announce_exit(notice)
            return original(*arguments)

        setattr(owner, name, announcing)

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
    signal.Signals[f"SIG{name}"]
    for name in (
        *("KILL", "STOP", "TERM", "INT", "HUP", "ABRT"),
        *("SEGV", "BUS", "FPE", "ILL", "TSTP", "QUIT"),
    )
)


class _PerRank(io.TextIOBase):
    """A standard stream that sends what a rank's thread prints to that rank's file."""

    def __init__(self, files: list[Any], other: Any) -> None:
        super().__init__()
        self._files = files
        self._other = other

    def _target(self) -> Any:
        writer = heartbeat.current()
        return self._other if writer is None else self._files[writer.rank]

    def write(self, text: str) -> int:
        return int(self._target().write(text))

    def flush(self) -> None:
        self._target().flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The process's own descriptor, as native code sees it."""
        return int(self._other.fileno())
