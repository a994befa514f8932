"""Small launchers for the tests of the backends: rank threads, or forked rank processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof import tensor_bytes
from shardproof.backends import Joining, joined
from shardproof.backends.disturbances import Disturbances
from shardproof.backends.errors import CommError
from shardproof.backends.in_memory.hub import Hub
from shardproof.launch.pool import Pool
from shardproof.launch.rank_process import RankLaunch
from shardproof.launch.ranks import Forked, root_cause

Body = Callable[[int, int], Any]

#: CPU seconds of a rank, and seconds that all may sleep.
BUDGET_SECONDS = 60.0


def threads(
    body: Body,
    world: int,
    hub: Hub | None = None,
    ledgers: bool = False,
    disturbances: Disturbances | None = None,
) -> tuple[list[Any], list[BaseException | None]]:
    """Run ``body(rank, world)`` on threads; per rank what it returned and what it raised."""
    hub = hub or Hub(world, 20.0)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def live(rank: int) -> None:
        joined.join("in_memory", Joining(rank, world, Path(), 20.0, ledgers, hub, disturbances))
        try:
            results[rank] = body(rank, world)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors[rank] = error
            hub.fail(rank, error)
        else:
            hub.rank_done(rank)
        finally:
            joined.leave()

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
    body: Callable[..., Any],
    world: int,
    folder: Path,
    ledgers: bool,
    *arguments: Any,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``body(rank, world, *arguments)`` on processes; what each returned (all as JSON).

    ``body`` is a module's own function.  The ranks are forked from a leader, which never ran a
    thread: a child of a process whose rank threads computed may hang in its first matrix product.
    Raises ``AssertionError`` with what a rank raised, or with where one hung.
    """
    request = Request(body, world, folder, ledgers, arguments, backend)
    with Pool(1) as pool:
        pool.fork_server.preload("pytest")  # modules of tests import it
        (end,) = pool.run(forked, [("ranks", request, 3 * BUDGET_SECONDS)])
    assert end.value is not None, end.output
    return list(end.value)


@dataclass(frozen=True)
class Request:
    """Ranks to fork in a leader."""

    body: Callable[..., Any]
    world: int
    folder: Path
    ledgers: bool
    arguments: tuple[Any, ...]
    backend: str


def forked(request: Request) -> list[Any]:
    """Task of a leader: what each rank returned."""

    def program(rank: int, world: int) -> dict[str, Any]:
        return {"result": request.body(rank, world, *request.arguments)}

    where = request.backend, request.world
    launch = RankLaunch(*where, program, request.folder, BUDGET_SECONDS, request.ledgers)
    outcomes = Forked().run(launch)
    cause = root_cause(outcomes)
    assert cause is None, f"{cause.sentence()}\n{cause.traceback}"
    return [tensor_bytes.load(o.record)["result"] for o in outcomes if o.record]
