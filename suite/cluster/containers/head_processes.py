"""The processes of commands in a head, found and ended inside it; of the standard library alone.

``python -m shardproof.cluster.containers.head_processes WORD [ARGUMENT...]``; each public function
below is a word, and its result is printed.  All processes of one command have its name in their
environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shardproof.launch import process_control

#: The variable with the name of the command.
RUN = "SHARDPROOF_RUN"
#: Seconds within which the first process of a command is there.
_COME_SECONDS = 5.0


def names() -> str:
    """The commands that go on, by name."""
    return " ".join(sorted(set(_named().values())))


def end(run: str, seconds: str) -> None:
    """End a command in order: interrupt it, and kill what is left of it after ``seconds``."""
    deadline = time.monotonic() + _COME_SECONDS
    while not (found := _of(run)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    first = min(found, key=_began)
    _signal(first, signal.SIGINT)
    deadline = time.monotonic() + float(seconds)
    while first in _of(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    while found := _of(run):  # those that it left behind, too
        for pid in found:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)


def _of(run: str) -> list[int]:
    return [pid for pid, name in _named().items() if name == run]


def _named() -> dict[int, str]:
    """The name of the command of each process that has one."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in (folder / "environ").read_bytes().split(b"\0"):
                name, _, value = line.partition(b"=")
                if name == RUN.encode():
                    found[int(folder.name)] = value.decode()
    return found


def _began(pid: int) -> tuple[int, int]:
    """When a process began; of two in one tick, the lower number is first."""
    when = process_control.began(pid)
    return sys.maxsize if when is None else when, pid


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


_WORDS: dict[str, Callable[..., object]] = {word.__name__: word for word in (names, end)}


if __name__ == "__main__":
    print(_WORDS[sys.argv[1]](*sys.argv[2:]) or "")
