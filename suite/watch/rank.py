"""Inside a rank of the script: what is hooked, when replicas are compared, what is left behind.

Hooked are the steps of every ``torch.optim`` optimizer, the making and destroying of process
groups, the exception that ends the script, and the end of the process.  Nothing of the script is
changed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import platform
import resource
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardproof.backends import heartbeat
from shardproof.backends.errors import name_ranks
from shardproof.errors import Problem, SelectionError
from shardproof.files import fast_json, write_whole
from shardproof.launch import process_control, stacks
from shardproof.launch.outcome import of_exception
from shardproof.launch.process_control import cores
from shardproof.runs.machine import cpu_model
from shardproof.table import number
from shardproof.watch import calls, groups, replica_sets
from shardproof.watch.compare import Compared
from shardproof.watch.exchange import WAIT_SECONDS, BrokenExchange, Exchange
from shardproof.watch.found import local
from shardproof.watch.record import Finding, RankRecord

#: Variable with the command that started the ranks.
COMMAND = "SHARDPROOF_WATCH_COMMAND"
#: Seconds between two writings of the record while nothing is found.
FLUSH_SECONDS = 2.0
#: What is said of steps that come when the ranks no longer reach one another.
AFTER_DESTROY = "not compared: steps after destroy_process_group"
#: A rank that uses less of a core computes nothing.
_IDLE_SHARE = 0.05
#: After these first comparisons memory is weighed, and the record written at once.
_FLUSHED = 3


@dataclass(frozen=True)
class Settings:
    """How a rank is watched, from the environment."""

    folder: Path
    replicas: tuple[tuple[int, ...], ...] | None = None
    every: int | None = None
    seconds: float = WAIT_SECONDS
    #: Whether ``shardproof watch`` started this rank and judges what it leaves.
    launched: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """The values of ``SHARDPROOF_WATCH_*``.

        :raises InputError: a value that cannot be read.
        """
        world = int(environment.get("WORLD_SIZE", "1"))
        replicas = environment.get("SHARDPROOF_WATCH_REPLICAS", "")
        every = environment.get("SHARDPROOF_WATCH_EVERY", "")
        if every and not (every.isdigit() and int(every)):
            what = "SHARDPROOF_WATCH_EVERY is not a number of steps"
            raise SelectionError(Problem(what, "set it to 1 or more, or unset it", every))
        folder = environment.get("SHARDPROOF_WATCH_RESULTS", "")
        launched = "SHARDPROOF_WATCH_PARENT" in environment
        path = Path(folder) if folder else _of_this_job()
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        if restarts != "0" and not launched:  # torchrun starts all ranks once more
            path = path.with_name(f"{path.name.removesuffix('-watch')}-restart{restarts}-watch")
        return cls(
            path,
            replica_sets.parse(replicas, world) if replicas else None,
            int(every) if every else None,
            launched=launched,
        )


def _of_this_job() -> Path:
    """A folder for all ranks of this launcher on this machine: named by when it started."""
    began = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time(), UTC)
    return Path("results") / f"{began:%Y%m%d-%H%M%S}-{os.getppid()}-watch"


def _earlier_starts(path: Path, environment: Mapping[str, str]) -> int:
    """How many times this rank was started before: by torchrun, or by itself (``os.exec``).

    Records of two jobs would be judged as one, so a rank starts where none of another job's lies.

    :raises SelectionError: one lies at ``path``.
    """
    earlier = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not path.exists():
        return earlier
    pid, restarts = None, 0
    with contextlib.suppress(ValueError, LookupError, TypeError):
        left = json.loads(path.read_bytes())
        pid, restarts = left["pid"], int(left["restarts"])
    if pid != os.getpid():
        what = "SHARDPROOF_WATCH_RESULTS: the folder holds the records of another run"
        raise SelectionError(Problem(what, "set a new folder, or unset the variable", str(path)))
    return restarts + 1


class Watch:
    """The state of this process as a watched rank."""

    def __init__(self, settings: Settings, rank: int, world: int, restarts: int = 0) -> None:
        self.settings = settings
        self.record = RankRecord(
            *(rank, world, os.getpid(), platform.node(), sys.argv[0], torch.__version__),
            restarts=restarts,
            arguments=sys.argv[1:],
            command=os.environ.get(COMMAND, ""),
            began=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            machine=f"{cpu_model()}, {number(cores(), 'core')}",
        )
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._calls = calls.Calls(settings.folder / f"rank{rank}.calls")
        #: In the order in which they were found, which is the same on every rank.
        self._all: list[Compared] = []
        self._compared: weakref.WeakKeyDictionary[torch.optim.Optimizer, Compared]
        self._compared = weakref.WeakKeyDictionary()
        #: With the other ranks; ``None`` before they met.
        self.exchange: Exchange | None = None
        #: Optimizers in whose steps the program is now, the outermost first.
        self._inside: list[int] = []
        self._over = False
        #: Whether a hook has failed by itself: nothing is watched any more.
        self._failed = False
        #: Rank of this machine -> when it was looked at last, and its CPU seconds then.
        self._spent: dict[int, tuple[float, float]] = {}
        #: Identity of the exception that is being handled while the script makes steps, if any.
        self._handled = id(None)
        self._written, self._told = time.monotonic(), 0
        self._ended: list[Callable[[Watch], None]] = []
        self.record.write(settings.folder)

    # ------------------------------------------------------------------------------------- hooks

    def run_as(self, words: Sequence[str]) -> None:
        """Record the script that this process is about to run: ``sys.argv`` still names another."""
        self.record.script, self.record.arguments = words[0], [*words[1:]]

    def install(self) -> None:
        """Hook steps of optimizers and the groups of this process."""
        groups.install()
        groups.send_to(self._calls)
        register_optimizer_step_pre_hook(self._safe(self._before_step))
        register_optimizer_step_post_hook(self._safe(self._after_step))
        compare = self._safe(self._compare_the_end)

        def before_the_end(group: Any = None, *_: Any, **__: Any) -> None:
            if group is None or group is dist.group.WORLD:
                # Others learn of an exception by the end of the group: nothing may come before it.
                compare(is_failing=self._is_failing())

        _hook("init_process_group", after=self._safe(self._attach))
        _hook("destroy_process_group", before=before_the_end)
        sys.excepthook = self._raised(sys.excepthook)
        atexit.register(self.finish)

    def _safe(self, hook: Callable[..., None]) -> Callable[..., None]:
        """``hook``, whose own failure ends watching and never reaches the script."""

        @functools.wraps(hook)
        def safe(*given: Any, **named: Any) -> None:
            if self._failed:
                return
            try:
                hook(*given, **named)
            except Exception as error:  # noqa: BLE001 - whatever it is, the script goes on
                self._give_up(error)

        return safe

    def _give_up(self, error: Exception) -> None:
        """Say that watching has failed here, and let the other ranks go."""
        self._failed = self._over = True
        steps = max((one.seen.steps for one in self._all), default=0)
        trace = traceback.extract_tb(error.__traceback__)[-1]
        told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        where = f"{Path(trace.filename).name}:{trace.lineno}"
        why = f"watching failed on rank {self.record.rank} at step {steps}, {told} ({where})"
        self.record.findings.append(Finding("not compared", why, broken=False))
        for compared in self._all:
            compared.stop(why)
        if self.exchange is not None:
            self.exchange.close()
        try:
            self._write()
        except OSError as unwritten:
            sys.stderr.write(f"shardproof watch: {why}; no record of it: {unwritten}\n")

    def at_end(self, action: Callable[[Watch], None]) -> None:
        """Have ``action`` done when the record is whole."""
        self._ended.append(action)

    def _is_failing(self) -> bool:
        """Whether an exception is being handled that was not when the last step was made.

        ``except ImportError: main()`` handles one all the time.
        """
        error = sys.exc_info()[1]
        return error is not None and id(error) != self._handled

    def _raised(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def excepthook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            try:
                self._note_error(error, trace)
            finally:
                original(kind, error, trace)

        return excepthook

    def _note_error(self, error: BaseException, trace: TracebackType | None) -> None:
        told, record = of_exception(self.record.rank, error, 0.0), self.record
        frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(trace)]
        record.error_type, record.place = told.error_type, calls.place_in_script(frames)
        record.error = " ".join(told.message.split())[:400] or told.error_type
        record.consequence, record.is_comm_error = told.consequence, told.is_comm_error
        self._write()

    def note_refusal(self, why: str) -> None:
        """The script does not take its arguments."""
        self.record.refused = " ".join(why.split())[:400]
        self._write()

    def _attach(self) -> None:
        """The script has a default process group: make a second one of our own."""
        if self.record.initialised:
            return
        record, self._handled = self.record, id(sys.exc_info()[1])
        record.initialised, record.backend = True, dist.get_backend()
        record.rank, record.world = dist.get_rank(), dist.get_world_size()
        if record.world < 2:
            return
        try:
            where = record.rank, record.world, c10d._get_default_store(), self.settings.seconds
            self.exchange = Exchange(*where, self._is_awaited)
        except BrokenExchange as error:
            why = f"replicas were not compared: ranks cannot reach one another over gloo ({error})"
            record.findings.append(Finding("not compared", why, broken=False))

    def _is_awaited(self) -> str:
        """Which rank of this machine waits for this one in a call of the script's."""
        record = self.record
        paths = {r: self.settings.folder / f"rank{r}.calls" for r in range(record.world)}
        own = paths.pop(record.rank)
        waiting = {r: path for r, path in paths.items() if path.exists() and self._waits(r, path)}
        logs = {rank: calls.read(path) for rank, path in waiting.items()}
        return calls.awaits(calls.read(own), logs, record.rank) if logs else ""

    def _waits(self, rank: int, path: Path) -> bool:
        """Whether ``rank`` is blocked in a call, or does nothing in a backward."""
        state = calls.state(path)
        if state.waits or not state.in_backward:
            return state.waits
        now, spent = time.monotonic(), process_control.activity_of(state.pid)[1]
        before, self._spent[rank] = self._spent.get(rank), (now, spent)
        return before is not None and spent - before[1] <= _IDLE_SHARE * (now - before[0])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave(optimizer)  # its last step may have been left by an exception
        self._inside.append(id(optimizer))
        self._handled = id(sys.exc_info()[1])
        if len(self._inside) > 1:  # in another's step: sharded optimizers do so
            return
        if self._over:  # the ranks have said goodbye to one another
            if not any(finding.sentence == AFTER_DESTROY for finding in self.record.findings):
                self.record.findings.append(Finding("not compared", AFTER_DESTROY, broken=False))
                self._write()
            return
        if not self.record.initialised:
            if not dist.is_initialized():
                return
            self._attach()
        compared = self._of(optimizer)
        has_closure = bool(args[1:2] and args[1]) or bool(kwargs.get("closure"))
        compared.before(optimizer, has_closure)
        found = len(self.record.findings)
        if found != self._told or time.monotonic() - self._written > FLUSH_SECONDS:
            self._write()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave(optimizer)
        compared = self._compared.get(optimizer)
        if compared is None or self._inside or self._over:
            return
        if compared.after(optimizer) and compared.rows <= _FLUSHED:
            self._weigh()
            self._write()

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._inside:
            del self._inside[self._inside.index(id(optimizer)) :]

    def _of(self, optimizer: torch.optim.Optimizer) -> Compared:
        if (known := self._compared.get(optimizer)) is not None:
            return known
        known = next((one for one in self._all if one.fits(optimizer)), None)
        if known is not None:
            known.go_on_with(optimizer)
        else:
            made = functools.partial(self._calls.on, name_ranks(range(self.record.world)))
            about = self.record, self.settings.replicas, self.settings.every
            known = Compared(optimizer, len(self._all), self.exchange, *about, made)
            self._all.append(known)
        self._compared[optimizer] = known
        return known

    # ----------------------------------------------------------------------------------- the end

    def _compare_the_end(self, is_failing: bool = False) -> None:
        if self._over:
            return
        self._over = True
        if self.record.error or is_failing:
            for compared in self._all:
                compared.skip_the_end("an exception was under way when the script ended")
        else:
            self._weigh()
            for compared in self._all:
                compared.end(len(self._all))
        self._write()

    def finish(self) -> None:
        """The process ends in order, or by an exception."""
        if os.getpid() != self.record.pid:  # forked from the rank
            return
        self._safe(self._compare_the_end)()
        self.record.ended = not self.record.error
        self._write()
        for action in self._ended:
            action(self)
        if self.exchange is not None:
            self.exchange.close()

    def text(self) -> str:
        """The record as it stands."""
        return fast_json(self.record.to_dict()).decode()

    def _write(self) -> None:
        self._written, self._told = time.monotonic(), len(self.record.findings)
        self.record.totals = list(self._calls.totals.values())
        self.record.unseen = list(dict.fromkeys(groups.unseen))
        self._note("resident, at most", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._note("CUDA, allocated at most", torch.cuda.max_memory_allocated())
        self.record.write(self.settings.folder)

    def _weigh(self) -> None:
        """Bytes that this rank holds of each class, after a step that was compared."""
        held: dict[str, dict[int, int]] = {}
        for optimizer, compared in [*self._compared.items()]:
            inside = [p for group in optimizer.param_groups for p in group["params"]]
            parameters = [*inside, *_alive(compared.found.outside.values())]
            state = [value for of in optimizer.state.values() for value in of.values()]
            for name, tensors in (
                ("parameters", parameters),
                ("gradients", [p.grad for p in parameters if p.grad is not None]),
                ("optimizer state", [value for value in state if isinstance(value, Tensor)]),
                ("buffers", _alive(compared.found.buffers)),
            ):
                held.setdefault(name, {}).update(_storages(tensors))
        for name, storages in held.items():
            self._note(name, sum(storages.values()))

    def _note(self, name: str, size: int) -> None:
        self.record.memory[name] = max(size, self.record.memory.get(name, 0))


def _hook(
    name: str, before: Callable[..., None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Have ``before`` and ``after`` called around a function of ``torch.distributed``."""
    original = getattr(c10d, name)

    @functools.wraps(original)
    def hooked(*given: Any, **named: Any) -> Any:
        if before is not None:
            before(*given, **named)
        result = original(*given, **named)
        if after is not None:
            after()
        return result

    setattr(c10d, name, hooked)
    setattr(dist, name, hooked)


def _alive(references: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    return [tensor for reference in references if (tensor := reference()) is not None]


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages in which ``tensors`` lie: views share one."""
    parts = (local(tensor) for tensor in tensors)
    storages = [p.untyped_storage() for p in parts if p.layout is torch.strided and not p.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


#: The watch of this process.
_watch: Watch | None = None


def activate() -> Watch:
    """Watch this process from now on, if it is a rank of a launcher; again: nothing.

    :raises KeyError: it is none: ``RANK`` and ``WORLD_SIZE`` are not set.
    :raises InputError: a variable cannot be read, or the folder holds another job's records.
    """
    global _watch
    if _watch is None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        settings = Settings.read(os.environ)
        answers = settings.folder / f"rank{rank}.stacks"
        restarts = _earlier_starts(settings.folder / f"rank{rank}.json", os.environ)
        if settings.launched:
            process_control.die_with_parent(int(os.environ["SHARDPROOF_WATCH_PARENT"]))
            heartbeat.attach(Path(os.environ["SHARDPROOF_WATCH_BEATS"]), rank, thread=False)
            stacks.arm(answers)
            give_way(answers)
        else:
            settings.folder.mkdir(parents=True, exist_ok=True)
            _answer(answers)
        _watch = Watch(settings, rank, world, restarts)
        _watch.install()
    return _watch


def _answer(path: Path) -> None:
    """Make this process, which others have started, write its stacks to ``path`` when asked to.

    Nothing is done where it has a handler of its own for the signal, and it may set one.
    """
    if signal.getsignal(stacks.DUMP_SIGNAL) is not signal.SIG_DFL:
        return
    stacks.register(path)
    give_way(path)


def give_way(path: Path) -> None:
    """Let what this process is about to run have the signal: who takes it is not asked any more.

    Only handlers set by :func:`signal.signal` are seen.  ``path``: as given to :func:`stacks.arm`.
    """
    module: Any = signal
    original, owner = module.signal, os.getpid()

    @functools.wraps(original)
    def set_handler(signum: int, handler: Any) -> Any:
        if signum == stacks.DUMP_SIGNAL and os.getpid() == owner:
            path.unlink(missing_ok=True)
        return original(signum, handler)

    module.signal = set_handler


# Under the user's own launcher the ranks judge and report by themselves.  They tell one another
# what they saw when the script ends, and rank 0 reports; a rank that an exception ends reports for
# those whose records are in the same folder, if it is the first: its launcher is about to kill the
# others.

#: Who made this file reports.
_LOCK = "reported"


def watch_this_rank() -> None:
    """Watch this process, and report when it ends unless ``shardproof watch`` will.

    A process that multiprocessing started, as of a DataLoader, runs the script's first lines again
    and is no rank: it is left alone.
    """
    # While a spawned child reads the script, multiprocessing knows its parent not yet.
    is_read_again = getattr(multiprocessing.current_process(), "_inheriting", False)
    if is_read_again or multiprocessing.parent_process() is not None:
        return
    watch = activate()
    if not watch.settings.launched:
        watch.at_end(_report)


def _report(watch: Watch) -> None:
    folder, record = watch.settings.folder, watch.record
    if not record.error:
        _gather(watch)
        if record.rank:
            return
    try:
        os.close(os.open(folder / _LOCK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    from shardproof.watch import judge, report

    made = report.Report(judge.judge(folder))
    report.write(made, folder)
    sys.stderr.write(f"{report.text(made)}evidence: {folder}\n")


def _gather(watch: Watch) -> None:
    """Bring the records of all ranks into the folder of rank 0, as far as they can be reached."""
    if watch.exchange is None or watch.exchange.broken:
        return
    try:
        texts = watch.exchange.texts(watch.text())
    except BrokenExchange:
        return
    if watch.record.rank == 0:
        for rank, text in enumerate(texts):
            write_whole(watch.settings.folder / f"rank{rank}.json", text + "\n")
