"""One ``torch.distributed`` world per thread.

torch keeps its process groups in ``distributed_c10d._world``, documented there as the point to
override. :class:`ThreadWorlds` answers from the calling thread's own state where a rank thread set
one up, and from torch's real one elsewhere, so ``init_process_group`` and everything after it run
unchanged in each thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from shardproof.backends.futures import announce_delayed_reduction

_STATE = threading.local()
_INSTALL = threading.Lock()


class _OwnState:
    """The maps of one rank thread (``_World`` itself keeps them in module globals)."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.pg_default_device: dict[Any, Any] = {}

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """For torch's own diagnostics."""
        return [
            {
                "pg_name": self.pg_names[group],
                "pg_desc": group.group_desc,
                "backend_config": self.pg_backend_config[group],
                "ranks": list(ranks),
                "group_size": len(ranks),
                "group_count": self.group_count,
            }
            for group, ranks in self.pg_group_ranks.items()
        ]


class ThreadWorlds:
    """Stands in for ``distributed_c10d._world``."""

    def __init__(self, real: Any) -> None:
        object.__setattr__(self, "_real", real)

    def _target(self) -> Any:
        return getattr(_STATE, "own", None) or self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(), name, value)


def install() -> None:
    """Prepare the process for rank threads (once; harmless for other threads)."""
    with _INSTALL:
        if isinstance(c10d._world, ThreadWorlds):
            return
        # Functional collectives look groups up by name: one registry per thread.
        getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")(True)  # noqa: B009
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        # Its own comment asks threaded programs for a lock here.
        ShardingPropagator._fake_mode_lock = threading.RLock()  # type: ignore[assignment]
        c10d._world = ThreadWorlds(c10d._world)  # type: ignore[assignment]
        announce_delayed_reduction()


def enter() -> None:
    """Give the calling thread a world of its own."""
    _STATE.own = _OwnState()


def exit() -> None:
    """Let the calling thread see torch's real world again."""
    _STATE.own = None
