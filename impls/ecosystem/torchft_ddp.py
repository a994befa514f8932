"""torchft's managed DDP over the suite's group, tested with all replicas alive.

Used: a lighthouse (on rank 0), one ``Manager`` a rank with a replica group of one, its
``allreduce`` behind torchft's ``DistributedDataParallel``, ``OptimizerWrapper`` (a quorum before
and a vote after every step), and healing: at the first quorum every replica takes the state of the
first one, sent by ``PGTransport``.  The group is the suite's, so that the ledger sees what is sent;
a quorum that lost a member would need another and is not judged here.

``use_async_quorum=False``: with torchft's default, ranks that still heal contribute zeros to the
first step, by design.  One compensation: ``allreduce`` divides by the replicas.  Cost: as
``naive_ddp``.  Tried with torchft 0.2.0.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from shardproof.contract import Capabilities
from shardproof.impls.ecosystem.whole import DDP_FEATURES, UNEQUAL, Whole

if importlib.util.find_spec("torchft") is not None:
    import torchft
    from torchft.checkpointing.pg_transport import PGTransport
    from torchft.coordination import LighthouseServer
    from torchft.process_group import ProcessGroupWrapper

    logging.getLogger("torchft").setLevel(logging.ERROR)

#: In which every call of torchft must end.
PATIENCE = timedelta(seconds=60)
HERE = "127.0.0.1"


class TorchftDDP(Whole):
    """The adapter."""

    package = "torchft"
    features = DDP_FEATURES

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """DDP that looks for unused parameters; its own broadcast of buffers has no effect."""
        usual = super().capabilities(options)
        return replace(usual, buffers="per_rank", declines=UNEQUAL)

    def shard(self, module: nn.Module) -> nn.Module:
        """A manager on every rank, and DDP that uses it."""
        comm, rank = self.mesh.comm("replicate"), self.mesh.rank
        at = f"{HERE}:0"
        self.lighthouse = LighthouseServer(at, self.mesh.world) if rank == 0 else None
        address = comm.broadcast_object(self.lighthouse and self.lighthouse.address())
        self.store = TCPStore(HERE, 0, 1, True, PATIENCE, wait_for_workers=False)
        group = ProcessGroupWrapper(PATIENCE, comm.group)
        group.configure = lambda *members, **more: None  # all members, always
        self.manager = torchft.Manager(
            group,
            self.heal,
            self.whole_state,
            min_replica_size=self.mesh.world,
            use_async_quorum=False,
            timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=HERE,
            store_port=self.store.port,
            lighthouse_addr=address,
            replica_id=f"replica_{rank}",
            hostname=HERE,
            checkpoint_transport=PGTransport(group, PATIENCE, torch.device("cpu")),
        )
        return torchft.DistributedDataParallel(self.manager, module)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside torchft's wrapper; its ``zero_grad`` requests the first quorum,
        which heals.
        """
        optimizer = torchft.Optimizer(self.manager, super().make_optimizer())
        self.optimizer = optimizer
        optimizer.zero_grad()
        return optimizer

    def whole_state(self) -> dict[str, Any]:
        """The state that another replica needs to continue from here."""
        return {"model": self.inner.state_dict(), "optimizer": self.optimizer.state_dict()}

    def heal(self, state: dict[str, Any]) -> None:
        """Continue from another replica's state."""
        self.inner.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Reduce in the last micro-batch only."""
        return nullcontext() if is_last else self.module.no_sync()  # type: ignore[operator]

    def abort(self) -> None:
        """End the threads of torchft."""
        if hasattr(self, "manager"):
            self.manager.shutdown(wait=False)
            if self.lighthouse is not None:
                self.lighthouse.shutdown()

    close = abort


IMPLEMENTATION = TorchftDDP
