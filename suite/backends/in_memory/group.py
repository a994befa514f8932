"""Ranks as threads of one process, meeting in a :class:`~shardproof.backends.in_memory.hub.Hub`.

A full ``torch.distributed`` backend: upstream DDP, FSDP2, DTensor and pipelining run on it
unchanged. Registered as ``threaded``, the one name by which DeviceMesh keeps the caches of threads
apart (torch's own backend of that name, a testing internal, is never imported).

Results are bitwise deterministic: reductions fold in rank order, and everything that a rank's
program can see happens on its own thread at a point of its own program (``futures.py``).

What threads share and processes do not: the default random generator, the environment,
``sys.excepthook``.

torch keeps its process groups in ``distributed_c10d._world``, documented there as the point to
override.  :class:`ThreadWorlds` answers from the calling thread's own state where a rank thread set
one up, and from torch's real one elsewhere, so ``init_process_group`` and everything after it run
unchanged in each thread.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.backends import arithmetic
from shardproof.backends.base import GroupBase, Handle
from shardproof.backends.disturbances import Disturbances, poison
from shardproof.backends.futures import OwnHandle, announce_delayed_reduction
from shardproof.backends.in_memory.hub import Hub, Pending
from shardproof.backends.request import Request, check

NAME = "threaded"
_RANK = threading.local()
_SETUP = threading.Lock()


class _Handle(OwnHandle):
    def __init__(self, request: Request, hub: Hub, rank: int, pending: Pending) -> None:
        super().__init__(request)
        self._hub, self._rank, self._pending = hub, rank, pending
        self._made_visible = False

    def _settle(self, timeout: float | None) -> None:
        self._hub.wait(self._rank, self._pending, timeout)
        if not self._made_visible:
            self._made_visible = True
            arithmetic.write(self._pending.take_writes(self._rank))

    def is_completed(self) -> bool:
        return self._pending.done

    def exception(self) -> Any:
        return None if self._pending.done else self._hub.failure

    def _source_rank(self) -> int:
        return self._pending.source

    source_rank = _source_rank


class InMemoryGroup(GroupBase):
    """This rank's side of a group."""

    backend_name = NAME

    def __init__(
        self, hub: Hub, global_rank: int, ranks: tuple[int, ...], name: str, timeout: timedelta
    ) -> None:
        super().__init__(ranks.index(global_rank), len(ranks), timeout, ranks)
        self._hub, self._global_rank, self._name = hub, global_rank, name
        made: dict[tuple[str, tuple[int, ...]], int] = _RANK.made
        nth = made[name, ranks] = made.get((name, ranks), -1) + 1
        self._shared = hub.group(name, ranks, nth)
        if _RANK.disturbances is not None:
            self.transform = _RANK.disturbances.skew(global_rank)

    def _start(self, request: Request) -> Handle:
        check(request, self._size, self._rank)
        if self._hub.poison:
            poison(request, self._rank, keep_inputs=True)
        exchange = request.operation in ("send", "recv")
        post = self._hub.post_exchange if exchange else self._hub.post
        pending = post(self._shared, self._rank, request)
        return _Handle(request, self._hub, self._global_rank, pending)

    def abort(self) -> None:
        """End the world of all ranks."""
        self._hub.fail(self._global_rank, RuntimeError("the process group was aborted"))

    def shutdown(self) -> None:
        """Nothing to release: the hub goes with its last user."""


def _create(options: Any, _: Any) -> InMemoryGroup:
    hub: Hub = _RANK.hub
    ranks = tuple(options.global_ranks_in_group) or tuple(range(hub.world))
    return InMemoryGroup(hub, _RANK.rank, ranks, str(options.group_id), options.timeout)


def join(rank: int, hub: Hub, disturbances: Disturbances | None = None) -> None:
    """Make the calling thread rank ``rank`` of ``hub`` and initialise its default group."""
    _install()
    if disturbances is not None:
        hub.delay, hub.poison = disturbances.delay or disturbances.poison, disturbances.poison
    _RANK.own = _OwnState()  # torch's world of this thread
    _RANK.hub, _RANK.rank, _RANK.made, _RANK.disturbances = hub, rank, {}, disturbances
    # Backward hooks must run on this thread; that is torch's default on CPU only.
    _RANK.autograd = torch.autograd.set_multithreading_enabled(False)
    with _SETUP:
        if NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        hook = sys.excepthook  # each init would chain one more "[rank k]:" to it
        try:
            dist.init_process_group(
                NAME,
                rank=rank,
                world_size=hub.world,
                store=hub.store,
                timeout=timedelta(seconds=hub.timeout_s),
            )
        finally:
            sys.excepthook = hook


def hub() -> Hub:
    """The hub of the calling rank."""
    return _RANK.hub


def depart() -> None:
    """Take the calling rank out of all groups; ranks that wait for it learn of it."""
    hub().depart(_RANK.rank)


def leave() -> None:
    """Destroy all groups of the calling rank and give the thread its old world back."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        _RANK.autograd.__exit__(None, None, None)
        _RANK.hub = _RANK.own = None


#: Maps that torch keeps of its groups.
_MAPS = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_default_device"),
    *("tags_to_pg", "pg_to_tag", "pg_coalesce_state"),
)


class _OwnState(SimpleNamespace):
    """The maps of one rank thread (``_World`` itself keeps them in module globals)."""

    def __init__(self) -> None:
        super().__init__(default_pg=None, group_count=0, comms=[], **{name: {} for name in _MAPS})

    #: For torch's own diagnostics.
    pg_config_info = c10d._World.pg_config_info


class ThreadWorlds:
    """Stands in for ``distributed_c10d._world``."""

    def __init__(self, real: Any) -> None:
        object.__setattr__(self, "_real", real)

    def _target(self) -> Any:
        return getattr(_RANK, "own", None) or self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(), name, value)


def _install() -> None:
    """Prepare the process for rank threads (once; harmless for other threads)."""
    with _SETUP:
        if isinstance(c10d._world, ThreadWorlds):
            return
        # Functional collectives look groups up by name: one registry per thread.
        getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")(True)  # noqa: B009
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        # Its own comment asks threaded programs for a lock here.
        ShardingPropagator._fake_mode_lock = threading.RLock()  # type: ignore[assignment]
        c10d._world = ThreadWorlds(c10d._world)  # type: ignore[assignment]
        announce_delayed_reduction()
