"""Signals that end a command in order, while containers of it run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from shardproof.launch import process_control


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP are told like Ctrl-C, unless they are ignored."""
    numbers = process_control.heard()
    previous: dict[int, Any] = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore() -> None:
    """A second Ctrl-C must not stop what ends a cluster in order; it takes seconds."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
