"""Processes that never outlive their parent: death signals, adopted orphans, certain ends.

Three mechanisms, because each has a hole.  A parent-death signal ends a child when its parent is
killed, but is not inherited by grandchildren.  Killing a process group reaches those, but not one
that opened its own session.  A *subreaper* adopts whatever its dead descendants left behind, so
that it shows up as a child that nobody knows, and is killed.  Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_GET_CHILD_SUBREAPER = 37
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

#: Looks in a row, a second apart, after which a process that was stopped will not go on by itself.
STOPPED_LOOKS = 10
#: Children of this process that are to outlive what it does now.
STAYING: set[int] = set()
#: Called once in a child that is to run others' code: each lets go of what only its parent may use.
BARRED: list[Callable[[], object]] = []

# Loaded before any fork, so that a child need not call dlopen between fork and prctl.
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: object) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` to this process when the *thread* that forked it ends.

    ``parent`` is the pid that forked us, taken before the fork: if it is gone already, the signal
    would never come, and this process ends at once.
    """
    _prctl(_SET_PDEATHSIG, ctypes.c_ulong(signum))
    if os.getppid() != parent:
        os._exit(1)


def let_go() -> None:
    """Close lines of the parent, and forget what it alone may use (:data:`BARRED`)."""
    while BARRED:
        BARRED.pop()()


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def is_subreaper() -> bool:
    """Whether orphaned descendants end up with this process."""
    flag = ctypes.c_int(0)
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(flag))
    return flag.value == 1


def children() -> set[int]:
    """Pids of this process's children (zombies too), adopted ones included."""
    tasks = Path("/proc/self/task").iterdir()  # of which some may end meanwhile
    return {int(pid) for task in tasks for pid in _text(task / "children").split()}


def _text(path: Path) -> str:
    """The content of a file of the kernel; empty once its process or thread has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill(pid: int, signum: int = signal.SIGKILL) -> bool:
    """Send ``signum``; whether there was such a process.  Stopped processes die of SIGKILL too."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and to everything below it, such as a compiler that it waits for."""
    import psutil

    below: list[psutil.Process] = []
    kill(pid, signal.SIGSTOP)  # so that it starts nothing more
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(pid).children(recursive=True)
    kill(pid)
    for one in below:
        with contextlib.suppress(psutil.Error):
            one.kill()


def kill_group(group: int) -> None:
    """SIGKILL to every process of the group, if there is any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def handle_of(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; ``None`` where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def reap(pid: int) -> bool:
    """Collect ``pid`` if it is a dead child; whether it is gone (or was never ours)."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def end_adopted(known: Collection[int], within_s: float = 1.0) -> set[int]:
    """Kill and collect every child not in ``known``; returns those that would not die in time.

    Killing one hands its own children to us, hence the loop.  Only a process stuck in the kernel
    (uninterruptible sleep) survives it.
    """
    deadline = time.monotonic() + within_s
    while True:
        strangers = children().difference(known)
        left = {pid for pid in strangers if kill(pid) and not reap(pid)}
        if not strangers or time.monotonic() > deadline:
            return left
        time.sleep(0.001)


def state_of(pid: int) -> str:
    """The kernel's letter for the process (R, S, D, T = stopped, Z = dead or gone)."""
    return activity_of(pid)[0]


def activity_of(pid: int, thread: int = 0) -> tuple[str, float]:
    """The kernel's letter for the process and its CPU seconds; with ``thread`` for that thread.

    ``("Z", 0.0)`` if there is none.
    """
    path = f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat"
    fields = _text(Path(path)).rpartition(")")[2].split()
    if not fields:
        return "Z", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spent_below(pid: int, itself: bool = False) -> float:
    """CPU seconds of everything that process ``pid`` started and that still runs; with ``itself``
    those of the process, and of what it has waited for, as well.
    """
    import psutil

    total = 0.0
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for one in [*([top] if itself else []), *top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += sum(one.cpu_times()[:4])  # of those that it has waited for as well
    return total


class Watched:
    """A process that is looked at, at most once a second: looks in a row at which it was
    ``stopped`` (by SIGSTOP), and at which it did nothing (``idle``).

    Looks are counted, not seconds: on a busy machine, and where all are stopped, they come late.
    ``whole``: what it started counts as well, such as the compiler that it waits for.
    """

    def __init__(self, pid: int, whole: bool = False) -> None:
        self._pid, self._whole, self._looked = pid, whole, time.monotonic()
        self.letter, self._began = self._activity()
        self._cpu = self._began
        self.stopped = self.idle = 0

    @property
    def spent(self) -> float:
        """CPU seconds from the beginning to the last look."""
        return self._cpu - self._began

    def look(self) -> None:
        """Count, if a second has gone by."""
        if time.monotonic() < self._looked + 1.0:
            return
        (self.letter, cpu), self._looked = self._activity(), time.monotonic()
        self.stopped = self.stopped + 1 if self.letter == "T" else 0
        # Less than before: something that it started has ended, and nobody waited for it.
        self.idle = 0 if self.letter in ("R", "D") or cpu != self._cpu else self.idle + 1
        self._cpu = cpu

    def _activity(self) -> tuple[str, float]:
        letter, cpu = activity_of(self._pid)
        return letter, spent_below(self._pid, itself=True) if self._whole else cpu


def began(pid: int) -> int | None:
    """When the process began, in ticks of the kernel since it started; ``None``: there is none."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[19]) if fields else None


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for ``signum``; one that has called exec has none."""
    return bool(_masks(Path(f"/proc/{pid}/status")).get("SigCgt", 0) >> (signum - 1) & 1)


def handling(pid: int, signum: int) -> tuple[bool, dict[int, bool]]:
    """Whether ``signum`` is pending; by thread, whether it blocks it, as its handler does."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False, {}
    masks = {int(thread.name): _masks(thread / "status") for thread in threads}

    def has(mask: dict[str, int], *names: str) -> bool:
        return any(mask.get(name, 0) >> (signum - 1) & 1 for name in names)

    pending = any(has(mask, "SigPnd", "ShdPnd") for mask in masks.values())
    return pending, {thread: has(mask, "SigBlk") for thread, mask in masks.items()}


def _masks(status: Path) -> dict[str, int]:
    """The masks of signals in a status file of the kernel; none of a process that has ended."""
    lines = _text(status).splitlines()
    fields = (line.split() for line in lines if line.startswith(("Sig", "Shd")))
    return {name.rstrip(":"): int(mask, 16) for name, mask in fields if "/" not in mask}


def resident_bytes(pid: int) -> int:
    """Resident set size in bytes, pages shared with the parent by copy-on-write included."""
    fields = _text(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def on_this_core() -> Iterator[None]:
    """Threads that are started meanwhile stay on the core that the caller runs on."""
    before, core = os.sched_getaffinity(0), _libc.sched_getcpu()
    if core in before:
        with contextlib.suppress(OSError):  # it saves CPU, and may be forbidden
            os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the cores of a container may change meanwhile
            os.sched_setaffinity(0, before)


def keep_freed_memory() -> None:
    """Let this process and those that it forks reuse what they free, where libc is glibc.

    It would give pages back to the kernel after every step of a small model, and get them back
    zeroed, page fault by page fault: a third of the faults of a case.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_TRIM_THRESHOLD, 1 << 28)
        _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)


def thread_count() -> int:
    """Number of threads of this process, those of native libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def heard() -> list[signal.Signals]:
    """The signals that end a command in order, but those that are ignored, as under ``nohup``."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def signal_name(signum: int) -> str:
    """``SIGKILL`` for 9; ``signal 40`` for one without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
