"""Small launchers for the tests of the backends: rank threads, or forked rank processes."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from suite import backends
from suite.backends.errors import CommError

Body = Callable[[int, int], Any]


def threads(
    body: Body,
    world: int,
    hub: backends.Hub | None = None,
    ledgers: bool = False,
    weather: backends.Weather | None = None,
) -> tuple[list[Any], list[BaseException | None]]:
    """Run ``body(rank, world)`` on threads; per rank what it returned and what it raised."""
    hub = hub or backends.Hub(world, 20.0)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def live(rank: int) -> None:
        backends.join("in_memory", rank, world, Path(), 20.0, ledgers, hub, weather)
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


def processes(body: Body, world: int, folder: Path, ledgers: bool, timeout_s: float = 20.0) -> Any:
    """Run ``body`` on forked gloo ranks; what each returned (JSON); raises on any failure."""
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _child(body, rank, world, folder, ledgers, timeout_s)
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
    answers, broken = [], []
    for rank in range(world):
        path = folder / f"answer{rank}"
        if path.exists():
            answers.append(json.loads(path.read_text()))
            broken += [answers[-1]["error"]] if answers[-1]["error"] else []
        else:
            stacks = (folder / f"stacks{rank}").read_text()
            broken.append(f"rank {rank}: wait status {codes[children[rank]]}\n{stacks}")
    assert not broken, "\n".join(broken)
    return [answer["result"] for answer in answers]


def _child(
    body: Body, rank: int, world: int, folder: Path, ledgers: bool, timeout_s: float
) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    answer: dict[str, Any] = {"result": None, "error": ""}
    faulthandler.dump_traceback_later(60, file=(folder / f"stacks{rank}").open("w"))
    try:
        backends.join("gloo", rank, world, folder / "meeting", timeout_s, ledgers)
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
