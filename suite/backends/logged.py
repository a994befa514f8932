"""A native backend with a ledger: a Python group hands every call on to torch's own, unchanged.

torch builds its groups from names in ``distributed_c10d`` (``ProcessGroupGloo``,
``ProcessGroupNCCL``); while ledgers are on such a name means a subclass of :class:`Logged`.  So the
default group, ``new_group``, device meshes and an explicit ``backend=`` all pass through here, and
DDP's C++ reducer and functional collectives reach the log through torch's trampolines.  With
ledgers off nothing is installed.  Results, order, threads and failures are the backend's own.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardproof.backends.base import GroupBase, Handle
from shardproof.backends.disturbances import Disturbances, poison
from shardproof.backends.request import OLD_NAMES, Request


class _Handle(Handle):
    """``work`` is torch's; NCCL gives none of a call that the caller's own stream makes."""

    def __init__(self, request: Request, work: Any) -> None:
        super().__init__(request)
        self._work = work

    def _settle(self, timeout: float | None) -> None:
        if self._work is None:
            return
        if timeout:
            self._work.wait(timedelta(seconds=timeout))
        else:
            self._work.wait()

    def _future(self) -> Any:
        if self._work is not None:
            return self._work.get_future()
        results = [tensor for item in self.request.outputs for tensor in item]
        devices: list[Any] = list({tensor.device for tensor in results if not tensor.is_cpu})
        future = torch.futures.Future[list[Tensor]](devices=devices)
        future.set_result(results)
        return future

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def exception(self) -> Any:
        return None if self._work is None else self._work.exception()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


class _Late(_Handle):
    """What ``work`` returns comes ``seconds`` after it is there, whoever waits for it and when."""

    def __init__(self, request: Request, work: Any, seconds: float) -> None:
        super().__init__(request, work)
        self._there = torch.futures.Future[list[Tensor]]()
        threading.Thread(target=self._under_way, args=(seconds,), daemon=True).start()

    def _under_way(self, seconds: float) -> None:
        try:
            self._work.wait()
            time.sleep(seconds)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._there.set_exception(error)  # type: ignore[arg-type]  # torch's own hint is wrong
        else:
            self._there.set_result([tensor for item in self.request.outputs for tensor in item])

    def _settle(self, timeout: float | None) -> None:
        self._there.wait()

    def _future(self) -> Any:
        return self._there

    def is_completed(self) -> bool:
        return bool(self._there.done())


class _Together(_Handle):
    """The one work of calls that began together; each of them is waited for by it."""

    def __init__(self, handles: list[_Handle], work: Any) -> None:
        super().__init__(Request("coalesced"), work)
        self._handles = handles
        for handle in handles:
            handle._work = work

    def note_wait(self) -> None:
        for handle in self._handles:
            handle.note_wait()


class Logged(GroupBase):
    """Delegates to the native group ``backend``, which a subclass makes."""

    #: The backend's name in torch, torch's number for it, and torch's class of its groups (``None``
    #: where torch is built without it).
    torch_name: ClassVar[str]
    kind: ClassVar[Any]
    native_type: ClassVar[Any]
    disturbances: ClassVar[Disturbances | None] = None
    compares = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, backend: Any) -> None:
        super().__init__(rank, size, timeout)
        self.backend = backend
        # The same two storeys as torch builds: calls go through its dispatcher to the backend.
        self.native: Any = dist.ProcessGroup(store, rank, size)
        self.native._set_default_backend(self.kind)
        for device in dist.Backend.backend_capability[self.torch_name]:
            self.native._register_backend(torch.device(device), self.kind, self.backend)
        if self.disturbances is not None:
            self.transform = self.disturbances.skew(rank)
        #: Calls that begin together when torch says so; ``None``: each begins by itself.
        self._gathered: list[_Handle] | None = None

    @classmethod
    def join(
        cls,
        rank: int,
        world: int,
        rendezvous: Path | dist.Store,
        timeout_s: float,
        ledgers: bool,
        disturbances: Disturbances | None = None,
    ) -> None:
        """Join the default group of ``world`` processes that meet in ``rendezvous``.

        Disturbances need the wrapper, and so the ledgers; without ledgers there are none but nodes
        that are far from each other.
        """
        cls.disturbances = disturbances
        limit = timedelta(seconds=timeout_s)
        # Groups made later (new_group, DeviceMesh) take these instead of their own 10 to 30
        # minutes.
        c10d.default_pg_timeout = limit
        if hasattr(c10d, "default_pg_nccl_timeout"):
            c10d.default_pg_nccl_timeout = limit
        # torch builds groups from this name.
        wrapped = ledgers or (disturbances is not None and disturbances.far is not None)
        setattr(c10d, cls.native_type.__name__, cls if wrapped else cls.native_type)
        store = rendezvous
        if isinstance(store, Path):
            store = dist.FileStore(str(store), world)
        name = cls.torch_name
        dist.init_process_group(name, rank=rank, world_size=world, store=store, timeout=limit)

    @classmethod
    def leave(cls) -> None:
        """Destroy all groups of this process and give torch its own class back."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if cls.native_type is not None:
            setattr(c10d, cls.native_type.__name__, cls.native_type)

    @property
    def options(self) -> Any:
        """The backend's options; torch writes the global ranks into them."""
        return self.backend.options

    @property
    def _device_types(self) -> list[torch.device]:
        types: list[torch.device] = self.native._device_types
        return types

    @property
    def global_ranks(self) -> tuple[int, ...]:
        ranks = tuple(self.backend.options.global_ranks_in_group)
        return ranks or tuple(range(self._size))

    def _start(self, request: Request) -> Handle:
        if self.disturbances is not None and self.disturbances.poison:
            poison(request, self._rank, keep_inputs=False)
        method = getattr(self.native, request.method, None)
        if method is None:
            method = getattr(self.native, OLD_NAMES[request.method])
        work = method(*request.args)
        far = self.disturbances.far if self.disturbances is not None else None
        late = far.late(request, self.global_ranks, self._rank) if far is not None else 0.0
        handle = _Late(request, work, late) if late else _Handle(request, work)
        if self._gathered is not None:
            self._gathered.append(handle)
        return handle

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls from now on begin together."""
        self.native._start_coalescing(device)
        self._gathered = []

    def _end_coalescing(self, device: torch.device) -> Handle:
        """They begin; what all of them return is there when this is waited for."""
        handles, self._gathered = self._gathered or [], None
        return _Together(handles, self.native._end_coalescing(device))

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
        self.native.abort()

    def shutdown(self) -> None:
        self.native.shutdown()
