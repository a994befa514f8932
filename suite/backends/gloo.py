"""gloo, with a ledger where one is wanted: see :mod:`shardproof.backends.logged`."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.backends import cuda, logged


class LoggedGloo(logged.Logged):
    """Constructed by torch in place of ``ProcessGroupGloo``."""

    # Not "gloo": DDP's C++ logger looks for a native gloo group behind that name.
    backend_name = "logged_gloo"
    torch_name = "gloo"
    kind = dist.ProcessGroup.BackendType.GLOO
    native_type: ClassVar[Any] = getattr(c10d, "ProcessGroupGloo", None)

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        native = self.native_type(store, rank, size, timeout=timeout)
        super().__init__(store, rank, size, timeout, native)

    @classmethod
    def join(cls, *given: Any, **named: Any) -> None:
        """As every backend; over the loopback interface unless the environment names another."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        super().join(*given, **named)


def available(on_gpus: bool = False) -> str | None:
    """Why gloo cannot be used here (``on_gpus``: with CUDA tensors), ``None`` if it can."""
    if LoggedGloo.native_type is None or not dist.is_gloo_available():
        return "this torch is built without gloo"
    reason = cuda.available(shared=True) if on_gpus else None
    return f"gloo with CUDA tensors {reason}" if reason else None


def loopback() -> str:
    """The interface over which processes of one machine meet."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
