"""gloo with a ledger: a Python group that hands every call on to ``ProcessGroupGloo`` unchanged.

torch builds its gloo groups from the name ``ProcessGroupGloo`` in ``distributed_c10d``; while
ledgers are on that name means :class:`LoggedGloo`.  So the default group, ``new_group``, device
meshes and explicit ``backend="gloo"`` all pass through here, the backend still calls itself
``gloo``, and DDP's C++ reducer and functional collectives reach the log through torch's
trampolines.  With ledgers off nothing is installed.  Results, order, threads and failures are
gloo's own.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from suite.backends.base import GroupBase, Handle
from suite.backends.request import OLD_NAMES, Request
from suite.backends.weather import Weather, poison

_NATIVE: Any = getattr(c10d, "ProcessGroupGloo", None)


class _Handle(Handle):
    """Wraps gloo's own handle."""

    def __init__(self, request: Request, work: Any) -> None:
        super().__init__(request)
        self._work = work

    def _settle(self, timeout: float | None) -> None:
        if timeout:
            self._work.wait(timedelta(seconds=timeout))
        else:
            self._work.wait()

    def _future(self) -> Any:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> Any:
        return self._work.exception()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


class LoggedGloo(GroupBase):
    """Delegates to a native gloo group; constructed by torch in its place."""

    # Not "gloo": DDP's C++ logger looks for a native gloo group behind that name.
    backend_name = "logged_gloo"
    weather: ClassVar[Weather | None] = None

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(rank, size, timeout)
        self.backend = _NATIVE(store, rank, size, timeout=timeout)
        # The same two storeys as torch builds: calls go through its dispatcher to the backend.
        self.native: Any = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.native._set_default_backend(kind)
        for device in dist.Backend.backend_capability["gloo"]:
            self.native._register_backend(torch.device(device), kind, self.backend)
        if self.weather is not None:
            self.transform = self.weather.skew(rank)

    @property
    def options(self) -> Any:
        """gloo's options; torch writes the global ranks into them."""
        return self.backend.options

    @property
    def global_ranks(self) -> tuple[int, ...]:
        ranks = tuple(self.backend.options.global_ranks_in_group)
        return ranks or tuple(range(self._size))

    def _start(self, request: Request) -> Handle:
        if self.weather is not None and self.weather.poison:
            poison(request, self._rank, keep_inputs=False)
        method = getattr(self.native, request.method, None)
        if method is None:
            method = getattr(self.native, OLD_NAMES[request.method])
        return _Handle(request, method(*request.args))

    def monitored_barrier(self, *args: Any, **options: Any) -> Any:
        """gloo's barrier that names the missing rank."""
        return self.native.monitored_barrier(*args, **options)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self.backend._set_default_timeout(timeout)

    _set_timeout = set_timeout

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.native._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self.native._set_group_desc(description)

    def _set_sequence_number_for_group(self) -> None:
        self.backend._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self) -> int:
        return int(self.backend._get_sequence_number_for_group())

    def _get_backend(self, device: Any) -> Any:
        return self.backend

    def abort(self) -> None:
        """Cut all connections."""
        self.native.abort()

    def shutdown(self) -> None:
        """Close the group."""
        self.native.shutdown()


def available() -> str | None:
    """Why gloo cannot be used here, ``None`` if it can."""
    if _NATIVE is None or not dist.is_gloo_available():
        return "this torch is built without gloo"
    return None


def join(
    rank: int,
    world: int,
    rendezvous: Path | dist.Store,
    timeout_s: float,
    ledgers: bool,
    weather: Weather | None = None,
) -> None:
    """Join the default group of ``world`` processes that meet in the file or store ``rendezvous``.

    Weather needs the wrapper, hence the ledgers; without them it is calm.
    """
    LoggedGloo.weather = weather
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    limit = timedelta(seconds=timeout_s)
    # Groups made later (new_group, DeviceMesh) take this instead of their own 30 minutes.
    c10d.default_pg_timeout = limit
    setattr(c10d, "ProcessGroupGloo", LoggedGloo if ledgers else _NATIVE)  # noqa: B010
    if isinstance(rendezvous, Path):
        rendezvous = dist.FileStore(str(rendezvous), world)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world,
        store=rendezvous,
        timeout=limit,
    )


def leave() -> None:
    """Destroy all groups of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    setattr(c10d, "ProcessGroupGloo", _NATIVE)  # noqa: B010


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
