"""Inside the fork server: import once, stay single-threaded, fork leaders, collect them.

Run as ``python -m shardproof.launch.fork_server_main``; ``launch.fork_server.ForkServer`` is the
other end and defines the messages.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import resource
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

from shardproof.backends import cuda
from shardproof.files import fast_json, write_whole
from shardproof.launch import fork_server, process_control

#: What a training step would otherwise import lazily, in every rank of every case.
LAZY_MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.optim.adamw",
    "torch.optim.sgd",
    "torch.utils.checkpoint",
)
#: Seconds that everything has to die when the parent goes.
END_SECONDS = 2.5
#: Exit code of a leader whose task raised.
TASK_RAISED = 70
#: Tasks of a leader that is kept, and bytes that it may have grown by.
MOST_TASKS = 60
MOST_GROWTH = 256 << 20

_TAIL = 4000


@dataclass
class _Leader:
    ticket: int | None  #: ``None``: it waits for a task
    pid: int
    began: float
    output: int
    line: Connection  #: further tasks go out, and it says when one is done
    group: str | None
    watched: process_control.Watched
    why: str = ""  #: it was ended for


class _Server:
    def __init__(self, connection: Connection, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._leaders: dict[int, _Leader] = {}  # by pid
        self._wakeup, writing = os.pipe()
        for descriptor in (self._wakeup, writing):
            os.set_blocking(descriptor, False)
        for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._ending = False
        self._importing = False
        self._selector = selectors.DefaultSelector()

    def _on_signal(self, signum: int, _: object) -> None:
        # SIGHUP also comes when merely the *thread* that started us ends: the loop looks further.
        self._ending = self._ending or signum == signal.SIGTERM
        if self._importing and os.getppid() != self._parent:
            raise SystemExit  # torch takes seconds: nobody is left to wait for it

    def run(self) -> None:
        """Serve until the parent goes; then end everything."""
        process_control.become_subreaper()
        try:
            self._load()
            self._selector.register(self._connection, selectors.EVENT_READ)
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            while not self._ending and os.getppid() == self._parent:
                ready = {key.fd: key.data for key, _ in self._selector.select(1.0)}
                if self._wakeup in ready:
                    os.read(self._wakeup, 4096)
                for leader in filter(None, ready.values()):
                    self._hear(leader)
                if self._connection.fileno() in ready:
                    for message in fork_server.receive(self._connection, 0.0):
                        self._handle(message)
                self._end_stopped()
                self._collect()
        except EOFError:
            pass  # the parent has closed the connection: the end
        finally:
            for leader in self._leaders.values():
                process_control.kill_group(leader.pid)
            process_control.end_adopted((), within_s=END_SECONDS)

    def _load(self) -> None:
        self._importing = True
        try:
            _import_all()
            _check_threads("torch")
        except Exception:
            self._send(fork_server.Failed(traceback.format_exc()))
            raise
        self._importing = False
        self._send(fork_server.Ready())

    def _handle(
        self, message: fork_server.Fork | fork_server.EndLeader | fork_server.Preload
    ) -> None:
        match message:
            case fork_server.Fork():
                if message.group is None or not self._hand_over(message):
                    self._fork(message)
            case fork_server.EndLeader(ticket):
                for leader in self._leaders.values():
                    if leader.ticket == ticket:
                        process_control.kill_group(leader.pid)
            case fork_server.Preload(module):
                self._preload(module)

    def _preload(self, module: str) -> None:
        """A module that cannot be imported fails in the leaders that need it, with its message."""
        self._importing = True
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - told by the leader
            traceback.print_exc()
        self._importing = False
        _settle_memory()
        try:
            _check_threads(module)
        except RuntimeError as error:
            self._send(fork_server.Failed(str(error)))
            raise

    def _hand_over(self, order: fork_server.Fork) -> bool:
        """Give it to a leader of its group that waits; whether there is one."""
        for leader in self._leaders.values():
            if leader.ticket is None and leader.group == order.group:
                with contextlib.suppress(OSError):  # it has just died
                    leader.line.send(order)
                    leader.ticket, leader.began = order.ticket, time.monotonic()
                    return True
        return False

    def _hear(self, leader: _Leader) -> None:
        """Report the task of a leader that is done with it and waits for the next."""
        try:
            # A byte, never a pickle: what a leader has loaded must not run anything here.
            leader.line.recv_bytes(1)
        except (EOFError, OSError):  # it ends, which is reported when it has
            self._selector.unregister(leader.line)
            return
        if leader.ticket is not None:
            ticket, leader.ticket = leader.ticket, None
            how = 0, None, time.monotonic() - leader.began, _output(leader)
            self._send(fork_server.LeaderExit(ticket, leader.pid, *how))

    def _fork(self, order: fork_server.Fork) -> None:
        output = os.memfd_create("leader")
        ours, theirs = Pipe()
        began, parent = time.monotonic(), os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._lead(order, output, theirs, parent)
        theirs.close()
        with contextlib.suppress(OSError):  # both sides do it, so that neither sees it undone
            os.setpgid(pid, pid)
        watched = process_control.Watched(pid)
        leader = _Leader(order.ticket, pid, began, output, ours, order.group, watched)
        self._leaders[pid] = leader
        self._selector.register(ours, selectors.EVENT_READ, leader)

    def _lead(
        self, order: fork_server.Fork, output: int, line: Connection, parent: int
    ) -> NoReturn:
        code = TASK_RAISED
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            process_control.die_with_parent(parent)
            process_control.become_subreaper()
            # A core file of torch's size takes seconds to write, and nobody reads it.
            resource.setrlimit(
                resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
            )
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._connection.close()
            for other in self._leaders.values():
                other.line.close()
            faulthandler.enable()
            _do_tasks(order, line)
            code = 0
        except BaseException:  # noqa: BLE001 - last stop before the process's end
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _end_stopped(self) -> None:
        """End leaders that a signal has stopped: their ranks would wait for ever."""
        for leader in self._leaders.values():
            leader.watched.look()
            if leader.watched.stopped >= process_control.STOPPED_LOOKS:
                leader.why = "it was stopped by a signal and never continued"
                process_control.kill_group(leader.pid)

    def _collect(self) -> None:
        """Report the leaders that have ended, after ending what they left behind."""
        for leader in list(self._leaders.values()):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, leader.pid, options) is None:
                continue
            seconds = time.monotonic() - leader.began
            # Not yet collected, so the group's number cannot belong to anyone else.
            process_control.kill_group(leader.pid)
            _, status = os.waitpid(leader.pid, 0)
            del self._leaders[leader.pid]
            with contextlib.suppress(KeyError):  # heard already that it ends
                self._selector.unregister(leader.line)
            leader.line.close()
            process_control.end_adopted(self._leaders.keys())
            code = os.waitstatus_to_exitcode(status)  # less than 0: a signal
            exited, signum = (code if code >= 0 else None), (-code if code < 0 else None)
            how = exited, signum, seconds, _output(leader) + leader.why
            os.close(leader.output)
            if leader.ticket is not None:
                self._send(fork_server.LeaderExit(leader.ticket, leader.pid, *how))
        process_control.end_adopted(self._leaders.keys())

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._ending = True  # the parent is gone


def _import_all() -> None:
    # Imports leave nothing to collect; a leader collects after each task.
    gc.disable()
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    import_lazy_modules()
    _settle_memory()


def import_lazy_modules() -> None:
    """Import them all; and let ``torch.compile`` leave our groups alone.

    It would compile whatever Python runs below a compiled module, also what C++ calls from there,
    as DDP calls its group.  Warnings stay warnings, here and in all that is forked from here: where
    ``PYTHONWARNINGS=error`` makes them errors, torch cannot be imported, and sound systems raise.
    """
    warnings.filters[:] = [one for one in warnings.filters if one[0] != "error"]  # type: ignore[index]
    for module in LAZY_MODULES:
        importlib.import_module(module)
    sys.modules["torch._dynamo"].trace_rules.add("shardproof.backends")


def _check_threads(module: str) -> None:
    threads = process_control.thread_count()
    if threads != 1:
        raise RuntimeError(f"{threads} threads run after importing {module}: fork() allows only 1")


def _settle_memory() -> None:
    """Keep children from copying pages only because the collector touched them."""
    gc.collect()
    gc.freeze()


def _do_tasks(order: fork_server.Fork, line: Connection) -> None:
    """The life of a leader: one task, or several while it may be kept."""
    cuda.hide()
    if order.group is None:
        line.close()  # no task follows, and this one may load others' code
    else:
        process_control.BARRED.append(line.close)
    largest = process_control.resident_bytes(os.getpid()) + MOST_GROWTH
    for done in range(1, MOST_TASKS + 1):
        _do_task(order)
        gc.collect(0)  # what this task left, not again what outlived an earlier one
        # Where there are GPUs a leader that has used autograd can fork none that uses them.
        if order.group is None or done == MOST_TASKS or cuda.count() or not _is_clean(largest):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        line.send_bytes(b".")
        try:
            while not (orders := fork_server.receive(line, 60.0)):
                pass  # the fork server's death ends this process
        except EOFError:
            return
        (order,) = orders


def _do_task(order: fork_server.Fork) -> None:
    task, payload = pickle.loads(order.job)  # imports the task's module
    value = task(payload)
    if order.value is not None and value is not None:
        write_whole(order.value, fast_json(value))


def _is_clean(largest: int) -> bool:
    """Whether another task finds this process as it was: alone but for the ranks that it keeps,
    not grown, able to fork.
    """
    return (
        process_control.children() <= process_control.STAYING
        and process_control.thread_count() == 1
        and process_control.resident_bytes(os.getpid()) < largest
    )


def _output(leader: _Leader) -> str:
    """The tail of what it has printed since it took its task."""
    size = os.fstat(leader.output).st_size
    text = os.pread(leader.output, _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace")
    os.ftruncate(leader.output, 0)
    os.lseek(leader.output, 0, os.SEEK_SET)  # its own position as well: the file was inherited
    return text


def main(arguments: Sequence[str]) -> None:
    """Serve on the socket whose descriptor is given, for the parent whose pid is given."""
    descriptor, parent = map(int, arguments)
    # Not SIGKILL: it comes when the parent's *thread* that started us ends, which may be harmless.
    server = _Server(Connection(descriptor), parent)
    process_control.die_with_parent(parent, signal.SIGHUP)
    server.run()


if __name__ == "__main__":
    main(sys.argv[1:])
