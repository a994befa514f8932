"""Python stacks of processes that hang or crash, without their help.

``faulthandler`` writes them from a C signal handler, so that endless loops, calls that sleep in C
and aborts show where they are.  Stopped processes do not answer.
"""

from __future__ import annotations

import faulthandler
import itertools
import linecache
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from shardproof.launch import process_control
from shardproof.launch.frames import Frame, innermost, method

#: Free for this use: neither torch nor Python's runtime handles it.
DUMP_SIGNAL = signal.SIGUSR2

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)[^\n]*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_LAUNCH = str(Path(__file__).parent)

#: Where a rank's Python code stands while it waits for other ranks.
_WAITING = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
#: Functions that make a group together with its other members.
_JOINING = frozenset(
    ("init_process_group", "new_group", "_new_process_group_helper", "init_device_mesh")
)
_STANDARD = ("/threading.py", "/queue.py", "/selectors.py", "/contextlib.py")
_WAITING_FOLDER = str(Path(__file__).parent.parent / "backends")


@dataclass(frozen=True)
class ThreadStack:
    """Frames (file, line, function) of one thread, outermost first, ours left out."""

    frames: tuple[Frame, ...]

    @property
    def waits(self) -> bool:
        """Whether the thread is inside a communication call."""
        inner = self._outside[-1] if self._outside else ""
        return inner.startswith(_WAITING_FOLDER) or inner.endswith(_WAITING)

    @property
    def tells(self) -> bool:
        """Whether it shows where the thread is: one that was cut off may not."""
        return bool(self._outside)

    @property
    def _outside(self) -> list[str]:
        """Files of the frames outside the standard library."""
        return [file for file, _, _ in self.frames if not file.endswith(_STANDARD)]

    @property
    def joins(self) -> bool:
        """Whether the thread waits for a group to be made."""
        return self.waits and any(function in _JOINING for _, _, function in self.frames)

    @property
    def in_backward(self) -> bool:
        """Whether the thread is inside torch's engine, where DDP waits for its buckets in C++."""
        return bool(self.frames) and self.frames[-1][2] == "_engine_run_backward"

    @property
    def place(self) -> str:
        """``in f (file:line) under step()``: the innermost frame of the implementation, or else of
        all; and the method of the contract that led there.
        """
        frames = [frame for frame in self.frames if not frame[0].endswith(_STANDARD)]
        file, line, function = innermost(frames) or (frames or self.frames)[-1]
        caller = method(self.frames)
        under = f" under {caller}" if caller not in ("", f"{function}()") else ""
        return f"in {function} ({file}:{line}){under}"

    def __str__(self) -> str:
        lines = []
        for file, line, function in self.frames:
            lines.append(f'  File "{file}", line {line}, in {function}')
            source = linecache.getline(file, line).strip()
            if source:
                lines.append(f"    {source}")
        return "\n".join(["Stack (most recent call last):", *lines]) if lines else ""


def arm(path: Path) -> int:
    """Make this process write its stacks to ``path`` when asked to, and when it crashes.

    Returns the descriptor, which must stay open until it is armed anew.
    """
    descriptor = register(path)
    faulthandler.enable(descriptor, all_threads=True)
    return descriptor


def register(path: Path) -> int:
    """Make this process write its stacks to ``path`` when asked to; see :func:`arm`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(DUMP_SIGNAL, descriptor, all_threads=True, chain=False)
    return descriptor


#: Of a process (with when it began) that has not answered yet: the threads that did not block the
#: signal before it was asked first.  Who is asked again may still be at the answer before.
_open: dict[tuple[int, int | None], frozenset[int]] = {}


def ask(
    pids: dict[int, Path],
    within_s: float = 2.0,
    send: Callable[[int, int], bool] = process_control.kill,
) -> None:
    """Make the processes write their stacks; returns when they have, or when time is up.

    One that has no file, or no handler of the signal, which would end it, is not asked.  The
    kernel tells when a handler has returned: on a busy machine it rests between two lines.
    """
    waiting: dict[tuple[int, int | None], tuple[int, frozenset[int]]] = {}
    for pid, path in pids.items():
        key, before = (pid, process_control.began(pid)), size(path)
        blocks = process_control.handling(pid, DUMP_SIGNAL)[1]
        if (
            before is not None
            and process_control.state_of(pid) not in ("T", "Z", "")
            and process_control.catches(pid, DUMP_SIGNAL)
            and send(pid, DUMP_SIGNAL)
        ):
            free = frozenset(thread for thread, is_blocked in blocks.items() if not is_blocked)
            waiting[key] = before, _open.setdefault(key, free)
    deadline = time.monotonic() + within_s
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        for key, (before, free) in list(waiting.items()):
            pending, blocks = process_control.handling(key[0], DUMP_SIGNAL)
            now = size(pids[key[0]])
            # Between pending and handled the kernel shows neither: the file has grown, too.
            answered = not pending and not any(blocks.get(thread) for thread in free)
            told = now is None or (answered and now > before)
            if told or process_control.state_of(key[0]) == "Z":
                del waiting[key]
                _open.pop(key, None)


def size(path: Path) -> int | None:
    """Bytes of the file; ``None``: there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def read(path: Path) -> tuple[dict[int, ThreadStack], int | None]:
    """Stacks by thread identity, and the thread that a fatal error struck."""
    if not path.is_file():
        return {}, None
    stacks: dict[int, list[Frame]] = {}
    fatal, culprit, thread = False, None, None
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("Fatal Python error"):
            fatal = True
        elif match := _THREAD.match(line):
            thread = int(match[2], 16)
            stacks[thread] = []
            if fatal and match[1] == "Current thread" and culprit is None:
                culprit = thread
        elif (match := _FRAME.match(line)) and thread is not None:
            number = int(match[2]) if match[2].isdigit() else 0
            stacks[thread].append((match[1], number, match[3]))
    return {thread: ThreadStack(_own(stack)) for thread, stack in stacks.items()}, culprit


def _own(stack: Collection[Frame]) -> tuple[Frame, ...]:
    """From innermost first to outermost first, from the last launcher frame inwards."""
    kept = itertools.takewhile(lambda frame: not frame[0].startswith(_LAUNCH), stack)
    return tuple(kept)[::-1]
