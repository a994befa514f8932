"""A collective library as torch sees it: importing it registers the backend ``acme``.

A vendor's own would call its C++ here.  This one hands everything on to gloo.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


def native(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """The group of one rank, as C++ code returns it: a backend."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


class Short(dist.ProcessGroup):
    """A group written in Python, with a fault: its all-reduce leaves the last rank out."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._native = native(store, rank, size, timeout)
        self._is_last = rank == size - 1

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:
        """The sum over all ranks but the last."""
        if self._is_last:
            for tensor in tensors:
                tensor.zero_()
        return self._native.allreduce(tensors, options)

    def barrier(self, options: dist.BarrierOptions) -> dist.Work:
        """Return when all ranks have come."""
        return self._native.barrier(options)


dist.Backend.register_backend("acme", native, devices=["cpu"])
dist.Backend.register_backend("acme_short", Short, devices=["cpu"])
