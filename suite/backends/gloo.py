"""gloo, with a ledger where one is wanted: see :mod:`shardproof.backends.logged`."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.backends import cuda, logged
from shardproof.backends.disturbances import Disturbances

_NAME = "ProcessGroupGloo"
_NATIVE: Any = getattr(c10d, _NAME, None)


class LoggedGloo(logged.Logged):
    """Constructed by torch in place of ``ProcessGroupGloo``."""

    # Not "gloo": DDP's C++ logger looks for a native gloo group behind that name.
    backend_name = "logged_gloo"
    torch_name = "gloo"
    kind = dist.ProcessGroup.BackendType.GLOO

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        native = _NATIVE(store, rank, size, timeout=timeout)
        super().__init__(store, rank, size, timeout, native)


def available(on_gpus: bool = False) -> str | None:
    """Why gloo cannot be used here (``on_gpus``: with CUDA tensors), ``None`` if it can."""
    if _NATIVE is None or not dist.is_gloo_available():
        return "this torch is built without gloo"
    reason = cuda.available(shared=True) if on_gpus else None
    return f"gloo with CUDA tensors {reason}" if reason else None


def join(
    rank: int,
    world: int,
    rendezvous: Path | dist.Store,
    timeout_s: float,
    ledgers: bool,
    disturbances: Disturbances | None = None,
) -> None:
    """Join the default group of ``world`` processes that meet in the file or store ``rendezvous``.

    Disturbances need the wrapper, and so the ledgers; without ledgers there are none.
    """
    LoggedGloo.disturbances = disturbances
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    chosen = (_NAME, LoggedGloo if ledgers else _NATIVE)
    logged.initialise("gloo", rank, world, rendezvous, timeout_s, chosen)


def leave() -> None:
    """Destroy all groups of this process."""
    logged.destroy((_NAME, _NATIVE))


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
