"""gloo: PyTorch's own backend for processes on CPUs, logged where a ledger is wanted."""

from __future__ import annotations

import os
import socket
from typing import ClassVar

from shardproof.backends.backend import Algorithms, Joining, Takes
from shardproof.backends.torch_backend import TorchBackend

#: Dtypes that its gather takes; NCCL's neither knows complex ones.
WITHOUT_COMPLEX = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"),
)


class Gloo(TorchBackend):
    """Over the loopback interface, unless the environment names another."""

    name = "gloo"
    torch_class = "ProcessGroupGloo"
    takes_over = False
    delays_far_nodes = True
    # gloo/allreduce.cc: a ring unless asked otherwise; gloo/broadcast.cc: a binomial tree.
    algorithms: ClassVar[Algorithms | None] = {
        "reduce_scatter": ("all-reduce ring",),
        "reduce": ("ring and gather",),
    }
    takes: ClassVar[Takes] = {"gather": {"dtype": WITHOUT_COMPLEX}}  # "Invalid scalar type"
    remedy = "install a build of torch with distributed and gloo"

    def join(self, joining: Joining) -> None:
        """As every backend of torch, over one interface."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        super().join(joining)


def loopback() -> str:
    """The interface over which processes of one machine meet."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
