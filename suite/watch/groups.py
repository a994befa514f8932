"""Process groups of the script, watched: torch builds ours in place of its own.

They are the delegating groups of :mod:`shardproof.backends.logged`, so calls of DDP's reducer and
of functional collectives are seen too, and results, order and failures stay the backend's own.
gloo, NCCL and the suite's own group over MPI are watched.  Groups of other backends, of several at
once (``cpu:gloo,cuda:nccl``) and those that a group splits off itself stay torch's own, and are
named as not seen.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d

from shardproof.backends import base, logged
from shardproof.backends.errors import name_ranks
from shardproof.backends.gloo import Gloo
from shardproof.backends.mpi import group as over_mpi
from shardproof.backends.nccl import Nccl
from shardproof.backends.request import Request
from shardproof.watch.calls import Calls

#: Where the calls of this process go; ``None``: to nowhere yet.
_calls: Calls | None = None
#: Groups that are not watched, in words.
unseen: list[str] = []


class _Watched(base.GroupBase):
    compares = False
    _label = ""

    def _issue(self, request: Request) -> base.Handle:
        if _calls is not None:
            _calls.note(request, self._label or self._named(), self._size, self._rank)
        return super()._issue(request)

    def _named(self) -> str:
        label = name_ranks(self.global_ranks)
        if self.axis != "world":
            label += f" (group {self._name})"  # another group may have the same ranks
        if self._name:
            self._label = label
        return label


class WatchedMpi(_Watched, over_mpi.MpiGroup):
    """Made in place of the suite's own group over MPI."""


#: By their names in torch, what is constructed in place of torch's own groups.
WATCHED: dict[str, type[logged.Logged]] = {
    native.torch_name: type("Watched", (_Watched, native), {})
    for native in (Gloo().group, Nccl().group)
}


def send_to(calls: Calls | None) -> None:
    """From now on calls of the groups of this process are noted there."""
    global _calls
    _calls = calls
    base.on_wait = bool if calls is None else calls.wait


def install() -> None:
    """Watch every group that this process makes from now on."""
    make = c10d._new_process_group_helper
    signature = inspect.signature(make)

    @functools.wraps(make)
    def watched(*given: Any, **named: Any) -> Any:
        backend = str(signature.bind(*given, **named).arguments.get("backend")).lower()
        several = len({pair.rpartition(":")[2] for pair in backend.split(",")}) > 1
        _put(not several)
        try:
            return make(*given, **named)
        finally:
            _put(True)
            name = backend.rpartition(":")[2]
            if several or name not in (*WATCHED, over_mpi.NAME, "undefined", "none", ""):
                unseen.append(f"a group of the backend {backend}")

    c10d._new_process_group_helper = watched
    split: Callable[..., Any] | None = getattr(c10d, "split_group", None)
    if split is not None:

        @functools.wraps(split)
        def told(*given: Any, **named: Any) -> Any:
            unseen.append("a group made by split_group")
            return split(*given, **named)

        c10d.split_group = told
    setattr(over_mpi, "MpiGroup", WatchedMpi)  # noqa: B010 - mypy takes it for a type
    _put(True)


def _put(ours: bool) -> None:
    """Our classes, or torch's own, under the names that torch builds groups from."""
    for watched in WATCHED.values():
        watched.install(ours)
