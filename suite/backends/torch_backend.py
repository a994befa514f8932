"""Backends of ``torch.distributed`` whose ranks are processes: torch's own, and those of vendors.

A package of a vendor subclasses :class:`TorchBackend` and names the class in its entry point
(docs/add-a-backend.md).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from shardproof.backends.backend import Backend, Joining

if TYPE_CHECKING:
    from shardproof.backends.logged import Logged


class TorchBackend(Backend):
    """Ranks are processes that talk by a backend of ``torch.distributed``.

    Cases run with ledgers, through a group of the suite that logs each call and hands it on
    unchanged.  Timed runs have none, and use the backend's own group.
    """

    #: What ``init_process_group`` is given; empty: :attr:`name`.
    torch_name: str = ""
    #: The class in ``torch.distributed.distributed_c10d`` that torch builds its groups from; empty:
    #: :meth:`load` registers the backend by ``torch.distributed.Backend.register_backend``.
    torch_class: str = ""
    #: What messages call it; empty: :attr:`name`.
    title: str = ""
    #: Modules that :meth:`load` imports.
    packages: tuple[str, ...] = ()

    def load(self) -> None:
        """Make torch know the backend; called in each rank's process, before it joins."""

    def available(self, world: int = 1) -> str | None:
        """Why ``world`` ranks cannot use it here: torch, a package or GPUs are missing."""
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"{self.title or self.name} needs the package {package}: install it"
        if self.torch_class:
            from torch import distributed

            if not distributed.is_backend_available(self.torch_name or self.name):
                return f"this torch is built without {self.title or self.name}"
        if self.device != "cuda":
            return None
        from shardproof.backends import cuda

        reason = cuda.available(world, self.shares_devices)
        return f"{self.title or self.name} {reason}" if reason else None

    def join(self, joining: Joining) -> None:
        """Take the rank's device, load the backend, and make the default group."""
        self.take_device(joining.rank)
        self.load()
        self.group.join_default(joining)

    def leave(self) -> bool:
        """Destroy all groups of this process and give torch its own groups back."""
        super().leave()
        self.group.install(ours=False)
        return True

    def take_device(self, rank: int) -> None:
        """Let this process compute on the device of ``rank``: one after the other, then again."""
        if self.device == "cuda":
            from shardproof.backends import cuda

            cuda.take(rank)
        elif self.device != "cpu":
            import torch

            module = torch.get_device_module(self.device)
            module.set_device(rank % module.device_count())

    def is_recording(self) -> bool:
        """Whether torch makes groups that log; those that only delay messages do not."""
        return self.group.is_installed() and not self.group.only_delays()

    @property
    def group(self) -> type[Logged]:
        """The class of the groups that log."""
        from shardproof.backends import logged

        return logged.group_of(self.torch_name or self.name, self.torch_class)
