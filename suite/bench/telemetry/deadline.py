"""A deadline for a call into a library that has none: drivers hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """What ``action`` returns, or raises; after ``seconds`` its thread is left to itself.

    :raises TimeoutError: it had not ended by then.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="with a deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s: it was given up")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
