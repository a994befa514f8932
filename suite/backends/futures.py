"""Futures that a rank's own thread completes, for backends of ours.

Everything that a rank's program can see (futures, callbacks) happens on its own thread at a point
of its own program: where a future is waited for, or when the backward pass ends in which it was
taken, just before DDP's reducer looks at it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from shardproof.backends.base import Handle
from shardproof.backends.request import Request

_STATE = threading.local()


class RankFuture(torch.futures.Future):
    """A future that its own rank's thread completes: when asked, or at the end of backward.

    C++ callers that block on it would never be answered; the only one (DDP's reducer, in a last
    callback of a backward pass) finds it complete, or never gets there because completing it
    raised.
    """

    def __init__(self, complete: Callable[[], Any]) -> None:
        super().__init__()
        self._complete = complete
        self._callbacks: list[Callable[[], None]] = []
        self._children: list[RankFuture] = []
        self._error: BaseException | None = None
        self._settled = False

    def settle(self) -> None:
        """Complete now, if that has not happened, and run what follows; never raises."""
        if self._settled:
            return
        self._settled = True
        try:
            value = self._complete()
        except BaseException as error:  # noqa: BLE001 - kept for whoever asks for the value
            self._error = error
        else:
            super().set_result(value)
        # The future and its handle point at each other: let go, or buckets live until the
        # collector.
        del self._complete
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def error(self) -> BaseException | None:
        """The error of this future or of a future that follows it."""
        errors = (child.error() for child in self._children)
        return self._error or next((error for error in errors if error is not None), None)

    def wait(self) -> Any:
        """The value, after waiting for it."""
        self.settle()
        if self._error is not None:
            raise self._error
        return super().wait()

    value = wait

    def then(self, callback: Callable[[Any], Any]) -> RankFuture:
        """A future of ``callback(self)``, run on this thread as soon as this one is complete."""

        def run() -> Any:
            self.settle()
            return callback(self)

        child = RankFuture(run)
        self._children.append(child)
        self._follow(child.settle)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Run ``callback(self)`` on this thread as soon as this is complete."""
        self._follow(lambda: callback(self))

    def _follow(self, callback: Callable[[], None]) -> None:
        if self._settled:
            callback()
        else:
            self._callbacks.append(callback)


class OwnHandle(Handle):
    """A handle that gives out :class:`RankFuture`; a backend adds ``_settle``."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._given: list[RankFuture] = []

    def _future(self) -> RankFuture:
        future = RankFuture(self.result)
        self._given.append(future)
        if getattr(_STATE, "reduces_after_backward", False):
            self._backward_ended()
        return future

    def _backward_ended(self) -> None:
        for future in self._given:
            future.settle()
            error = future.error()
            if error is not None:
                raise error

    def _taken_outside_backward(self) -> None:
        """The future itself sees when it is waited for."""


def announce_delayed_reduction() -> None:
    """Let handles see the one place where DDP reduces in a last callback; once for a process.

    In the first step of a static graph the reducer issues all buckets and then blocks on their
    futures in one C++ call, with no callback of ours in between.
    """
    reducer: Any = torch._C._distributed_c10d.Reducer
    original = getattr(reducer, "_delay_all_reduce", None)
    if original is None or hasattr(original, "announces"):
        return

    def announced(self: Any) -> Any:
        _STATE.reduces_after_backward = True
        try:
            return original(self)
        finally:
            _STATE.reduces_after_backward = False

    announced.announces = True  # type: ignore[attr-defined]
    reducer._delay_all_reduce = announced
