"""NCCL, with a ledger where one is wanted: see :mod:`shardproof.backends.logged`.

One GPU a rank: rank ``r`` of a case computes on GPU ``r`` of its machine, because NCCL refuses two
ranks on one GPU.  Payloads are counted as for every backend, before NCCL picks its algorithm.
Times of calls are not: a call returns when it is queued on a stream.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.backends import cuda, logged


class LoggedNccl(logged.Logged):
    """Constructed by torch in place of ``ProcessGroupNCCL``."""

    # Not "nccl": torch's C++ looks for a native NCCL group behind that name.
    backend_name = "logged_nccl"
    torch_name = "nccl"
    kind = dist.ProcessGroup.BackendType.NCCL
    native_type: ClassVar[Any] = getattr(c10d, "ProcessGroupNCCL", None)
    # Attributes that torch looks up on the class.
    Options = getattr(native_type, "Options", None)
    NCCLConfig = getattr(native_type, "NCCLConfig", None)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        native = self.native_type(store, rank, size, options)
        timeout = getattr(options, "_timeout", timedelta(minutes=10))
        super().__init__(store, rank, size, timeout, native)


def available(world: int = 1) -> str | None:
    """Why ``world`` ranks cannot use NCCL here, ``None`` if they can."""
    if LoggedNccl.native_type is None or not dist.is_nccl_available():
        return "this torch is built without NCCL"
    reason = cuda.available(world)
    return f"NCCL {reason}" if reason else None
