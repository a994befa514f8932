"""A native backend with a ledger: a Python group hands every call on to the native one, unchanged.

torch builds its groups from classes in ``distributed_c10d`` (``ProcessGroupGloo``), and those of
vendors by functions that were given to ``Backend.register_backend``.  While ledgers are on a
subclass of :class:`Logged` stands in the place of either.  So the default group, ``new_group``,
device meshes and an explicit ``backend=`` all pass through here, and DDP's C++ reducer and
functional collectives reach the log through torch's trampolines.  With ledgers off nothing is
installed.  Results, order, threads and failures are the backend's own.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardproof.backends.backend import Joining
from shardproof.backends.base import GroupBase, Handle
from shardproof.backends.disturbances import Disturbances, poison
from shardproof.backends.request import OLD_NAMES, Request


class NativeHandle(Handle):
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


class _Together(NativeHandle):
    """The one work of calls that began together; each of them is waited for by it."""

    def __init__(self, handles: list[NativeHandle], work: Any) -> None:
        super().__init__(Request("coalesced"), work)
        self._handles = handles
        for handle in handles:
            handle._work = work

    def note_wait(self) -> None:
        for handle in self._handles:
            handle.note_wait()


class Logged(GroupBase):
    """Delegates to the native group that ``native_type`` makes; constructed in its place."""

    #: The backend's name in torch, and torch's number for it.
    torch_name: ClassVar[str]
    kind: ClassVar[Any]
    #: torch's class of the groups, or the function that a vendor's package registered; ``None``
    #: where torch is built without it.
    native_type: ClassVar[Any]
    disturbances: ClassVar[Disturbances | None] = None
    compares = True

    def __init__(self, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        limits = (getattr(each, "_timeout", each) for each in (*given, *named.values()))
        known = (limit for limit in limits if isinstance(limit, timedelta))
        super().__init__(rank, size, next(known, c10d.default_pg_timeout))
        self._delegate(type(self).native_type(store, rank, size, *given, **named), store)

    def _delegate(self, native: Any, store: dist.Store) -> None:
        """Hand calls on to ``native``, a group, or a backend of one."""
        self.backend = self.native = native
        if not isinstance(native, dist.ProcessGroup):
            # The same two storeys as torch builds: calls go through its dispatcher to the backend.
            self.native = dist.ProcessGroup(store, self._rank, self._size)
            self.native._set_default_backend(self.kind)
            for device in dist.Backend.backend_capability[self.torch_name]:
                self.native._register_backend(torch.device(device), self.kind, native)
        if self.disturbances is not None:
            self.transform = self.disturbances.skew(self._rank)
        #: Calls that begin together when torch says so; ``None``: each begins by itself.
        self._gathered: list[NativeHandle] | None = None

    @classmethod
    def join_default(cls, joining: Joining) -> None:
        """Join the default group of the processes that ``joining`` names.

        Disturbances need the wrapper, and so the ledgers; without ledgers there are none but nodes
        that are far from each other.
        """
        cls.disturbances = joining.disturbances
        # Groups made later (new_group, DeviceMesh) take these instead of their own 10 to 30
        # minutes.
        c10d.default_pg_timeout = joining.timeout
        if hasattr(c10d, "default_pg_nccl_timeout"):
            c10d.default_pg_nccl_timeout = joining.timeout
        cls.install(joining.ledgers or cls.only_delays())
        dist.init_process_group(
            cls.torch_name,
            rank=joining.rank,
            world_size=joining.world,
            store=joining.store,
            timeout=joining.timeout,
        )

    @classmethod
    def only_delays(cls) -> bool:
        """Whether groups are there to delay what crosses nodes."""
        return cls.disturbances is not None and cls.disturbances.far is not None

    @classmethod
    def install(cls, ours: bool) -> None:
        """Let torch make groups of this class (``ours``), or native ones."""
        if cls.native_type is not None:
            cls._put(cls if ours else cls.native_type)
        for module in (dist, c10d):
            setattr(module, _TORCH_BATCH.__name__, _batch if ours else _TORCH_BATCH)

    @classmethod
    def _put(cls, maker: Any) -> None:
        """Let torch make groups by ``maker``."""
        setattr(c10d, cls.native_type.__name__, maker)

    @classmethod
    def is_installed(cls) -> bool:
        """Whether torch makes groups of this class."""
        return getattr(c10d, cls.native_type.__name__) is not cls.native_type

    @property
    def options(self) -> Any:
        """The backend's options; torch writes the global ranks into them."""
        return self.backend.options

    @property
    def _device_types(self) -> list[torch.device]:
        return self.native._device_types

    @property
    def global_ranks(self) -> tuple[int, ...]:
        options = getattr(self.backend, "options", None)
        ranks = tuple(getattr(options, "global_ranks_in_group", ()))
        return ranks or tuple(c10d._world.pg_group_ranks.get(self, range(self._size)))

    def _start(self, request: Request) -> Handle:
        if self.disturbances is not None and self.disturbances.poison:
            poison(request, self._rank, keep_inputs=False)
        method = getattr(self.native, request.method, None)
        if method is None:
            method = getattr(self.native, OLD_NAMES[request.method])
        work = method(*request.args)
        far = self.disturbances.far if self.disturbances is not None else None
        late = far(request, self.global_ranks, self._rank, work) if far is not None else None
        handle = late or NativeHandle(request, work)
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
        """A barrier of the native group that names the missing rank."""
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


class _LoggedPlugin(Logged):
    """In the place of groups that the function of a vendor's package makes."""

    @classmethod
    def _put(cls, maker: Any) -> None:
        plugins, name = dist.Backend._plugins, cls.torch_name.upper()
        plugins[name] = plugins[name]._replace(creator_fn=maker)

    @classmethod
    def is_installed(cls) -> bool:
        """Whether torch asks this class for groups."""
        return dist.Backend._plugins[cls.torch_name.upper()].creator_fn is not cls.native_type


class _LoggedExtendedPlugin(_LoggedPlugin):
    """The same of a function that was registered with ``extended_api=True``."""

    def __init__(self, place: Any, options: Any) -> None:
        GroupBase.__init__(self, place.group_rank, place.group_size, place.timeout)
        self._delegate(type(self).native_type(place, options), place.store)


@cache
def group_of(torch_name: str, torch_class: str) -> type[Logged]:
    """The class of the groups that log what goes to torch's backend ``torch_name``.

    ``torch_class``: the name in ``distributed_c10d`` of torch's own class of groups; empty where a
    function was registered, which must have happened before.
    """
    base: type[Logged] = Logged
    native = getattr(c10d, torch_class, None)
    if not torch_class:
        native, extended = dist.Backend._plugins[torch_name.upper()]
        base = _LoggedExtendedPlugin if extended else _LoggedPlugin
    fields = {
        # Not the backend's own name: torch's C++ looks for a native group behind that.
        "backend_name": f"logged_{torch_name}",
        "torch_name": torch_name,
        "kind": dist.Backend.backend_type_map[torch_name],
        "native_type": native,
    }
    # What torch looks up on the class.
    fields |= {n: getattr(native, n) for n in ("Options", "NCCLConfig") if hasattr(native, n)}
    return type(f"Logged_{torch_name}", (base,), fields)


_TORCH_BATCH = c10d.batch_isend_irecv


def _batch(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """torch's ``batch_isend_irecv``, which begins the calls of a batch together for its own groups
    alone.  Two ranks that send to each other one call after the other would both wait.
    """
    group = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
    if not (isinstance(group, Logged) and getattr(group.backend, "supports_coalescing", False)):
        return _TORCH_BATCH(p2p_op_list)
    c10d._check_p2p_op_list(p2p_op_list)
    device = p2p_op_list[0].tensor.device
    with c10d._coalescing_manager(group, device, async_ops=True) as together:
        for one in p2p_op_list:
            peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=group, tag=one.tag, **peer)
    return together.works
