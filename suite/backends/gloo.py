"""gloo: PyTorch's own backend for processes on CPUs, logged where a ledger is wanted."""

from __future__ import annotations

import os
import socket
from typing import ClassVar

from shardproof.backends.backend import Algorithms, Joining, Takes
from shardproof.backends.torch_backend import TorchBackend
from shardproof.errors import Problem

#: The variable that names interfaces.
INTERFACE = "GLOO_SOCKET_IFNAME"
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

    def unreachable(self) -> Problem | None:
        """The problem of the interface that ranks meet on."""
        return problem_of_interface(os.environ.get(INTERFACE, ""))

    def join(self, joining: Joining) -> None:
        """As every backend of torch, over one interface."""
        os.environ.setdefault(INTERFACE, loopback())
        super().join(joining)


def loopback() -> str:
    """The interface over which processes of one machine meet."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


def problem_of_interface(given: str) -> Problem | None:
    """The problem of the interfaces ``given`` (separated by commas; empty: the loopback): one is
    missing, down, or without an address.
    """
    import psutil  # only once ranks broke

    there, state = [name for _, name in socket.if_nameindex()], psutil.net_if_stats()
    for name in filter(None, (given or loopback()).split(",")):
        if name not in there:
            remedy = f"unset {INTERFACE}, or set the variable to one of {', '.join(there)}"
            return Problem(f"{INTERFACE}={given}, but this machine has no interface {name}", remedy)
        families = {one.family for one in psutil.net_if_addrs().get(name, ())}
        if not state[name].isup or families.isdisjoint((socket.AF_INET, socket.AF_INET6)):
            what = f"the network interface {name} is down, or has no address"
            return Problem(what, f"run `ip link set {name} up`, or choose another {INTERFACE}")
    return None
