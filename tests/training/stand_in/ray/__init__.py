"""Stands in for Ray: an actor is a process, and what it is given travels pickled by value.

Only what ``training/on_ray.py`` calls.  ``CPUS`` is the size of the cluster.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import cloudpickle

from ray import exceptions, util

__all__ = ["exceptions", "util"]

CPUS = 8
#: Calls of ``init``, ``shutdown`` and ``kill``, in order.
SAID: list[str] = []


class _Method:
    def __init__(self, actor: _Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *given: Any) -> futures.Future[Any]:
        return self._actor.pool.submit(self._actor.ask, self._name, given)


class _Actor:
    def __init__(self, kind: type) -> None:
        self.pool = futures.ThreadPoolExecutor(1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ray.actor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._send(cloudpickle.dumps(kind))

    def _send(self, text: bytes) -> None:
        assert self._process.stdin is not None
        pickle.dump(text, self._process.stdin)
        self._process.stdin.flush()

    def ask(self, name: str, given: Any) -> Any:
        self._send(cloudpickle.dumps((name, given)))
        assert self._process.stdout is not None
        try:
            fine, value = pickle.load(self._process.stdout)
        except EOFError:
            raise exceptions.RayError("the actor died") from None
        if not fine:
            raise exceptions.RayTaskError(value)
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


def init(address: str | None, **how: Any) -> None:
    SAID.append(f"init {address}")


def shutdown() -> None:
    SAID.append("shutdown")


def is_initialized() -> bool:
    return False


def cluster_resources() -> dict[str, float]:
    return {"CPU": float(CPUS)}


def remote(**how: Any) -> Any:
    assert how["num_cpus"] == 1
    return lambda kind: SimpleNamespace(remote=lambda: _Actor(kind))


def get(what: Any, timeout: float | None = None) -> Any:
    if isinstance(what, list):
        return [get(one) for one in what]
    if what == "no room":
        raise exceptions.GetTimeoutError
    return None if what == "room" else what.result()


def wait(
    what: list[Any], num_returns: int, timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    done, _ = futures.wait(what, timeout, return_when=futures.FIRST_COMPLETED)
    first = [one for one in what if one in done][:num_returns]
    return first, [one for one in what if one not in first]


def kill(actor: _Actor) -> None:
    SAID.append("kill")
    actor.end()
    threading.Thread(target=actor.pool.shutdown, daemon=True).start()
