"""Small launchers for the tests of the backends: rank threads, or forked rank processes."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardproof import backends
from shardproof.backends.errors import CommError

Body = Callable[[int, int], Any]

#: What torch imports at first use: once in the server instead of in every rank.
LAZY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def threads(
    body: Body,
    world: int,
    hub: backends.Hub | None = None,
    ledgers: bool = False,
    disturbances: backends.Disturbances | None = None,
) -> tuple[list[Any], list[BaseException | None]]:
    """Run ``body(rank, world)`` on threads; per rank what it returned and what it raised."""
    hub = hub or backends.Hub(world, 20.0)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def live(rank: int) -> None:
        backends.join("in_memory", rank, world, Path(), 20.0, ledgers, hub, disturbances)
        try:
            results[rank] = body(rank, world)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors[rank] = error
            hub.fail(rank, error)
        else:
            hub.rank_done(rank)
        finally:
            backends.leave()

    ranks = [threading.Thread(target=live, args=(r,), daemon=True) for r in range(world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert not any(thread.is_alive() for thread in ranks), "a rank thread still runs"
    return results, errors


def succeed(body: Body, world: int, **options: Any) -> list[Any]:
    """Run on threads; raise the first rank's own error, if there is one."""
    results, errors = threads(body, world, **options)
    found = [error for error in errors if error is not None]
    for error in sorted(found, key=lambda e: isinstance(e, CommError)):
        raise error
    return results


def processes(
    body: Callable[..., Any], world: int, folder: Path, ledgers: bool, *arguments: Any
) -> list[Any]:
    """Run ``body(rank, world, *arguments)`` on gloo processes; what each returned (all as JSON).

    ``body`` is a module's own function.  The ranks are forked from a server that never ran a
    thread: a child of a process whose rank threads computed may hang in its first matrix product.
    Raises ``AssertionError`` with what the ranks raised, or with the stacks of one that hung.
    """
    request = [body.__module__, body.__qualname__, world, str(folder), ledgers, list(arguments)]
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, "the server of rank processes died"
    answers = json.loads(line)
    broken = [answer["error"] for answer in answers if answer["error"]]
    assert not broken, "\n".join(broken)
    return [answer["result"] for answer in answers]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Started once; ends by itself when this process does, for then its input ends."""
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print must not mix with the answers
    torch.set_num_threads(1)
    for name in LAZY:
        importlib.import_module(name)
    for line in sys.stdin:
        module, name, world, folder, ledgers, arguments = json.loads(line)
        body = getattr(importlib.import_module(module), name)
        found = _fork(functools.partial(_apply, body, arguments), world, Path(folder), ledgers)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _apply(body: Callable[..., Any], arguments: list[Any], rank: int, world: int) -> Any:
    return body(rank, world, *arguments)


def _fork(body: Body, world: int, folder: Path, ledgers: bool) -> list[dict[str, Any]]:
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _child(body, rank, world, folder, ledgers)
        children.append(pid)
    deadline = time.monotonic() + 90
    codes: dict[int, int] = {}
    while len(codes) < world:
        for pid in children:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = status
        if time.monotonic() > deadline:
            for pid in children:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    codes[pid] = os.waitpid(pid, 0)[1]
        time.sleep(0.005)
    answers = []
    for rank, pid in enumerate(children):
        path = folder / f"answer{rank}"
        if path.exists():
            answers.append(json.loads(path.read_text()))
        else:
            stacks = (folder / f"stacks{rank}").read_text()
            text = f"rank {rank}: wait status {codes[pid]}\n{stacks}"
            answers.append({"result": None, "error": text})
    return answers


def _child(body: Body, rank: int, world: int, folder: Path, ledgers: bool) -> None:
    answer: dict[str, Any] = {"result": None, "error": ""}
    faulthandler.dump_traceback_later(60, file=(folder / f"stacks{rank}").open("w"))
    try:
        backends.join("gloo", rank, world, folder / "meeting", 20.0, ledgers)
        answer["result"] = body(rank, world)
    except BaseException:  # noqa: BLE001 - handed to the test
        answer["error"] = f"rank {rank}:\n{traceback.format_exc()}"
    finally:
        partial = folder / f"partial{rank}"
        partial.write_text(json.dumps(answer))
        partial.rename(folder / f"answer{rank}")
        # Peers may still be reading what this rank sent last.
        until = time.monotonic() + 1
        while time.monotonic() < until and not answer["error"]:
            if all((folder / f"answer{r}").exists() for r in range(world)):
                break
            time.sleep(0.002)
        os._exit(0)


if __name__ == "__main__":
    _serve()
