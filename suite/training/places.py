"""Where the ranks of a training run: threads of this process, or processes forked from it.

A rank that another launcher started (torchrun, mpirun, a container's or a cluster's) needs neither:
it joins, and trains.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from shardproof.axes import replicas
from shardproof.backends import Backend, Joining, joined
from shardproof.comm import Mesh
from shardproof.errors import LaunchError, Problem
from shardproof.launch import process_control
from shardproof.launch.outcome import RankOutcome, mark_consequences, of_exception, root_cause
from shardproof.training.world import World, settle

#: Returns what a rank gives back; called on every rank, in its world.
Program = Callable[[World], Any]
#: Seconds that ranks have to end when another one has failed.
GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.01


class TrainingFailed(RuntimeError):
    """A rank failed; the message has its number, its error and its traceback."""


def run(backend: Backend, world: int, program: Program, timeout: float) -> list[Any]:
    """Run ``program`` on ``world`` ranks of ``backend``; what each returned, in order.

    :raises LaunchError: ranks of this backend can only be started by a launcher.
    :raises TrainingFailed: a rank failed in a way that it could not hand over.
    """
    if backend.mpirun:
        remedy = f"start the script by mpirun: mpirun -n {world} python {sys.argv[0] or 'train.py'}"
        raise LaunchError(Problem("this backend needs mpirun", remedy, backend.name))
    if backend.threads:
        return in_threads(backend, world, program, timeout)
    if backend.device != "cpu" and torch.cuda.is_initialized():
        remedy = f"use torchrun: torchrun --nproc-per-node {world} {sys.argv[0] or 'train.py'}"
        raise LaunchError(
            Problem("this process already uses the GPU, so it cannot fork ranks", remedy)
        )
    return in_processes(backend, world, program, timeout)


def in_threads(backend: Backend, world: int, program: Program, timeout: float) -> list[Any]:
    """Each rank is a thread."""
    hub = backend.hub(world, timeout)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    outcomes: list[RankOutcome] = []
    began, none = time.monotonic(), Path()

    def live(rank: int) -> None:
        try:
            joined.join(backend, Joining(rank, world, none, timeout, False, hub))
            results[rank] = _in_world(backend, world, program)
            hub.rank_done(rank)
            joined.leave()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors[rank] = error
            outcomes.append(of_exception(rank, error, time.monotonic() - began))
            hub.fail(rank, error)

    threads = [
        threading.Thread(target=live, args=(r,), name=f"rank{r}", daemon=True) for r in range(world)
    ]
    with _single_threaded():
        torch.ones((), requires_grad=True).exp()  # or ranks would race for autograd's engine
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if cause := root_cause(mark_consequences(outcomes)):
        raise errors[cause.rank]
    return [results[rank] for rank in range(world)]


def _in_world(backend: Backend, world: int, program: Program) -> Any:
    return program(settle(Mesh(replicas(world), device=backend.device), owns_group=False))


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Ranks share the cores, so an operator of one of them takes a single one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_processes(backend: Backend, world: int, program: Program, timeout: float) -> list[Any]:
    """Each rank is a fork of this process, so that model, loss and data need not be pickled."""
    with tempfile.TemporaryDirectory(prefix="shardproof-training-") as name:
        folder, parent, began = Path(name), os.getpid(), time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        alive: dict[int, int] = {}
        ended: dict[int, float] = {}
        failed_at = float("inf")
        try:
            for rank in range(world):
                with warnings.catch_warnings():
                    # Threads of OpenMP are not there after a fork; a rank computes on one.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if pid == 0:
                    _rank(folder, parent, (backend, rank, world, program, timeout), began)
                alive[pid] = rank
            while alive:
                for pid, rank in list(alive.items()):
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if not found:
                        continue
                    del alive[pid]
                    ended[rank] = time.monotonic() - began
                    if status:
                        failed_at = min(failed_at, time.monotonic())
                        _note_end(folder, rank, os.waitstatus_to_exitcode(status), ended[rank])
                if time.monotonic() - failed_at > GRACE_SECONDS:
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            for pid in alive:
                process_control.kill(pid)
                os.waitpid(pid, 0)
        return _results(folder, world)


def _rank(folder: Path, parent: int, where: Any, began: float) -> NoReturn:
    """The life of a forked rank."""
    backend, rank, world, program, timeout = where
    code = 1
    try:
        process_control.die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends all
        torch.set_num_threads(1)
        joined.join(backend, Joining(rank, world, folder / "rendezvous", timeout, ledgers=False))
        result = _in_world(backend, world, program)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        joined.leave()
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
        of_exception(rank, error, time.monotonic() - began).store(folder / f"{rank}.end")
        with contextlib.suppress(Exception):
            told = pickle.dumps(error)
            if str(pickle.loads(told)) == str(error):  # some take other arguments than they keep
                (folder / f"{rank}.error").write_bytes(told)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _note_end(folder: Path, rank: int, code: int, ended: float) -> None:
    """How a rank ended that could not say so itself."""
    file = folder / f"{rank}.end"
    if not file.exists():
        what = {"signal": -code} if code < 0 else {"exit_code": code}
        status = "killed" if code < 0 else "exited"
        message = process_control.signal_name(-code) if code < 0 else ""
        RankOutcome(rank, status, message=message, ended=ended, **what).store(file)  # type: ignore[arg-type]


def _results(folder: Path, world: int) -> list[Any]:
    outcomes = [
        RankOutcome.stored(file) for r in range(world) if (file := folder / f"{r}.end").exists()
    ]
    cause = root_cause(mark_consequences(outcomes))
    if cause is None:
        files = [folder / f"{rank}.result" for rank in range(world)]
        # Not a checkpoint: ranks that this process forked wrote them, in its own private folder.
        return [pickle.loads(file.read_bytes()) for file in files]
    report = TrainingFailed(f"{cause.sentence()}\n{cause.traceback}".rstrip())
    error: Any = None
    with contextlib.suppress(Exception):
        error = pickle.loads((folder / f"{cause.rank}.error").read_bytes())
    # Bad input keeps its type, whatever the place: the message has the remedy.
    raise error if isinstance(error, ValueError) else report
